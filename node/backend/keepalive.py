"""The keep-alive: ends a backend after a time without calls from a controller."""

from __future__ import annotations

from collections.abc import Callable

from twisted.internet.interfaces import IDelayedCall, IReactorTime


class KeepAlive:
    """A timer that each call of a controller resets; `expired` gets the reason. With 0 `seconds` it is off."""

    def __init__(self, reactor: IReactorTime, expired: Callable[[str], None]) -> None:
        self._reactor = reactor
        self._expired = expired
        self._call: IDelayedCall | None = None
        self.seconds = 0.0

    @property
    def left(self) -> float | None:
        """Seconds until it expires; None if it does not run."""
        return max(0.0, self._call.getTime() - self._reactor.seconds()) if self._call else None

    def set(self, seconds: float, left: float | None = None) -> None:
        """Restart the timer with this period; the first one has only `left` seconds, if given."""
        self.stop()
        self.seconds = seconds
        if seconds:
            self._run(seconds if left is None else max(0.0, min(left, seconds)))

    def touch(self) -> None:
        """Reset the timer: a controller has called."""
        if self._call:
            self._call.reset(self.seconds)
        elif self.seconds:
            self._run(self.seconds)

    def stop(self) -> None:
        """Turn the timer off."""
        self.seconds = 0.0
        if self._call:
            self._call.cancel()
            self._call = None

    def _run(self, left: float) -> None:
        self._call = self._reactor.callLater(left, self._expire)

    def _expire(self) -> None:
        self._call = None
        self._expired(f"no controller has called for {self.seconds:g} s")
