"""Work that takes at most a share of the time, however long it takes each time."""

from __future__ import annotations

import math

from twisted.internet.interfaces import IReactorTime


class Governor:
    """Says when a piece of work may be done again: it rests after each time, for long enough to take its share.

    `share` is of the time (0 to 1); `shortest` and `longest` bound a rest (seconds).
    """

    def __init__(self, clock: IReactorTime, share: float, shortest: float = 0.0, longest: float = math.inf) -> None:
        self._clock = clock
        self._share, self._shortest, self._longest = share, shortest, longest
        # When the rest is over (seconds of the clock).
        self.until = -math.inf

    @property
    def left(self) -> float:
        """Seconds of rest that are left; 0 if the work may be done."""
        return max(0.0, self.until - self._clock.seconds())

    def rest(self, took: float) -> float:
        """Seconds to rest after work that took so many."""
        return min(max(self._shortest, took / self._share), self._longest)

    def worked(self, since: float) -> None:
        """Begin to rest: the work began then, and ends now."""
        now = self._clock.seconds()
        self.until = now + self.rest(now - since)
