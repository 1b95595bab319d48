"""Sums of bytes by day, the newest days only. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import date, timedelta, tzinfo

from node.limits.periods import begin_of, day_of
from node.machine.interfaces import Carried
from protos.kept_pb2 import KeptBytes, KeptDay

# Days that are kept: more than a year.
KEPT = 400


class Days:
    """Sums by day; days without bytes are missing."""

    def __init__(self, most: int = KEPT) -> None:
        self._most = most
        # By date, as in the state file.
        self._days: dict[str, KeptDay] = {}
        self._changed: set[str] = set()

    def first(self, since: date) -> date | None:
        """The first day with bytes, not before `since`."""
        later = [key for key in self._days if key >= since.isoformat()]
        return date.fromisoformat(min(later)) if later else None

    def of(self, day: date) -> KeptDay:
        """The sums of a day, to be added to. Makes room for it."""
        key = day.isoformat()
        self._changed.add(key)
        if key not in self._days:
            for old in sorted(self._days)[: max(0, len(self._days) + 1 - self._most)]:
                del self._days[old]
                self._changed.add(old)
        return self._days.setdefault(key, KeptDay())

    def between(self, first: date, last: date) -> KeptDay:
        """The sums of these days together, with all their transports."""
        total = KeptDay()
        for key, day in self._days.items():
            if first.isoformat() <= key <= last.isoformat():
                add(total, day)
        return total

    def changes(self) -> dict[str, bytes | None]:
        """The days that have changed since the last call, serialized; None for one that is not kept any more."""
        changed, self._changed = self._changed, set()
        return {key: self._days[key].SerializeToString() if key in self._days else None for key in sorted(changed)}

    def everything(self) -> dict[str, bytes | None]:
        """All days, serialized."""
        self._changed = set()
        return {key: day.SerializeToString() for key, day in self._days.items()}

    def restore(self, rows: Iterable[tuple[str, bytes]]) -> None:
        """Add the days of an earlier node to those counted already."""
        for key, packed in rows:
            add(self._days.setdefault(key, KeptDay()), KeptDay.FromString(packed))


def add(into: KeptDay, more: KeptDay) -> None:
    """Add the bytes and transports of one day to another."""
    for mine, theirs in (
        (into.users, more.users),
        (into.inbounds, more.inbounds),
        (into.outbounds, more.outbounds),
        (into.interfaces, more.interfaces),
        (into.controllers, more.controllers),
    ):
        count(mine, theirs.received, theirs.sent)
    into.transports.extend(sorted({*more.transports} - {*into.transports}))


def count(into: KeptBytes, received: int, sent: int) -> None:
    """Add bytes."""
    if received or sent:
        into.received += received
        into.sent += sent


def spread(moved: Carried, begin: float, end: float, zone: tzinfo) -> Iterator[tuple[date, Carried]]:
    """Distribute bytes that moved between two moments to the days between them, by time; KEPT days at most."""
    last, span = day_of(end, zone), end - begin
    day = max(day_of(min(begin, end), zone), last - timedelta(KEPT))
    while day < last:
        next_day = day + timedelta(1)
        share = (begin_of(next_day, zone) - max(begin, begin_of(day, zone))) / span
        part = Carried(*(int(each * share) for each in moved))
        yield day, part
        # The rest is distributed over the rest of the time.
        moved = Carried(moved.received - part.received, moved.sent - part.sent)
        begin, span = begin_of(next_day, zone), end - begin_of(next_day, zone)
        day = next_day
    yield last, moved
