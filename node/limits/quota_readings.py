"""Schedules extra readings of users close to their quota, so that they do not exceed it by much.

A user who could reach their quota before the next regular reading is read when they could be halfway into the bytes by
which they may exceed it.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass

from twisted.internet.defer import ensureDeferred
from twisted.internet.interfaces import IDelayedCall, IReactorTime

from node.base.logs import Logger
from node.contract.counters import Scope
from node.traffic.readings import FEW, Wanted

# Bytes by which users may exceed their quota: this part of it, or this number, whichever is greater.
PART, BYTES = 0.01, 16 * 1024**2
# Bytes a second that an idle user may start to carry at any moment, and the factor by which an active one may speed up.
BURST, GROWTH = 62.5e6, 2.0
# Shortest time between two readings of one user, in seconds; largest part of the time that all readings may take.
SHORTEST, SHARE = 0.05, 0.03


@dataclass(slots=True)
class _Sight:
    """The last reading of a user: when, bytes a second, and when to read again."""

    seen: float
    speed: float
    due: float


def patience(quota: int, left: int, speed: float) -> float:
    """Seconds until a user with so many bytes left, at this speed, has to be read again. Pure."""
    over = max(PART * quota, BYTES)
    return max(SHORTEST, (left + over / 2) / max(GROWTH * speed, BURST))


class QuotaReadings:
    """Reads users close to their quota ahead of the regular readings.

    `budget` returns a user's quota and the bytes left of it; `may_carry` whether they may have a connection.
    `interval`: seconds between two regular readings of all users.
    """

    log = Logger()

    def __init__(
        self,
        reactor: IReactorTime,
        *,
        budget: Callable[[str], tuple[int, int] | None],
        may_carry: Callable[[str], bool],
        read: Callable[[Wanted], Awaitable[object]],
        interval: float,
    ) -> None:
        self._reactor = reactor
        self._budget = budget
        self._may_carry = may_carry
        self._read = read
        self._interval = interval
        self._sights: dict[str, _Sight] = {}
        self._call: IDelayedCall | None = None
        self._busy = False
        # No reading before this time.
        self._rest_until = -math.inf

    def __len__(self) -> int:
        return len(self._sights)

    def moved(self, key: str, added: int) -> None:
        """The user has carried so many bytes since their last reading."""
        now = self._reactor.seconds()
        sight = self._sights.get(key)
        since = sight.seen if sight else now - self._interval
        self._see(key, added / max(now - since, SHORTEST), now)

    def look_at(self, key: str) -> None:
        """The user connected, or their limit changed: their speed is not known."""
        sight = self._sights.get(key)
        if sight is None:
            self._see(key, 0.0, self._reactor.seconds())
            return
        # A user who reconnects all the time does not delay their reading.
        seen, due = sight.seen, sight.due
        self._see(key, sight.speed, self._reactor.seconds(), due)
        if again := self._sights.get(key):
            again.seen = seen

    def stop(self) -> None:
        """Read no more."""
        self._sights.clear()
        self._arm()

    def _see(self, key: str, speed: float, now: float, latest: float = math.inf) -> None:
        """Look at the user again when that is due, or at `latest` if that is sooner."""
        budget = self._budget(key)
        wait = patience(*budget, speed) if budget and budget[1] > 0 else math.inf
        if wait >= self._interval:
            self._sights.pop(key, None)
            return
        due = min(now + wait, latest)
        self._sights[key] = _Sight(now, speed, due)
        if not self._busy and (self._call is None or self._call.getTime() > due):
            self._arm()

    def _arm(self) -> None:
        """Set the timer for the user who is due first."""
        if self._call is not None:
            self._call.cancel()
            self._call = None
        if self._sights:
            due = max(min(sight.due for sight in self._sights.values()), self._rest_until)
            self._call = self._reactor.callLater(max(0.0, due - self._reactor.seconds()), self._wake)

    def _wake(self) -> None:
        self._call, self._busy = None, True
        ensureDeferred(self._look()).addErrback(
            lambda failure: self.log.failure(
                "the counters of users near their quota could not be read; the node tries again", failure
            )
        ).addBoth(self._over)

    def _over(self, _: object) -> None:
        self._busy = False
        self._arm()

    async def _look(self) -> None:
        began = self._reactor.seconds()
        due = sorted((sight.due, key) for key, sight in self._sights.items() if sight.due <= began)
        names = self._connected([key for _, key in due], began)[:FEW]
        if not names:
            return
        try:
            await self._read(frozenset((Scope.USER, key) for key in names))
        finally:
            now = self._reactor.seconds()
            self._rest_until = now + max(SHORTEST, (now - began) * (1 / SHARE - 1))
        for key in names:
            sight = self._sights.get(key)
            if sight is not None and sight.seen < began:
                self._see(key, 0.0, now)

    def _connected(self, keys: Collection[str], now: float) -> list[str]:
        """Those who may have a connection; the others are read when they connect, or after the interval."""
        found = []
        for key in keys:
            if self._may_carry(key):
                found.append(key)
            else:
                self._sights[key].due = now + self._interval
        return found
