"""A token bucket: so many at once, and so many more each second."""

from __future__ import annotations

from typing import NamedTuple


class Rate(NamedTuple):
    """How many at once, and how many more each second."""

    at_once: int
    each_second: float


class Bucket:
    """Full at the time `now`, in seconds of any clock."""

    def __init__(self, rate: Rate, now: float) -> None:
        self._rate = rate
        self._left: float = rate.at_once
        self._at = now

    def take(self, count: int, now: float) -> bool:
        """Take this many tokens, or all if there are fewer. Returns whether there were enough."""
        rate, waited, self._at = self._rate, now - self._at, now
        left = min(rate.at_once, self._left + waited * rate.each_second) - count
        self._left = max(left, 0.0)
        return left >= 0

    def fill(self) -> None:
        self._left = self._rate.at_once
