"""Enforces quotas and expiry dates: bars users who have reached one, and lets them in again.

Driven by the bytes that `node.traffic` books, and by the clock; bars users through `node.backend.members`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from twisted.internet.defer import TimeoutError, ensureDeferred
from twisted.internet.interfaces import IReactorTime

from node.backend.members import Members
from node.base.alarm import Alarm
from node.base.governor import Governor
from node.base.logs import Logger
from node.base.reactor import PooledReactor
from node.base.slices import a_turn, slices
from node.contract.accounts import Refusal
from node.contract.connections import Address
from node.contract.counters import Scope
from node.events.kinds import Kind
from node.limits.book import Book, Report
from node.limits.connections import Connections, Enforcer
from node.limits.events import LimitEvents
from node.state.store import Store
from node.traffic.polling import Traffic, Watcher
from node.traffic.readings import FEW
from node.traffic.sums import Sums

# Seconds between two checks of the clock; seconds to wait for a reading before a count is reset.
TICK = 0.5
PATIENCE = 1.0
# Seconds by which the time of day may go back before all users are judged again.
BACK = 5.0
# Seconds until a failed change of barred users is retried.
AGAIN = 5.0
# Users handled before the reactor gets a turn: some five milliseconds.
TURN = 100
# Seconds between two looks for users who were removed.
TIDY = 3600.0
# Bytes by which users may exceed their quota: this part of it, or this number, whichever is greater.
PART, BYTES = 0.01, 16 * 1024**2
# Bytes a second that an idle user may start to carry at any moment, with the factor 1, and the factor by which an
# active one may speed up.
BURST, GROWTH = 62.5e6, 2.0
# Shortest time between two readings of one user, in seconds; largest part of the time that all readings may take.
SHORTEST, SHARE = 0.05, 0.03


class Enforcement(Enforcer, Watcher):
    """Bars users by their limits."""

    log = Logger()

    def __init__(
        self,
        reactor: PooledReactor,
        book: Book,
        connections: Connections,
        members: Members,
        traffic: Traffic,
        store: Store,
        events: LimitEvents,
    ) -> None:
        super().__init__(reactor, connections, "checking users' quotas and expiry dates", TICK)
        self._book = book
        self._members = members
        self._traffic = traffic
        self._store = store
        self._events = events
        self._readings = QuotaReadings(reactor, book, connections, traffic)
        self._soon = Alarm(reactor, self._begin)
        self._tidied = self._now = -math.inf
        # Users whom a SetLimits call is changing, and the latest such call.
        self._overriding: dict[str, object] = {}
        # News to report once the change is applied.
        self._unreported: list[Report] = []
        # When a change of barred users is retried, unless it succeeds before; infinite if none is pending.
        self._again_at = math.inf

    def stop(self) -> None:
        """The node ends: save the records; users stay as they are."""
        super().stop()
        self._readings.stop()
        self._keep(self._book.dirty)

    # Bytes

    def booked(self, moved: Mapping[Scope, Sums]) -> None:
        if Scope.USER in moved or Scope.USER_INBOUND in moved:
            for key, added in self._book.book(moved.get(Scope.USER, Sums()), moved.get(Scope.USER_INBOUND)):
                self._readings.moved(key, added)
            self.handle_soon()

    def saving(self, keys: Collection[str]) -> None:
        self._keep(self._book.dirty.intersection(keys))

    def arrived(self, key: str, address: Address) -> None:
        if self._book.counts(key):
            self._readings.look_at(key)

    # SetLimits

    async def override(self, overrides: Mapping[str, bytes | None]) -> Sequence[Refusal]:
        """Set these overrides by SetLimits, by key. Returns when they are in force and on disk.

        Of overlapping calls and messages of the users' own the last one holds. Returns the users who may come in again
        and whom the core refused.
        """
        await self._members.in_turn()
        call = object()
        in_force = self._book.in_force
        self._overriding |= dict.fromkeys(overrides, call)
        over = {key: in_force.own(key) for key in overrides}
        try:
            await self._read_soon([key for key in overrides if self._book.count_of(key) is None])
            async for part in slices(self._reactor, overrides.items(), TURN):
                for key, limits in part:
                    # A later call or message takes precedence. A removed user has no message.
                    same = key not in in_force.users or in_force.own(key) == over[key]
                    if same and self._overriding.get(key) is call:
                        self._book.override(key, limits)
        finally:
            for key in overrides:
                if self._overriding.get(key) is call:
                    del self._overriding[key]
        self.handle_soon()
        refused = await self._enforce()
        await self._store.flush()
        return refused

    # Bars

    def handle_soon(self) -> None:
        """Handle what may have happened to users, soon and once."""
        close, self._book.close = self._book.close, set()
        for key in close:
            self._readings.look_at(key)
        if self._book.news:
            self._soon.within(0)

    def _begin(self) -> None:
        ensureDeferred(self._enforce()).addErrback(
            lambda failure: self.log.failed(
                "users could not be barred or let in by their limits; the node tries again", failure
            )
        )

    async def _enforce(self) -> Sequence[Refusal]:
        news, self._book.news = self._book.news, []
        self._unreported += news
        noted = ensureDeferred(self._note())
        try:
            refused = await self._apply_bars(news)
        finally:
            await noted
        while reports := self._unreported[:TURN]:
            del self._unreported[:TURN]
            self._events.report(reports)
            if self._unreported:
                await a_turn(self._reactor)
        return refused

    async def _apply_bars(self, news: Iterable[Report]) -> Sequence[Refusal]:
        refused: Sequence[Refusal] = ()
        if self._again_at < math.inf or any(report.kind in (Kind.LIMIT_CUT, Kind.LIMIT_BACK) for report in news):
            self._again_at = self._reactor.seconds() + AGAIN
            refused = await self._members.keep_out(self._book.off)
            self._again_at = math.inf
        return refused

    # The clock

    async def _tick(self) -> None:
        now, before = self._book.now(), self._now
        self._now = now
        if now < before - BACK:
            self._book.judge_all_again()
        if self._book.next_turn <= now:
            await self._read_soon(self._book.about_to_reset(FEW + 1))
            while self._book.judge_due(TURN):
                await a_turn(self._reactor)
        self._book.make_room()
        if self._reactor.seconds() > self._tidied + TIDY:
            self._tidied = self._reactor.seconds()
            async for part in slices(self._reactor, self._book.counted, TURN):
                self._book.forget_gone(part)
        if self._reactor.seconds() >= self._again_at:
            self._begin()
        if self._book.needs_saving:
            await self._note()
        self.handle_soon()

    async def _read_soon(self, keys: Collection[str]) -> None:
        """Read the counters of these users now, but wait no longer than PATIENCE for a core that hangs."""
        if not keys:
            return
        wanted = frozenset((Scope.USER, key) for key in keys) if len(keys) <= FEW else None
        try:
            await ensureDeferred(self._traffic.read(wanted=wanted)).addTimeout(PATIENCE, self._reactor)
        except TimeoutError:
            self.log.debug(
                "the core did not answer within {seconds} s: counts start from the last reading", seconds=PATIENCE
            )

    async def _note(self) -> None:
        """Save all changed records, together with the bytes that they count."""
        self._book.needs_saving = False
        self._traffic.save_changed()
        async for part in slices(self._reactor, [*self._book.dirty], TURN):
            self._keep(self._book.dirty.intersection(part))

    def _keep(self, keys: AbstractSet[str]) -> None:
        if keys:
            self._store.limits(self._book.records(keys))
            self._book.dirty -= keys


@dataclass(slots=True)
class _Sight:
    """The last reading of a user: when, bytes a second, and when to read again."""

    seen: float
    speed: float
    due: float


class QuotaReadings:
    """Reads users close to their quota ahead of the regular readings, so that they do not exceed it by much.

    A user who could reach their quota before the next regular reading is read when they could be halfway into the bytes
    by which they may exceed it.
    """

    log = Logger()

    def __init__(self, reactor: IReactorTime, book: Book, connections: Connections, traffic: Traffic) -> None:
        self._reactor = reactor
        self._book = book
        self._connections = connections
        self._traffic = traffic
        self._sights: dict[str, _Sight] = {}
        self._alarm = Alarm(reactor, self._wake)
        self._busy = False
        self._governor = Governor(reactor, SHARE, shortest=SHORTEST)

    def moved(self, key: str, added: int) -> None:
        """The user has carried so many bytes since their last reading."""
        now = self._reactor.seconds()
        sight = self._sights.get(key)
        since = sight.seen if sight else now - self._traffic.every
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
            self._alarm.within(max(due - self._reactor.seconds(), self._governor.left))

    def _patience(self, key: str, speed: float) -> float:
        """Seconds until the user has to be read again, at this speed; infinite if no quota can bar them."""
        left = self._book.left(key)
        if left is None or left <= 0 or key in self._book.off:
            return math.inf
        over = max(PART * self._book.in_force.of(key).quota, BYTES)
        return max(SHORTEST, (left + over / 2) / max(GROWTH * speed, BURST * self._book.weights.most))

    def _arm(self) -> None:
        """Set the alarm for the user who is due first."""
        if self._sights:
            due = min(sight.due for sight in self._sights.values())
            self._alarm.set(max(due - self._reactor.seconds(), self._governor.left))
        else:
            self._alarm.cancel()

    def _wake(self) -> None:
        self._busy = True
        ensureDeferred(self._look()).addErrback(
            lambda failure: self.log.failed(
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
            self._governor.worked(began)
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
