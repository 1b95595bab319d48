"""How long a backend goes on when no controller is heard of."""

from __future__ import annotations

from collections.abc import Callable

from twisted.internet.interfaces import IDelayedCall, IReactorTime


class KeepAlive:
    """A clock that each word of a controller sets back. `seconds` is 0 where nothing ends without one."""

    def __init__(self, reactor: IReactorTime, expired: Callable[[str], None]) -> None:
        self._reactor = reactor
        self._expired = expired
        self._call: IDelayedCall | None = None
        self.seconds = 0.0

    @property
    def left(self) -> float | None:
        """Seconds until it expires; None where it does not run."""
        return max(0.0, self._call.getTime() - self._reactor.seconds()) if self._call else None

    def set(self, seconds: float, left: float | None = None) -> None:
        """Begin anew with so many seconds, or with what is left of them."""
        self.stop()
        self.seconds = seconds
        if seconds:
            self._run(seconds if left is None else max(0.0, min(left, seconds)))

    def touch(self) -> None:
        """A controller said something."""
        if self._call:
            self._call.reset(self.seconds)
        elif self.seconds:
            self._run(self.seconds)

    def stop(self) -> None:
        """Nothing expires any more."""
        self.seconds = 0.0
        if self._call:
            self._call.cancel()
            self._call = None

    def _run(self, left: float) -> None:
        self._call = self._reactor.callLater(left, self._expire)

    def _expire(self) -> None:
        self._call = None
        self._expired(f"no controller was heard of for {self.seconds:g} s")
