"""Schedules extra readings of users close to their quota, so that they do not exceed it by much.

A user who could reach their quota before the next regular reading is read when they could be halfway into the bytes by
which they may exceed it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from twisted.internet.defer import ensureDeferred
from twisted.internet.interfaces import IReactorTime

from node.base.alarm import Alarm
from node.base.logs import Logger
from node.contract.counters import Scope
from node.limits.book import Book
from node.limits.connections import Connections
from node.traffic.polling import Traffic
from node.traffic.readings import FEW

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


class QuotaReadings:
    """Reads users close to their quota ahead of the regular readings."""

    log = Logger()

    def __init__(self, reactor: IReactorTime, book: Book, connections: Connections, traffic: Traffic) -> None:
        self._reactor = reactor
        self._book = book
        self._connections = connections
        self._traffic = traffic
        self._sights: dict[str, _Sight] = {}
        self._alarm = Alarm(reactor, self._wake)
        self._busy = False
        # No reading before this time.
        self._rest_until = -math.inf

    def moved(self, key: str, added: int) -> None:
        """The user has carried so many bytes since their last reading."""
        now = self._reactor.seconds()
        sight = self._sights.get(key)
        since = sight.seen if sight else now - self._traffic.interval
        self._see(key, added / max(now - since, SHORTEST), now)

    def look_at(self, key: str) -> None:
        """The user connected, or their limit changed: their speed is not known."""
        sight = self._sights.get(key) or _Sight(self._reactor.seconds(), 0.0, math.inf)
        # A user who reconnects all the time does not delay their reading.
        self._see(key, sight.speed, sight.seen, sight.due)

    def stop(self) -> None:
        """Read no more."""
        self._sights.clear()
        self._arm()

    def _see(self, key: str, speed: float, seen: float, latest: float = math.inf) -> None:
        """Look at the user again when that is due, or at `latest` if that is sooner."""
        wait, interval = self._patience(key, speed), self._traffic.interval
        if wait >= interval:
            self._sights.pop(key, None)
            return
        due = min(self._reactor.seconds() + wait, latest)
        self._sights[key] = _Sight(seen, speed, due)
        if not self._busy:
            self._alarm.within(max(0.0, max(due, self._rest_until) - self._reactor.seconds()))

    def _patience(self, key: str, speed: float) -> float:
        """Seconds until the user has to be read again, at this speed; infinite if no quota can bar them."""
        left = self._book.left(key)
        if left is None or left <= 0 or key in self._book.off:
            return math.inf
        over = max(PART * self._book.in_force.of(key).quota, BYTES)
        return max(SHORTEST, (left + over / 2) / max(GROWTH * speed, BURST))

    def _arm(self) -> None:
        """Set the alarm for the user who is due first."""
        if self._sights:
            due = max(min(sight.due for sight in self._sights.values()), self._rest_until)
            self._alarm.set(max(0.0, due - self._reactor.seconds()))
        else:
            self._alarm.cancel()

    def _wake(self) -> None:
        self._busy = True
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
        names = [key for _, key in due if self._may_carry(key, began)][:FEW]
        if not names:
            return
        try:
            await self._traffic.read(wanted=frozenset((Scope.USER, key) for key in names))
        finally:
            now = self._reactor.seconds()
            self._rest_until = now + max(SHORTEST, (now - began) * (1 / SHARE - 1))
        for key in names:
            sight = self._sights.get(key)
            if sight is not None and sight.seen < began:
                self._see(key, 0.0, now)

    def _may_carry(self, key: str, now: float) -> bool:
        """Whether the user may have a connection; if not, they are read when they connect, or after the interval."""
        may_carry = self._connections.blind or self._connections.may_carry(key)
        if not may_carry:
            self._sights[key].due = now + self._traffic.interval
        return may_carry
