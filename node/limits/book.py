"""What users may use, and what they have used of it: who is off, and what there is to tell. Pure.

Users are told by key. Times are Unix seconds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from enum import Enum
from heapq import heapify, heappop, heappush, nsmallest
from itertools import islice, repeat
from typing import NamedTuple

from node.limits.count import EXPIRY, NEAR, QUOTA, Count, begins, left, next_look, reached, reasons, roll
from node.limits.defaults import Defaults, Rules
from node.limits.limits import Limit, Way
from node.limits.records import Word, pack, unpack
from node.traffic.sums import Sums
from protos.service_pb2 import LimitsSummary

# Seconds for which it is remembered what users have used who are users no more: longer than any period.
REMEMBERED = 40 * 86_400.0
# And of how many of them at most: a controller may say names without end.
MOST_GONE = 300_000
# Bytes that nobody carries before they are read again.
CLOSE = 2**30
# Users above whom those of a whole set are seen to in parts, by `turn`.
MANY = 2000
# Moments above which those that are over are thrown away: each change of a user leaves one.
SPARE = 10_000


class News(Enum):
    """What can happen to a user. The value says it in a word."""

    NEAR = "near"
    REACHED = "reached"
    CUT = "cut"
    BACK = "back"


class Told(NamedTuple):
    """What happened to whom, and by which limit."""

    news: News
    key: str
    reason: str


class Book:
    """Satisfies `node.backend.desired.Limiter`. What happens is gathered in `news` until somebody takes it."""

    def __init__(
        self,
        now: Callable[[], float],
        defaults: Defaults | None = None,
        tags_of: Callable[[str], tuple[str, ...]] = lambda _: (),
        name_of: Callable[[str], str] = str,
    ) -> None:
        self.now = now
        self.name_of = name_of
        self._tags_of = tags_of
        self.news: list[Told] = []
        # Is told of whom other limits may hold, and who came or went with theirs.
        self.changed: Callable[[Collection[str]], None] = lambda _: None
        # Who is off; of users alone it means anything.
        self.off: set[str] = set()
        # Who may reach their quota soon, of those who were judged anew.
        self.close: set[str] = set()
        # Somebody's record is another one not for their bytes alone.
        self.stirred = False
        # Whose record is another one than was taken last.
        self.dirty: set[str] = set()
        self._rules = Rules(defaults or Defaults())
        self._users: Collection[str] = ()
        self._said: Mapping[str, bytes] = {}
        self._words: dict[str, Word] = {}
        self._counts: dict[str, Count] = {}
        self._limits: dict[str, Limit] = {}
        self._moments: list[tuple[float, str]] = []
        # Users of a whole set who are to be seen to yet.
        self._later: dict[str, None] = {}
        # Who is near their quota; of users alone it means anything.
        self._near: set[str] = set()
        # As long as they hold.
        self._summary: LimitsSummary | None = None
        self._limited: set[str] | None = None

    # What holds

    def limit_of(self, key: str) -> Limit:
        """What holds for a user. Cheap where it was asked before, or nobody has limits."""
        if not (self._said or self._words or self._rules.by_inbound):
            return self._rules.everybody
        limit = self._limits.get(key)
        if limit is None:
            tags = self._tags_of(key) if self._rules.by_inbound else ()
            limit = self._limits[key] = self._rules.of(self._own(key), tags)
        return limit

    @property
    def limits_anybody(self) -> bool:
        """Whether there may be anybody with limits."""
        return bool(self._said or self._words or self._rules.by_inbound or self._rules.everybody.any)

    def _own(self, key: str) -> bytes:
        word = self._words.get(key)
        said = self._said.get(key, b"")
        return word.limits if word is not None and word.over == said else said

    def limited(self) -> AbstractSet[str]:
        """The users who have limits."""
        if self._limited is None:
            mine = self._users if self._rules.everybody.any or self._rules.by_inbound else {*self._said, *self._words}
            self._limited = {key for key in mine if key in self._users and self.limit_of(key).any}
        return self._limited

    def is_user(self, key: str) -> bool:
        return key in self._users

    def knows(self, key: str) -> bool:
        """Whether there is anything to tell of them."""
        return key in self._users or key in self._counts or key in self._words

    def summary(self) -> LimitsSummary:
        """How many have limits, are off, and near their quota."""
        if self._summary is None:
            self._summary = self._sum_up()
        return self._summary

    def _sum_up(self) -> LimitsSummary:
        off = [(self._counts[key], self.limit_of(key)) for key in self.off if key in self._users]
        expired = sum(count.expired and not limit.expires_told for count, limit in off)
        near = sum(key in self._users and key not in self.off for key in self._near)
        return LimitsSummary(limited=len(self.limited()), off_quota=len(off) - expired, off_expired=expired, near=near)

    # Who there is

    def learn(self, said: Iterable[bytes]) -> None:
        if not self._rules.by_inbound:
            for packed in said:
                self._rules.of(packed, ())

    def install(self, said: Mapping[str, bytes], users: Collection[str]) -> AbstractSet[str]:
        before, was, limits = self._said, self._users, self._limits
        self._said, self._users, self._limits = said, users, {}
        self._summary = self._limited = None
        changed = [key for key, packed in said.items() if before.get(key) != packed]
        changed += before.keys() - said.keys()
        # Of those who were no users until now nothing was seen to.
        known = self._counts.keys() | self._words.keys()
        changed += [key for key in known if key in users and key not in was]
        if self._rules.by_inbound:
            # They may be in other inbounds than they were.
            changed += [key for key in users if limits.get(key) != self.limit_of(key)]
        elif self._rules.everybody.expires_at:
            changed += [key for key in users if key not in was]
        self._see_to(changed)
        return self.off

    def _see_to(self, changed: list[str]) -> None:
        """Judge these, of whom other limits may hold. Of many only those at once of whom something was told."""
        if len(changed) > MANY:
            self._later |= dict.fromkeys(changed)
            changed = [key for key in changed if (count := self._counts.get(key)) and (count.told or count.off_since)]
        for key in changed:
            self._judge(key)
        self.changed(changed)

    def follow(self, key: str) -> bool:
        self._limits.pop(key, None)
        self._summary = None
        self._judge(key)
        if self._limited is not None:
            (self._limited.add if key in self._users and self.limit_of(key).any else self._limited.discard)(key)
        if self.limits_anybody:
            self.changed((key,))
        return key in self.off

    def said(self, key: str) -> bytes:
        """What the user's own message says."""
        return self._said.get(key, b"")

    def say(self, key: str, limits: bytes | None) -> None:
        """SetLimits says this of a user, or nothing any more."""
        if limits is None:
            self._words.pop(key, None)
        else:
            self._words[key] = Word(limits, self._said.get(key, b""))
            self._counts.setdefault(key, Count(self.now()))
        self._stir(key)
        self.follow(key)

    # What is used

    def book(self, moved: Sums) -> list[tuple[str, int]]:
        """Users have carried this. Returns those who have a quota, with their bytes of the way that counts."""
        if not (self._counts or self._rules.everybody.quota or self._rules.by_inbound):
            return []
        return [
            (key, _counted(up, down, limit.way))
            for key, up, down in moved.rows()
            if (limit := self._add(key, up, down)) is not None
        ]

    def _add(self, key: str, up: int, down: int) -> Limit | None:
        """The limit of a user with a quota, who has carried this."""
        count, limit = self._counts.get(key), self.limit_of(key)
        if key not in self._users or not limit.quota:
            if count is not None and count.since is not None:
                # Whoever is no user now may be one again.
                count.add(up, down)
                self.dirty.add(key)
            return None
        if count is None or key in self._later:
            self._judge(key)
            count = self._counts[key]
        count.add(up, down)
        self.dirty.add(key)
        self._weigh(key, count, limit)
        return limit

    def turn(self, most: int | None = None) -> bool:
        """See to what happens by the clock alone, to so many at most. Returns whether there is more."""
        if some := [*islice(self._later, most)]:
            for key in some:
                del self._later[key]
                self._judge(key)
            self.changed(some)
            if self._later:
                return True
        now = self.now()
        for _ in repeat(None) if most is None else repeat(None, most):
            if not self._moments or self._moments[0][0] > now:
                return False
            _, key = heappop(self._moments)
            self._judge(key)
        return self.next_turn <= now

    def beginning(self, most: int) -> list[str]:
        """Users whose count begins anew with the next `turn`; where `most` are due it may be any of them."""
        now = self.now()
        due = {*islice(self._due(now), most)}
        if len(due) == most:
            return [*due]
        return [key for key in due if (count := self._counts.get(key)) and begins(count, self.limit_of(key), now)]

    def _due(self, now: float) -> Iterator[str]:
        """Whose moment has come. What is behind one that has not come in the heap has not, either."""
        places = [0]
        while places:
            place = places.pop()
            if place < len(self._moments) and self._moments[place][0] <= now:
                yield self._moments[place][1]
                places += 2 * place + 1, 2 * place + 2

    def look_again(self) -> None:
        """Have `turn` judge everybody anew: the clock was set back."""
        self._later |= dict.fromkeys(self._counts)

    @property
    def next_turn(self) -> float:
        """When there may be something to see to."""
        if self._later:
            return -math.inf
        return self._moments[0][0] if self._moments else math.inf

    def count_of(self, key: str) -> Count | None:
        return self._counts.get(key)

    def counts(self, key: str) -> bool:
        """Whether bytes of this user are counted, from now on if they were not: they come, and have a quota."""
        if key not in self._counts and key in self._users and self.limit_of(key).quota:
            self._judge(key)
        return key in self._counts

    def left(self, key: str) -> int | None:
        """Bytes that a user may still use; None where nothing keeps them from using more."""
        limit, count = self.limit_of(key), self._counts.get(key)
        return left(count, limit) if count is not None and limit.quota else None

    # What outlives the node

    def restore(self, records: Iterable[tuple[str, bytes]]) -> None:
        """What an earlier node left, which may be read late: what was said meanwhile stays, and bytes add up."""
        for key, packed in records:
            word, count = unpack(packed)
            self._limits.pop(key, None)
            if word is not None:
                self._words.setdefault(key, word)
            if count is not None:
                self._counts[key] = self._joined(key, count)
        self._limited = None
        for key in [key for key in self._counts.keys() | self._words.keys() if key in self._users]:
            self._judge(key)

    def _joined(self, key: str, earlier: Count) -> Count:
        """What an earlier node counted, with what this one did before it knew that."""
        count = self._counts.get(key)
        if count is not None and begins(earlier, self.limit_of(key), self.now()):
            return count
        if count is not None:
            earlier.add(count.up, count.down)
            self._stir(key)
        if key in self._users and key not in self.off:
            # They are in: it is news if they are not to be.
            earlier.off_since = 0.0
        return earlier

    def records(self, keys: Iterable[str]) -> dict[str, bytes | None]:
        """What is to be kept of these; None for nothing."""
        return {key: self._record(key) for key in keys}

    def everything(self) -> dict[str, bytes | None]:
        """All that is to be kept."""
        self.dirty.clear()
        return self.records({*self._words, *self._counts})

    @property
    def counted(self) -> list[str]:
        """Of whom there is a count, users or not."""
        return [*self._counts]

    @property
    def crowded(self) -> bool:
        """Whether more is remembered of users who are none than there is room for."""
        return len(self._counts) > len(self._users) + MOST_GONE

    def forget_gone(self, keys: Iterable[str]) -> None:
        """Note who of these is a user no more, and forget who has not been one for long."""
        now = self.now()
        for key in keys:
            count = self._counts.get(key)
            if count is None:
                continue
            if key in self._users:
                count.gone_since = 0.0
            elif not count.gone_since:
                count.gone_since = now
                self._stir(key)
            elif now - count.gone_since > REMEMBERED:
                self._forget(key)

    def make_room(self) -> None:
        """Of users who are none forget those who are gone for longest, down to half of what there is room for."""
        if self.crowded:
            gone = [
                (count.gone_since or math.inf, key) for key, count in self._counts.items() if key not in self._users
            ]
            for _, key in nsmallest(len(gone) - MOST_GONE // 2, gone):
                self._forget(key)

    def _forget(self, key: str) -> None:
        """Whoever comes with this name is somebody else."""
        del self._counts[key]
        self._words.pop(key, None)
        self.off.discard(key)
        self._near.discard(key)
        self._stir(key)

    def _record(self, key: str) -> bytes | None:
        word, count = self._words.get(key), self._counts.get(key)
        return pack(word, count) if word or count else None

    # Judging

    def _judge(self, key: str) -> None:
        """See whether this user is off, and when to look again."""
        if key not in self._users:
            return  # whoever is none keeps what was counted
        self._void(key)
        limit, now = self.limit_of(key), self.now()
        if not (limit.quota or limit.expires_at or key in self._counts or key in self._words):
            return
        count = self._count(key, limit)
        if roll(count, limit, now):
            self._stir(key)
        if (moment := next_look(count, limit, now)) < math.inf:
            heappush(self._moments, (moment, key))
            self._tidy()
        self._weigh(key, count, limit)
        if limit.quota and left(count, limit) < CLOSE:
            self.close.add(key)

    def _void(self, key: str) -> None:
        """What SetLimits said is over when the user's own message says something else than it did then."""
        word = self._words.get(key)
        if word is not None and word.over != self._said.get(key, b""):
            del self._words[key]
            self._stir(key)

    def _stir(self, key: str) -> None:
        self.dirty.add(key)
        self.stirred, self._summary = True, None

    def _count(self, key: str, limit: Limit) -> Count:
        count = self._counts.get(key)
        if count is None:
            count = self._counts[key] = Count(self.now())
            roll(count, limit, self.now())
            self._stir(key)
        return count

    def _weigh(self, key: str, count: Count, limit: Limit) -> None:
        """Tell what is new, and put the user off or let them in."""
        now = self.now()
        at = reached(count, limit, now)
        near = bool(limit.quota) and count.used(limit.way) >= NEAR * limit.quota
        if not (at or near or count.told or count.off_since or key in self._near):
            return  # most often
        why = reasons(at, limit)
        (self.off.add if why else self.off.discard)(key)
        (self._near.add if near else self._near.discard)(key)
        self._tell(key, count, limit, at, near)
        # Who was off when the node ended is no news.
        if bool(why) != bool(count.off_since):
            self._stir(key)
            count.off_since = now if why else 0.0
            self.news.append(Told(News.CUT if why else News.BACK, key, why[0] if why else ""))

    def _tell(self, key: str, count: Count, limit: Limit, at: tuple[str, ...], near: bool) -> None:
        if near and not count.near and QUOTA not in at:
            self.news.append(Told(News.NEAR, key, QUOTA))
        if QUOTA in at and limit.quota_told and not count.reached:
            self.news.append(Told(News.REACHED, key, QUOTA))
        if EXPIRY in at and limit.expires_told and not count.expired:
            self.news.append(Told(News.REACHED, key, EXPIRY))
        state = near, QUOTA in at, EXPIRY in at
        if state != (count.near, count.reached, count.expired):
            count.near, count.reached, count.expired = state
            self._stir(key)

    def _tidy(self) -> None:
        if len(self._moments) > SPARE + 2 * len(self._counts):
            now = self.now()
            looks = ((next_look(count, self.limit_of(key), now), key) for key, count in self._counts.items())
            self._moments = [look for look in looks if look[0] < math.inf]
            heapify(self._moments)


def _counted(up: int, down: int, way: Way) -> int:
    return (up if way is not Way.DOWN else 0) + (down if way is not Way.UP else 0)
