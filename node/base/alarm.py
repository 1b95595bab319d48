"""A delayed call that is set, moved and cancelled again and again."""

from __future__ import annotations

from collections.abc import Callable

from twisted.internet.interfaces import IDelayedCall, IReactorTime


class Alarm:
    """Calls `ring` after the seconds that it is set to. At most one call is pending."""

    def __init__(self, reactor: IReactorTime, ring: Callable[[], object]) -> None:
        self._reactor = reactor
        self._ring = ring
        self._call: IDelayedCall | None = None

    @property
    def pending(self) -> bool:
        """Whether it is set."""
        return self._call is not None

    @property
    def left(self) -> float | None:
        """Seconds until it rings; None if it is not set."""
        return None if self._call is None else max(0.0, self._call.getTime() - self._reactor.seconds())

    def set(self, seconds: float) -> None:
        """Ring after these seconds, and not when it was set to before."""
        if self._call is None:
            self._call = self._reactor.callLater(seconds, self._due)
        else:
            self._call.reset(seconds)

    def within(self, seconds: float) -> None:
        """Ring after these seconds, unless it rings before."""
        if (left := self.left) is None or left > seconds:
            self.set(seconds)

    def cancel(self) -> None:
        """Do not ring."""
        call, self._call = self._call, None
        if call is not None:
            call.cancel()

    def _due(self) -> None:
        self._call = None
        self._ring()
