"""A reactor whose threads do their work at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from twisted.internet.task import Clock
from twisted.python.failure import Failure

from node.base.reactor import PooledReactor


class _Pool:
    def callInThreadWithCallback(
        self, told: Callable[[bool, Any], None], work: Callable[..., Any], *args: Any, **words: Any
    ) -> None:
        try:
            outcome = work(*args, **words)
        except Exception:  # noqa: BLE001 - as the pool has it
            told(False, Failure())
        else:
            told(True, outcome)


def pooled(clock: Clock) -> PooledReactor:
    reactor = cast(Any, clock)
    reactor.getThreadPool = _Pool
    reactor.callFromThread = lambda work, *args, **words: work(*args, **words)
    return cast(PooledReactor, reactor)
