"""Periodic work: an exception does not end it, and `info` warns for as long as it fails."""

from __future__ import annotations

from collections.abc import Callable

from twisted.internet.defer import CancelledError, Deferred, maybeDeferred
from twisted.internet.interfaces import IReactorTime
from twisted.internet.task import LoopingCall
from twisted.python.failure import Failure

from node.base.logs import Logger

# Characters of an exception's text in a warning; the log has all of it.
CUT = 200


class Periodic:
    """Do `work` every `seconds`, never twice at once. `name` completes the sentence "… failed"."""

    log = Logger()

    def __init__(self, name: str, work: Callable[[], object], seconds: float, clock: IReactorTime) -> None:
        self._name = name
        self._work = work
        self._seconds = seconds
        self._fault = ""
        self._under_way: Deferred[object] | None = None
        self._loop = LoopingCall(self._once)
        self._loop.clock = clock

    @property
    def warnings(self) -> list[str]:
        """One warning if the last run failed."""
        return [f"{self._name} failed: {self._fault}; the node's log has more"] if self._fault else []

    @property
    def running(self) -> bool:
        """Whether it was started, and not stopped."""
        return self._loop.running

    def start(self) -> None:
        """Begin; the first run is after `seconds`."""
        self._loop.start(self._seconds, now=False)

    def stop(self) -> None:
        """Cancel the run under way, and begin no more. May be called again, and before `start`."""
        if self._loop.running:
            self._loop.stop()
        if self._under_way is not None:
            self._under_way.cancel()

    def _once(self) -> Deferred[object]:
        done = self._under_way = maybeDeferred(self._work)
        done.addCallbacks(self._succeeded, self._failed)
        done.addBoth(self._over)
        return done

    def _over(self, _: object) -> None:
        self._under_way = None

    def _succeeded(self, _: object) -> None:
        if self._fault:
            self.log.info("{name} works again", name=self._name)
        self._fault = ""

    def _failed(self, failure: Failure) -> None:
        """Log the failure, unless it is the same as the last one."""
        if failure.check(CancelledError) and not self._loop.running:
            return
        fault = " ".join(f"{type(failure.value).__name__}: {failure.value}".split())[:CUT]
        if fault != self._fault:
            self.log.failed("{name} failed; the node tries again", failure, name=self._name)
        self._fault = fault
