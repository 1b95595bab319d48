"""Work in the reactor's threads: what reads disks, waits for the kernel, or computes for long."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

from twisted.internet.defer import Deferred
from twisted.internet.threads import deferToThreadPool

from node.base.reactor import PooledReactor

P = ParamSpec("P")
T = TypeVar("T")


def in_pool(reactor: PooledReactor, work: Callable[P, T], *arguments: P.args, **words: P.kwargs) -> Deferred[T]:
    """Run `work` in a thread of the reactor's pool; fires with its result, or with what it raises."""
    return deferToThreadPool(reactor, reactor.getThreadPool(), work, *arguments, **words)
