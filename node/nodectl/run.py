"""Run a command's coroutine on the reactor, to its end, to Ctrl-C, or until the reader of its output is gone."""

from __future__ import annotations

import errno
import os
import stat
import sys
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar, cast

from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.interfaces import IReactorFDSet, IReadDescriptor
from twisted.python.failure import Failure
from zope.interface import implementer

from node.base.reactor import Reactor

T = TypeVar("T")


def run(main: Callable[[Reactor], Coroutine[Any, Any, T]]) -> T:
    """Run a coroutine on the reactor; once per process.

    Raises what it raises, `KeyboardInterrupt` after Ctrl-C, `BrokenPipeError` if the reader of standard output is gone.
    """
    from twisted.internet import reactor

    return _Run(cast(Reactor, reactor), main).whole()


class _Run(Generic[T]):
    """One run of the reactor. On an interrupt it cancels the coroutine and waits for its cleanup before it stops."""

    def __init__(self, reactor: Reactor, main: Callable[[Reactor], Coroutine[Any, Any, T]]) -> None:
        self._reactor = reactor
        self._main = main
        self._outcome: list[T | Failure] = []
        self._work: Deferred[None] | None = None
        self._broken = False

    def whole(self) -> T:
        self._reactor.callWhenRunning(self._begin)
        self._reactor.addSystemEventTrigger("before", "shutdown", self._end)
        self._reactor.run()
        if self._broken:
            raise BrokenPipeError(errno.EPIPE, "the reader of standard output is gone")
        outcome = self._outcome[0] if self._outcome else Failure(CancelledError())
        if not isinstance(outcome, Failure):
            return outcome
        if outcome.check(CancelledError):
            raise KeyboardInterrupt
        assert outcome.value is not None
        raise outcome.value

    def _begin(self) -> None:
        if (output := _piped_output()) is not None:
            # Its other end is noticed also while there is nothing to write; there is nothing to read.
            IReactorFDSet(self._reactor).addReader(Descriptor(output, lambda: None, self._break))
        work = Deferred.fromCoroutine(self._main(self._reactor))
        self._work = work.addBoth(self._outcome.append)
        self._work.addBoth(lambda _: self._reactor.callLater(0, self._stop))

    def _end(self) -> Deferred[None] | None:
        if self._work is not None and not self._outcome:
            self._work.cancel()
        return self._work

    def _break(self) -> None:
        if not self._outcome:  # else the reactor closed the pipe itself when it stopped
            self._broken = True
            self._stop()

    def _stop(self) -> None:
        if self._reactor.running:
            self._reactor.stop()


def _piped_output() -> int | None:
    """The descriptor of standard output if that is a pipe."""
    try:
        number = sys.stdout.fileno()
        return number if stat.S_ISFIFO(os.fstat(number).st_mode) else None
    except (OSError, ValueError):  # closed, or not a file
        return None


@implementer(IReadDescriptor)
class Descriptor:
    """A file descriptor that the reactor reads by `read`; `lost` is called when its other end is gone."""

    def __init__(self, number: int, read: Callable[[], Failure | None], lost: Callable[[], None]) -> None:
        self._number = number
        self._read = read
        self._lost = lost

    def fileno(self) -> int:
        return self._number

    def logPrefix(self) -> str:
        return "nodectl"

    def doRead(self) -> Failure | None:
        return self._read()

    def connectionLost(self, reason: Failure) -> None:
        self._lost()
