"""When a core that went away is started again.

At once if it had served for a while, or if it is the first time; else after 1, 2, 4 … 30 s, and for ever at 30.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain, repeat

from twisted.internet.interfaces import IDelayedCall, IReactorTime

LONGEST = 30.0
# A core that served for this long, in seconds, does not die young.
STEADY = 2.0
# Twisted's policy for this comes with all that clients need, which is twenty times as long to import.
_FIRST = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0)


def delays() -> Iterator[float]:
    """Seconds before each try."""
    return chain(_FIRST, repeat(LONGEST))


class Backoff:
    """The next try, if one is due."""

    def __init__(self, reactor: IReactorTime) -> None:
        self._reactor = reactor
        self._delays = delays()
        # Since when a core serves, without a crash.
        self._since: float | None = None
        self._call: IDelayedCall | None = None

    @property
    def pending(self) -> bool:
        """A try is to come."""
        return self._call is not None and self._call.active()

    def served(self) -> None:
        """A core is up. One that takes another's place in good order goes on with that one's time."""
        if self._since is None:
            self._since = self._reactor.seconds()

    def later(self, action: Callable[[], None]) -> float:
        """It is down. Call `action` when it is time to try again, after the seconds that are returned."""
        if self._since is not None and self._reactor.seconds() - self._since >= STEADY:
            self._delays = delays()
        self._since = None
        self.cancel()
        seconds = next(self._delays)
        self._call = self._reactor.callLater(seconds, action)
        return seconds

    def cancel(self) -> None:
        """No try is wanted."""
        if self._call is not None and self._call.active():
            self._call.cancel()
        self._call = None

    def renew(self) -> None:
        """A controller wants another backend: its first crash is the first."""
        self.cancel()
        self._delays, self._since = delays(), None
