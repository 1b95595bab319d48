"""When a core that went away is started again: at once, then after 1, 2, 4 … 30 s, and for ever at 30."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from twisted.internet.interfaces import IDelayedCall, IReactorTime

LONGEST = 30.0
# A core that stayed up for this long, in seconds, begins anew.
STEADY = 60.0


def delays() -> Iterator[float]:
    """Seconds before each try."""
    yield 0.0
    delay = 1.0
    while True:
        yield delay
        delay = min(LONGEST, 2 * delay)


class Backoff:
    """The next try, if one is due."""

    def __init__(self, reactor: IReactorTime) -> None:
        self._reactor = reactor
        self._delays = delays()
        self._last = 0.0
        self._call: IDelayedCall | None = None

    def later(self, action: Callable[[], None]) -> None:
        """Call `action` when it is time to try again."""
        now = self._reactor.seconds()
        if now - self._last > STEADY:
            self._delays = delays()
        delay = next(self._delays)
        self._last = now + delay
        self.cancel()
        self._call = self._reactor.callLater(delay, action)

    def cancel(self) -> None:
        """No try is wanted."""
        if self._call is not None and self._call.active():
            self._call.cancel()
        self._call = None

    def renew(self) -> None:
        """A controller wants another backend: its first crash is the first."""
        self.cancel()
        self._delays = delays()
