"""Has users out of the core when they have used what they may, and in again when they may use more.

It looks at what `node.traffic` books, and at the clock; it changes who is off through `node.backend.members`.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence, Sized
from collections.abc import Set as AbstractSet
from typing import Protocol

from twisted.internet.defer import TimeoutError, ensureDeferred
from twisted.internet.task import deferLater
from twisted.python.failure import Failure

from node.contract.counters import Scope
from node.limits.book import Book, News, Told
from node.limits.events import LimitEvents
from node.limits.lookout import Lookout
from node.logs import Logger
from node.periodic import Periodic
from node.reactor import PooledReactor
from node.state.store import Store
from node.traffic.readings import FEW, Wanted
from node.traffic.sums import Sums

# Seconds between two looks at the clock; seconds for which a reading is waited for before a count begins anew.
TICK = 0.5
PATIENCE = 1.0
# Seconds by which the time of day may go back without anybody being looked at for it.
BACK = 5.0
# Seconds after which it is tried again to have users out, or in.
AGAIN = 5.0
# Users after whom others have their turn: some five milliseconds.
TURN = 100
# Seconds between two looks at who is a user no more.
TIDY = 3600.0


class People(Protocol):
    """Who may change who is in: see `node.backend.members.Members`."""

    async def in_turn(self) -> None: ...

    async def keep_out(self, off: AbstractSet[str]) -> None: ...


class Enforcement:
    """Satisfies `node.traffic.polling.Limits`.

    `read` has counters read, of everybody or of some, `save` has the bytes that were booked noted; `may_carry` and
    `interval` are for a `Lookout`.
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
        self.lookout = Lookout(reactor, budget=self._budget, may_carry=may_carry, read=read, interval=interval)
        self._clock = Periodic("looking at the days of users' limits", self._tick, TICK, reactor)
        self._tidied = self._now = -math.inf
        self._due = False
        # Of whom something is being said by SetLimits, and by which call last.
        self._saying: dict[str, object] = {}
        # What is told when it is so.
        self._untold: list[Told] = []
        # When it is tried again to have users out, or in, unless it is done by then.
        self._again_at = math.inf

    @property
    def warnings(self) -> list[str]:
        """What an operator should know of it."""
        return self._clock.warnings

    def start(self) -> None:
        self._clock.start()

    def stop(self) -> None:
        """The node ends: what is known stays as it is."""
        self._clock.stop()
        self.lookout.stop()
        self._events.close()
        self._keep(self._book.dirty)

    # Bytes

    def booked(self, moved: Sums) -> None:
        """Satisfies `node.traffic.polling.Limits`."""
        for key, added in self._book.book(moved):
            self.lookout.moved(key, added)
        self.heed()

    def saving(self, keys: Collection[str]) -> None:
        """Satisfies `node.traffic.polling.Limits`: what was used goes to disk with the bytes that it was."""
        self._keep(self._book.dirty.intersection(keys))

    def arrived(self, key: str) -> None:
        """The user has a new connection."""
        if self._book.counts(key):
            self.lookout.look_at(key)

    # Words

    async def say(self, words: Mapping[str, bytes | None]) -> None:
        """SetLimits says this of these users, by key. Returns when it is in force and on disk.

        Of words that overlap those hold that came last, also of the users' own.
        """
        await self._people.in_turn()
        call = object()
        self._saying |= dict.fromkeys(words, call)
        over = {key: self._book.said(key) for key in words}
        try:
            await self._read_soon([key for key in words if self._book.count_of(key) is None])
            for number, (key, limits) in enumerate(words.items(), 1):
                # What came meanwhile is the last word.
                if self._saying.get(key) is call and self._holds(key, over[key]):
                    self._book.say(key, limits)
                if number % TURN == 0:
                    await deferLater(self._reactor, 0)
        finally:
            for key in words:
                if self._saying.get(key) is call:
                    del self._saying[key]
        self.heed()
        await self._enforce()
        await self._store.flush()

    def _holds(self, key: str, over: bytes) -> bool:
        """Whether a user's own message says what it did; of who is no user there is none."""
        return not self._book.is_user(key) or self._book.said(key) == over

    def heed(self) -> None:
        """Something may have happened to users: see to it soon, once."""
        close, self._book.close = self._book.close, set()
        for key in close:
            self.lookout.look_at(key)
        if self._book.news and not self._due:
            self._due = True
            self._reactor.callLater(0, self._begin)

    def _begin(self) -> None:
        ensureDeferred(self._enforce()).addErrback(self._not_done)

    def _not_done(self, failure: Failure) -> None:
        self.log.failure("users were not put out, or not let in, by their limits; it is tried again", failure)

    async def _enforce(self) -> None:
        self._due = False
        news, self._book.news = self._book.news, []
        self._untold += news
        noted = ensureDeferred(self._note())
        try:
            await self._put_out(news)
        finally:
            await noted
        while self._untold:
            told, self._untold = self._untold[:TURN], self._untold[TURN:]
            self._events.tell(told)
            await self._breathe(told)

    async def _put_out(self, news: Iterable[Told]) -> None:
        if self._again_at < math.inf or any(told.news in (News.CUT, News.BACK) for told in news):
            self._again_at = self._reactor.seconds() + AGAIN
            await self._people.keep_out(self._book.off)
            self._again_at = math.inf

    # The clock

    async def _tick(self) -> None:
        now, before = self._book.now(), self._now
        self._now = now
        if now < before - BACK:
            self._book.look_again()
        if self._book.next_turn <= now:
            await self._read_soon(self._book.beginning(FEW + 1))
            while self._book.turn(TURN):
                await deferLater(self._reactor, 0)
        self._book.make_room()
        if self._reactor.seconds() > self._tidied + TIDY:
            self._tidied = self._reactor.seconds()
            for part in _parts(self._book.counted):
                self._book.forget_gone(part)
                await self._breathe(part)
        if self._reactor.seconds() >= self._again_at:
            self._begin()
        if self._book.stirred:
            await self._note()
        self.heed()

    async def _read_soon(self, keys: Collection[str]) -> None:
        """Have what these users carried until now booked; a core that hangs is not waited for."""
        if not keys:
            return
        wanted = frozenset((Scope.USER, key) for key in keys) if len(keys) <= FEW else None
        try:
            await ensureDeferred(self._read(wanted)).addTimeout(PATIENCE, self._reactor)  # type: ignore[arg-type]
        except TimeoutError:
            self.log.debug("counts begin anew by what was read before")

    def _budget(self, key: str) -> tuple[int, int] | None:
        left = self._book.left(key)
        return None if left is None or key in self._book.off else (self._book.limit_of(key).quota, left)

    async def _note(self) -> None:
        """Have all on disk: what was used with the bytes that it was, as far as those are not there."""
        self._book.stirred = False
        self._save()
        for part in _parts([*self._book.dirty]):
            self._keep(self._book.dirty.intersection(part))
            await self._breathe(part)

    async def _breathe(self, part: Sized) -> None:
        """Let others work before the next part, if there may be one."""
        if len(part) == TURN:
            await deferLater(self._reactor, 0)

    def _keep(self, keys: AbstractSet[str]) -> None:
        if keys:
            self._store.limits(self._book.records(keys))
            self._book.dirty -= keys


def _parts(keys: Sequence[str]) -> Iterator[Sequence[str]]:
    return (keys[begin : begin + TURN] for begin in range(0, len(keys), TURN))
