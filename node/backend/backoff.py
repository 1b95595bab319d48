"""Backoff for restarting a core that ended.

The first retry comes at once, also after a core that had served for a while; later ones after 1, 2, 4 … 30 s, then
every 30 s without end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain, repeat

from twisted.internet.interfaces import IReactorTime

from node.base.alarm import Alarm

LONGEST = 30.0
# A core that served for this many seconds resets the backoff.
STEADY = 2.0
# Not Twisted's retry policy: importing it pulls in all of its client code and takes twenty times as long.
_FIRST = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0)


def delays() -> Iterator[float]:
    """Yield the seconds to wait before each retry."""
    return chain(_FIRST, repeat(LONGEST))


class Backoff:
    """Schedules the next retry; at most one is pending."""

    def __init__(self, reactor: IReactorTime) -> None:
        self._reactor = reactor
        self._delays = delays()
        # When a core began to serve; None after a crash.
        self._since: float | None = None
        self._action: Callable[[], None] = lambda: None
        self._alarm = Alarm(reactor, lambda: self._action())

    @property
    def pending(self) -> bool:
        """Whether a retry is scheduled."""
        return self._alarm.pending

    def served(self) -> None:
        """Note that a core serves. One that takes over from a healthy core continues that one's serving time."""
        if self._since is None:
            self._since = self._reactor.seconds()

    def later(self, action: Callable[[], None]) -> float:
        """Note that the core is down and schedule `action` as the next retry. Returns the seconds until then."""
        if self._since is not None and self._reactor.seconds() - self._since >= STEADY:
            self._delays = delays()
        self._since = None
        seconds = next(self._delays)
        self._action = action
        self._alarm.set(seconds)
        return seconds

    def cancel(self) -> None:
        """Cancel the pending retry, if any."""
        self._alarm.cancel()

    def renew(self) -> None:
        """Reset: a controller wants another backend, whose first retry comes at once."""
        self.cancel()
        self._delays, self._since = delays(), None
