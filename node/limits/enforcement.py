"""Enforces quotas and expiry dates: bars users who have reached one, and lets them in again.

Driven by the bytes that `node.traffic` books, and by the clock; bars users through `node.backend.members`.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence, Sized
from collections.abc import Set as AbstractSet
from typing import Protocol

from twisted.internet.defer import TimeoutError, ensureDeferred
from twisted.internet.task import deferLater
from twisted.python.failure import Failure

from node.base.logs import Logger
from node.base.periodic import Periodic
from node.base.reactor import PooledReactor
from node.contract.accounts import Refusal
from node.contract.counters import Scope
from node.limits.book import Book, News, Report
from node.limits.events import LimitEvents
from node.limits.quota_readings import QuotaReadings
from node.state.store import Store
from node.traffic.readings import FEW, Wanted
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


class People(Protocol):
    """Applies barred users to the core: see `node.backend.members.Members`."""

    async def in_turn(self) -> None: ...

    async def keep_out(self, off: AbstractSet[str]) -> Sequence[Refusal]: ...


class Enforcement:
    """Bars users by their limits. Satisfies `node.traffic.polling.Limits`.

    `read` reads the counters of all users or of some; `save` writes booked bytes to the state file; `may_carry` and
    `interval` are for the `QuotaReadings`.
    """

    log = Logger()

    def __init__(
        self,
        reactor: PooledReactor,
        book: Book,
        people: People,
        store: Store,
        events: LimitEvents,
        *,
        read: Callable[[Wanted], Awaitable[object]],
        save: Callable[[], None],
        may_carry: Callable[[str], bool],
        interval: float,
    ) -> None:
        self._reactor = reactor
        self._book = book
        self._people = people
        self._store = store
        self._events = events
        self._read = read
        self._save = save
        self.readings = QuotaReadings(reactor, budget=self._budget, may_carry=may_carry, read=read, interval=interval)
        self._clock = Periodic("checking users' quotas and expiry dates", self._tick, TICK, reactor)
        self._tidied = self._now = -math.inf
        self._due = False
        # Users whom a SetLimits call is changing, and the latest such call.
        self._overriding: dict[str, object] = {}
        # News to report once the change is applied.
        self._unreported: list[Report] = []
        # When a change of barred users is retried, unless it succeeds before; infinite if none is pending.
        self._again_at = math.inf

    @property
    def warnings(self) -> list[str]:
        """Warnings for `info`."""
        return self._clock.warnings

    def start(self) -> None:
        self._clock.start()

    def stop(self) -> None:
        """The node ends: save the records; users stay as they are."""
        self._clock.stop()
        self.readings.stop()
        self._events.close()
        self._keep(self._book.dirty)

    # Bytes

    def booked(self, moved: Sums) -> None:
        """Satisfies `node.traffic.polling.Limits`."""
        for key, added in self._book.book(moved):
            self.readings.moved(key, added)
        self.handle_soon()

    def saving(self, keys: Collection[str]) -> None:
        """Satisfies `node.traffic.polling.Limits`: usage is saved together with the bytes that it counts."""
        self._keep(self._book.dirty.intersection(keys))

    def arrived(self, key: str) -> None:
        """Called when the user has a new connection."""
        if self._book.counts(key):
            self.readings.look_at(key)

    # SetLimits

    async def override(self, overrides: Mapping[str, bytes | None]) -> Sequence[Refusal]:
        """Set these overrides by SetLimits, by key. Returns when they are in force and on disk.

        Of overlapping calls and messages of the users' own the last one holds. Returns the users who may come in again
        and whom the core refused.
        """
        await self._people.in_turn()
        call = object()
        self._overriding |= dict.fromkeys(overrides, call)
        over = {key: self._book.own_limits(key) for key in overrides}
        try:
            await self._read_soon([key for key in overrides if self._book.count_of(key) is None])
            for number, (key, limits) in enumerate(overrides.items(), 1):
                # A later call or message takes precedence.
                if self._overriding.get(key) is call and self._holds(key, over[key]):
                    self._book.override(key, limits)
                if number % TURN == 0:
                    await deferLater(self._reactor, 0)
        finally:
            for key in overrides:
                if self._overriding.get(key) is call:
                    del self._overriding[key]
        self.handle_soon()
        refused = await self._enforce()
        await self._store.flush()
        return refused

    def _holds(self, key: str, over: bytes) -> bool:
        """Whether the user's own message is still this one; a removed user has none."""
        return not self._book.is_user(key) or self._book.own_limits(key) == over

    def handle_soon(self) -> None:
        """Handle what may have happened to users, soon and once."""
        close, self._book.close = self._book.close, set()
        for key in close:
            self.readings.look_at(key)
        if self._book.news and not self._due:
            self._due = True
            self._reactor.callLater(0, self._begin)

    def _begin(self) -> None:
        ensureDeferred(self._enforce()).addErrback(self._not_done)

    def _not_done(self, failure: Failure) -> None:
        self.log.failure("users could not be barred or let in by their limits; the node tries again", failure)

    async def _enforce(self) -> Sequence[Refusal]:
        self._due = False
        news, self._book.news = self._book.news, []
        self._unreported += news
        noted = ensureDeferred(self._note())
        try:
            refused = await self._apply_bars(news)
        finally:
            await noted
        while self._unreported:
            reports, self._unreported = self._unreported[:TURN], self._unreported[TURN:]
            self._events.report(reports)
            await self._yield(reports)
        return refused

    async def _apply_bars(self, news: Iterable[Report]) -> Sequence[Refusal]:
        refused: Sequence[Refusal] = ()
        if self._again_at < math.inf or any(report.news in (News.CUT, News.BACK) for report in news):
            self._again_at = self._reactor.seconds() + AGAIN
            refused = await self._people.keep_out(self._book.off)
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
                await deferLater(self._reactor, 0)
        self._book.make_room()
        if self._reactor.seconds() > self._tidied + TIDY:
            self._tidied = self._reactor.seconds()
            for part in _parts(self._book.counted):
                self._book.forget_gone(part)
                await self._yield(part)
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
            await ensureDeferred(self._read(wanted)).addTimeout(PATIENCE, self._reactor)  # type: ignore[arg-type]
        except TimeoutError:
            self.log.debug(
                "the core did not answer within {seconds} s: counts start from the last reading", seconds=PATIENCE
            )

    def _budget(self, key: str) -> tuple[int, int] | None:
        left = self._book.left(key)
        return None if left is None or key in self._book.off else (self._book.limit_of(key).quota, left)

    async def _note(self) -> None:
        """Save all changed records, together with the bytes that they count."""
        self._book.needs_saving = False
        self._save()
        for part in _parts([*self._book.dirty]):
            self._keep(self._book.dirty.intersection(part))
            await self._yield(part)

    async def _yield(self, part: Sized) -> None:
        """Give the reactor a turn after a full part."""
        if len(part) == TURN:
            await deferLater(self._reactor, 0)

    def _keep(self, keys: AbstractSet[str]) -> None:
        if keys:
            self._store.limits(self._book.records(keys))
            self._book.dirty -= keys


def _parts(keys: Sequence[str]) -> Iterator[Sequence[str]]:
    return (keys[begin : begin + TURN] for begin in range(0, len(keys), TURN))
