"""Work in other threads: what reads disks, waits for the kernel, or computes for long."""

from __future__ import annotations

from collections.abc import Callable
from queue import SimpleQueue
from threading import Thread
from typing import Any, ParamSpec, TypeVar

from twisted.internet.defer import Deferred
from twisted.internet.threads import deferToThreadPool
from twisted.python.failure import Failure

from node.base.reactor import PooledReactor

P = ParamSpec("P")
T = TypeVar("T")


def in_pool(reactor: PooledReactor, work: Callable[P, T], *arguments: P.args, **words: P.kwargs) -> Deferred[T]:
    """Run `work` in a thread of the reactor's pool; fires with its result, or with what it raises."""
    return deferToThreadPool(reactor, reactor.getThreadPool(), work, *arguments, **words)


class OneThread:
    """A pool of one thread, which does one work after another. Twisted's costs more than a short work."""

    def __init__(self, name: str) -> None:
        self._works: SimpleQueue[tuple[Callable[..., None], Callable[..., object], tuple[Any, ...]] | None]
        self._works = SimpleQueue()
        self._thread = Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Return when all works are done."""
        self._works.put(None)
        if self._thread.is_alive():
            self._thread.join()

    def callInThreadWithCallback(self, done: Callable[..., None], work: Callable[..., object], *arguments: Any) -> None:
        """Call `done` in the thread with True and the result of the work, or with False and its failure."""
        self._works.put((done, work, arguments))

    def _run(self) -> None:
        for done, work, arguments in iter(self._works.get, None):
            try:
                outcome = True, work(*arguments)
            except BaseException:  # noqa: BLE001 - the caller gets it
                outcome = False, Failure()
            done(*outcome)
