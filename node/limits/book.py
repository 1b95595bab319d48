"""Limits and usage of all users: who is barred ("off") by a quota or expiry date, and what to report.

Users are identified by key. Times are Unix seconds.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from heapq import heapify, heappop, heappush, nsmallest
from itertools import chain, islice
from typing import NamedTuple

from node.backend.roster import Limiter
from node.contract.counters import Both
from node.events.kinds import Kind
from node.limits.connections import Connections
from node.limits.count import (
    ABUSE,
    EXPIRY,
    NEAR,
    QUOTA,
    Count,
    follow_zone,
    is_due,
    left,
    next_change,
    pack,
    reached,
    reasons,
    restart_if_due,
    unpack,
)
from node.limits.limits import Limit
from node.limits.weights import PARTS, Weights
from node.traffic.sums import Sums, columns
from protos.service_pb2 import LimitsSummary

# Seconds for which the usage of removed users is kept: longer than any period.
REMEMBERED = 40 * 86_400.0
# Removed users kept at most: a controller may send names without end.
MOST_GONE = 300_000
# Bytes left of a quota below which a user is reported in `close`: no user carries as many before the next reading, with
# the factor 1.
CLOSE = 2**30
# Changed users above which `judge_due` judges them in parts.
MANY = 2000
# The part of the time for which a user is slow that may pass before it begins again.
LITTLE = 0.1
# Entries in the heap of moments, above two for each count, at which outdated ones are dropped: each change of a user
# leaves one.
SPARE = 10_000


class Report(NamedTuple):
    """The change of a user, and the limit that caused it."""

    kind: Kind
    key: str
    reason: str


class Book(Limiter):
    """Usage by user; `Enforcement` takes what `news` and others collect.

    Tells the connections of users who came or went, or whose limits may have changed.
    """

    def __init__(
        self, connections: Connections, now: Callable[[], float] = time.time, weights: Weights | None = None
    ) -> None:
        self.now = now
        self.weights = weights or Weights()
        self.in_force = connections.in_force
        self._connections = connections
        # The changes of users, in order.
        self.news: list[Report] = []
        # Barred users; also has keys of removed users, which mean nothing.
        self.off: set[str] = set()
        # Users judged lately who may reach their quota soon.
        self.close: set[str] = set()
        # Whether some record has changed in more than its bytes, so that it has to be saved soon.
        self.needs_saving = False
        # Users whose record has changed since it was saved.
        self.dirty: set[str] = set()
        self._counts: dict[str, Count] = {}
        # Heap of the moments at which users have to be judged again.
        self._moments: list[tuple[float, str]] = []
        # Users whom `judge_due` has yet to judge.
        self._later: dict[str, None] = {}
        # Users near their quota; also has keys of removed users, which mean nothing.
        self._near: set[str] = set()
        # Cache; None where outdated.
        self._summary: LimitsSummary | None = None

    def knows(self, key: str) -> bool:
        """Whether anything is known of this user."""
        return key in self.in_force.users or key in self._counts or key in self.in_force.overrides

    def summary(self) -> LimitsSummary:
        """The numbers of users who have limits, are barred, and are near their quota."""
        if self._summary is None:
            off = [(self._counts[key], self.in_force.of(key)) for key in self.off if key in self.in_force.users]
            expired = sum(count.expired and not limit.expires_tells for count, limit in off)
            abuse = sum(reasons(reached(count, limit, self.now()), limit) == (ABUSE,) for count, limit in off)
            near = sum(key in self.in_force.users and key not in self.off for key in self._near)
            limited, by_quota = len(self.in_force.limited()), len(off) - expired - abuse
            self._summary = LimitsSummary(
                limited=limited, off_quota=by_quota, off_expired=expired, near=near, off_abuse=abuse
            )
        return self._summary

    # The users

    def learn(self, said: Iterable[bytes]) -> None:
        self.in_force.learn(said)

    def install(self, said: Mapping[str, bytes], users: Collection[str]) -> AbstractSet[str]:
        """Take over all users and the packed limits of those who have some. Returns the users who are off.

        If many users change, the node judges at once only those with a report or a bar; `judge_due` judges the others.
        """
        changed = self.in_force.install(said, users, self._counts.keys())
        self._summary = None
        if len(changed) > MANY:
            self._later |= dict.fromkeys(changed)
            counts = ((key, self._counts.get(key)) for key in changed)
            changed = [key for key, count in counts if count is not None and (count.reported or count.off_since)]
        for key in changed:
            self._judge(key)
        self._connections.changed(changed)
        return self.off

    def follow(self, key: str) -> bool:
        """Look again at a user who was added, changed or removed. Returns whether they are off."""
        self.in_force.follow(key)
        self._summary = None
        self._judge(key)
        if self.in_force.any:
            self._connections.changed((key,))
        return key in self.off

    def override(self, key: str, limits: bytes | None) -> None:
        """Set the override by SetLimits, or remove it with None."""
        self.in_force.override(key, limits)
        if limits is not None:
            self._counts.setdefault(key, Count(self.now()))
        self._mark_changed(key)
        self.follow(key)

    def cut(self, key: str, seconds: float) -> None:
        """Bar the user for abuse, for so long from now on."""
        self._abused(key).cut_until = self.now() + seconds
        self._mark_changed(key)
        self._judge(key)

    def slow(self, key: str, seconds: float, speed: int) -> None:
        """Give the user this speed for abuse, for so long from now on."""
        count, now = self._abused(key), self.now()
        if speed != count.slow_speed or count.slow_until < now + (1 - LITTLE) * seconds:
            count.slow_until, count.slow_speed = now + seconds, speed
            self._mark_changed(key)
            self._judge(key)

    def _abused(self, key: str) -> Count:
        if key not in self._counts:
            self._counts[key] = Count(self.now())
        return self._counts[key]

    # Usage

    def book(self, moved: Sums, by_inbound: Sums | None = None) -> list[tuple[str, int]]:
        """Add bytes that users carried; `by_inbound`: see `Weights.beyond`.

        Returns the users with a quota, and their bytes in the counted direction, as they weigh.
        """
        if not (self._counts or self.in_force.default.quota or self.in_force.by_inbound):
            return []
        if self.weights.rules:
            return self._weigh(moved, Sums() if by_inbound is None else by_inbound)
        return [
            (key, limit.way.of(up, down))
            for key, up, down in moved.rows()
            if (limit := self._add(key, up, down)) is not None
        ]

    def _weigh(self, moved: Sums, by_inbound: Sums) -> list[tuple[str, int]]:
        extra = self.weights.beyond(moved, by_inbound, self.now())
        keys = [*dict.fromkeys(chain(moved.names, extra.names))]
        rows = zip(keys, *columns([moved], keys), *columns([extra], keys), strict=True)
        return [
            (key, limit.way.of(up + more_up // PARTS, down + more_down // PARTS))
            for key, up, down, more_up, more_down in rows
            if (limit := self._add(key, up, down, (more_up, more_down) if more_up or more_down else None)) is not None
        ]

    def _add(self, key: str, up: int, down: int, extra: Both | None = None) -> Limit | None:
        """Add to one user's count. Returns the limit if the user has a quota."""
        count, limit = self._counts.get(key), self.in_force.of(key)
        if key not in self.in_force.users or not limit.quota:
            if count is not None and count.since is not None:
                # A removed user may come back.
                count.add(up, down, extra)
                self.dirty.add(key)
            return None
        if count is None or key in self._later:
            self._judge(key)
            count = self._counts[key]
        count.add(up, down, extra)
        self.dirty.add(key)
        self._apply(key, count, limit)
        return limit

    def judge_due(self, most: int = sys.maxsize) -> bool:
        """Judge users whose moment has come by the clock, at most `most`. Returns whether there are more."""
        if some := [*islice(self._later, most)]:
            for key in some:
                del self._later[key]
                self._judge(key)
            self._connections.changed(some)
            if self._later:
                return True
        now = self.now()
        for _ in range(most):
            if not self._moments or self._moments[0][0] > now:
                return False
            _, key = heappop(self._moments)
            self._judge(key)
        return self.next_turn <= now

    def about_to_reset(self, most: int) -> list[str]:
        """Users whose count `judge_due` resets next. If `most` or more users are due, `most` of those, unchecked."""
        now = self.now()
        due = {*islice(self._due(now), most)}
        if len(due) == most:
            return [*due]
        return [key for key in due if (count := self._counts.get(key)) and is_due(count, self.in_force.of(key), now)]

    def _due(self, now: float) -> Iterator[str]:
        """Users whose moment has come. A heap entry that is not due has no due ones below it."""
        places = [0]
        while places:
            place = places.pop()
            if place < len(self._moments) and self._moments[place][0] <= now:
                yield self._moments[place][1]
                places += 2 * place + 1, 2 * place + 2

    def judge_all_again(self) -> None:
        """Have `judge_due` judge all users again, because the clock was set back."""
        self._later |= dict.fromkeys(self._counts)

    @property
    def next_turn(self) -> float:
        """When `judge_due` has to be called next."""
        if self._later:
            return -math.inf
        return self._moments[0][0] if self._moments else math.inf

    def count_of(self, key: str) -> Count | None:
        return self._counts.get(key)

    def counting(self, key: str) -> Count | None:
        """The count of a user, if they have a quota."""
        count = self._counts.get(key)
        return count if count is not None and count.since is not None else None

    def counts(self, key: str) -> bool:
        """Whether this user's bytes are counted. Begins to count if the user has a quota."""
        if key not in self._counts and key in self.in_force.users and self.in_force.of(key).quota:
            self._judge(key)
        return key in self._counts

    def left(self, key: str) -> int | None:
        """Bytes left of a user's quota; None without a quota."""
        limit, count = self.in_force.of(key), self._counts.get(key)
        return left(count, limit) if count is not None and limit.quota else None

    # Saved state

    def restore(self, records: Iterable[tuple[str, bytes]]) -> None:
        """Load the records of an earlier node. They may come late: newer overrides stay, and bytes add up."""
        for key, packed in records:
            override, count = unpack(packed)
            if override is not None:
                self.in_force.restore(key, override)
            if count is not None:
                self._counts[key] = self._joined(key, count)
        for key in [key for key in self._counts.keys() | self.in_force.overrides.keys() if key in self.in_force.users]:
            self._judge(key)

    def _joined(self, key: str, earlier: Count) -> Count:
        """Merge an earlier node's count with what this node counted before it was loaded."""
        count, limit = self._counts.get(key), self.in_force.of(key)
        follow_zone(earlier, limit)
        if count is not None and is_due(earlier, limit, self.now()):
            return count
        if count is not None:
            earlier.add(count.up, count.down, count.extra)
            self._mark_changed(key)
        if key in self.in_force.users and key not in self.off:
            # The core lets them in: if they have to be barred, that has to be reported.
            earlier.off_since = 0.0
        return earlier

    def records(self, keys: Iterable[str]) -> dict[str, bytes | None]:
        """The records to save for these users; None where there is nothing to keep."""
        found = ((key, self.in_force.overrides.get(key), self._counts.get(key)) for key in keys)
        return {key: pack(override, count) if override or count else None for key, override, count in found}

    def everything(self) -> dict[str, bytes | None]:
        """All records to save."""
        self.dirty.clear()
        return self.records({*self.in_force.overrides, *self._counts})

    @property
    def counted(self) -> list[str]:
        """The keys that have a count, including removed users."""
        return [*self._counts]

    def forget_gone(self, keys: Iterable[str]) -> None:
        """Note which of these were removed, and forget those removed for longer than REMEMBERED."""
        now = self.now()
        for key in keys:
            count = self._counts.get(key)
            if count is None:
                continue
            if key in self.in_force.users:
                count.gone_since = 0.0
            elif not count.gone_since:
                count.gone_since = now
                self._mark_changed(key)
            elif now - count.gone_since > REMEMBERED:
                self._forget(key)

    def make_room(self) -> None:
        """If more than MOST_GONE were removed, forget those removed for longest, until half of MOST_GONE are left."""
        users = self.in_force.users
        if len(self._counts) <= len(users) + MOST_GONE:
            return
        gone = [(count.gone_since or math.inf, key) for key, count in self._counts.items() if key not in users]
        for _, key in nsmallest(len(gone) - MOST_GONE // 2, gone):
            self._forget(key)

    def _forget(self, key: str) -> None:
        """Forget a removed user. A later user of this name starts from zero."""
        del self._counts[key]
        self.in_force.overrides.pop(key, None)
        self.in_force.slow(key, 0)
        self.off.discard(key)
        self._near.discard(key)
        self._mark_changed(key)

    # Judging

    def _judge(self, key: str) -> None:
        """Decide whether this user is barred, and when to judge them again."""
        if key not in self.in_force.users:
            return  # a removed user keeps their count
        if self.in_force.drop_stale_override(key):
            self._mark_changed(key)
        limit, now = self.in_force.of(key), self.now()
        if not (limit.quota or limit.expires_at or key in self._counts or key in self.in_force.overrides):
            return
        count = self._counts.get(key)
        if count is None:
            count = self._counts[key] = Count(now)
            self._mark_changed(key)
        if restart_if_due(count, limit, now):
            self._mark_changed(key)
        if (moment := next_change(count, limit, now)) < math.inf:
            heappush(self._moments, (moment, key))
            self._tidy()
        self._apply(key, count, limit)
        if limit.quota and left(count, limit) < CLOSE * self.weights.most:
            self.close.add(key)
        if self.in_force.slow(key, count.slow_speed if now < count.slow_until else 0):
            self._summary = None
            self._connections.changed((key,))

    def _mark_changed(self, key: str) -> None:
        self.dirty.add(key)
        self.needs_saving, self._summary = True, None

    def _apply(self, key: str, count: Count, limit: Limit) -> None:
        """Report what is new, and bar the user or let them in."""
        now = self.now()
        at = reached(count, limit, now)
        near = bool(limit.quota) and count.used(limit.way) >= NEAR * limit.quota
        if not (at or near or count.reported or count.off_since or key in self._near):
            return  # as for most users
        why = reasons(at, limit)
        (self.off.add if why else self.off.discard)(key)
        (self._near.add if near else self._near.discard)(key)
        self._report(key, count, limit, at, near)
        # A user who was already barred when the node ended is not reported again.
        if bool(why) != bool(count.off_since):
            self._mark_changed(key)
            count.off_since = now if why else 0.0
            self.news.append(Report(Kind.LIMIT_CUT if why else Kind.LIMIT_BACK, key, why[0] if why else ""))

    def _report(self, key: str, count: Count, limit: Limit, at: tuple[str, ...], near: bool) -> None:
        if near and not count.near and QUOTA not in at:
            self.news.append(Report(Kind.LIMIT_NEAR, key, QUOTA))
        if QUOTA in at and limit.quota_tells and not count.reached:
            self.news.append(Report(Kind.LIMIT_REACHED, key, QUOTA))
        if EXPIRY in at and limit.expires_tells and not count.expired:
            self.news.append(Report(Kind.LIMIT_REACHED, key, EXPIRY))
        state = near, QUOTA in at, EXPIRY in at
        if state != (count.near, count.reached, count.expired):
            count.near, count.reached, count.expired = state
            self._mark_changed(key)

    def _tidy(self) -> None:
        if len(self._moments) > SPARE + 2 * len(self._counts):
            now = self.now()
            looks = ((next_change(count, self.in_force.of(key), now), key) for key, count in self._counts.items())
            self._moments = [look for look in looks if look[0] < math.inf]
            heapify(self._moments)
