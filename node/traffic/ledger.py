"""The traffic ledger, pure: takes readings of cumulative counters, gives rows of bytes not yet delivered.

Counters of a core are never reset. Each reading is compared with the previous one of the same run and the difference is
booked; a counter that went down counts from zero. So bytes outlive the core that counted them. Rows taken for a reply
are put aside until it is delivered: delivered + aside + pending always equals the bytes read.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import chain, compress, islice, repeat

from node.contract.accounts import key_of
from node.contract.counters import (
    _TRAFFIC,
    DELIVERED,
    DIRECTIONS,
    SEPARATOR,
    Both,
    Counters,
    Reading,
    Row,
    Scope,
    Seen,
    _key,
    by_name,
)
from node.traffic.sums import Columns, Sums, columns
from node.traffic.totals import Totals

# Makes a row of its four values, without the Python-level call that `Row` and `Row._make` cost.
_row: Callable[[tuple[Scope, str, int, int]], Row] = partial(tuple.__new__, Row)


# The scopes by their words in the names of counters, each with its place in a list of columns, two for each scope. The
# last place is for counters of nothing that the node knows.
_PLACES = {scope.value: len(DIRECTIONS) * number for number, scope in enumerate(Scope)}
_NOWHERE = len(DIRECTIONS) * len(_PLACES)
_UP, _DOWN = DIRECTIONS
# The columns from here on are not of users.
_KEEPS_ZEROS = _PLACES[Scope.INBOUND.value]


class Counted:
    """What a run has counted for one name, each way, as of its last reading; None if it has no such counter.

    `begin` is the beginning of the counters' names; it is taken apart here, once, which costs more than all else.
    """

    __slots__ = ("down", "name", "place", "up")

    def __init__(self, begin: str) -> None:
        word, _, self.name = begin.partition(">>>")
        self.place = _PLACES.get(word, _NOWHERE)
        self.up: int | None = None
        self.down: int | None = None


def differences(last: dict[str, Counted], reading: Iterable[tuple[str, int]]) -> dict[Scope, Sums]:
    """The bytes to book, by scope and name. `last` has the previous values and is updated to the new ones.

    Zeros of users are left out; those of inbounds and outbounds are kept, as they show that these exist.
    """
    columns: list[dict[str, int]] = [{} for _ in range(_NOWHERE + len(DIRECTIONS))]
    for counter, value in reading:
        begin, _, direction = counter.rpartition(_TRAFFIC)
        known = last.get(begin)
        if known is None:
            if not begin or direction not in DIRECTIONS:
                continue
            known = last[begin] = Counted(begin)
        if direction == _UP:
            before, known.up, place = known.up, value, known.place
        elif direction == _DOWN:
            before, known.down, place = known.down, value, known.place + 1
        else:
            continue
        if value == before:
            continue
        # One that went down counts from zero.
        added = value if before is None or value < before else value - before
        if added or place >= _KEEPS_ZEROS:
            columns[place][known.name] = added
    found = {scope: Sums(*columns[place : place + 2]) for scope, place in zip(Scope, _PLACES.values(), strict=True)}
    return {scope: sums for scope, sums in found.items() if sums.up or sums.down}


@dataclass(frozen=True, eq=False)
class SetAside:
    """The bytes put aside for one reply, by key."""

    scope: Scope
    sums: Sums


class Ledger:
    """Bytes per user, inbound and outbound, each way, since the last delivery; `totals` since the state file began."""

    def __init__(self, totals: Totals | None = None) -> None:
        self.totals = totals or Totals()
        # By key: users with bytes; inbounds and outbounds with bytes, and those that run.
        self._pending: dict[Scope, Sums] = {scope: Sums() for scope in DELIVERED}
        # Bytes of replies that are not delivered yet.
        self._aside: set[SetAside] = set()
        self._last: dict[object, dict[str, Counted]] = {}
        self._seen: dict[object, Seen] = {}
        # The spelling of users' names, if it differs from their keys.
        self._spelling: dict[str, str] = {}
        # Keys of rows that changed since `changes` returned them last.
        self._dirty: dict[Scope, set[str]] = {scope: set() for scope in DELIVERED}
        # The inbounds with totals of users by inbound; and those with bytes of them in each run.
        self._tags: dict[str, None] = {}
        self._run_tags: dict[object, dict[str, None]] = {}
        # By run and key: the names with which it counts a user, if they differ from the key.
        self._run_names: dict[object, dict[str, set[str]]] = {}

    @property
    def sizes(self) -> Mapping[Scope, int]:
        """The number of rows of each scope, including inbounds and outbounds without bytes."""
        return {scope: len(sums) for scope, sums in self._pending.items()}

    def book(self, run: object, reading: Reading) -> Mapping[Scope, Sums]:
        """Book what a run of a core has counted since its last reading. Returns the bytes, those of users by key."""
        return self.book_part(run, reading.items())

    def book_part(self, run: object, counters: Iterable[tuple[str, int]]) -> Mapping[Scope, Sums]:
        """Book a part of a reading: missing counters are taken as unchanged."""
        last = self._last.setdefault(run, {})
        found = differences(last, counters)
        if Scope.USER_INBOUND in found:
            self._divide(found, self._run_tags.setdefault(run, {}))
        self.totals.book(found)
        if Scope.USER in found:
            found[Scope.USER] = self._by_key(found[Scope.USER], self._run_names.setdefault(run, {}))
        for scope in DELIVERED:
            if scope in found:
                self._add(scope, found[scope])
        return found

    def counted(self, run: object, rows: Collection[Row]) -> dict[str, Counters]:
        """A run's counters of these rows at its last reading, which the rows include."""
        last, spelled, tags = self._last.get(run, {}), self._run_names.get(run), self._run_tags.get(run)
        begins = {scope: f"{scope.value}>>>" for scope in Scope}
        names = [begins[row[0]] + row[1] for row in rows]
        if spelled or tags:
            users = [row[1] for row in rows if row[0] is Scope.USER]
            if spelled:
                # A row may have none of these spellings, and a user several.
                keys = {*map(key_of, users)}
                users = [*keys, *chain.from_iterable(spelled[key] for key in keys & spelled.keys())]
                names += [begins[Scope.USER] + name for name in users]
            begin = begins[Scope.USER_INBOUND]
            names += [f"{begin}{name}{SEPARATOR}{tag}" for tag in tags or () for name in users]
        return {name: (known.up, known.down) for name in names if (known := last.get(name)) is not None}

    def all_counted(self, run: object) -> dict[str, Counters]:
        """A run's counters at its last reading."""
        return {name: (known.up, known.down) for name, known in self._last.get(run, {}).items()}

    def known(self, run: object) -> dict[str, int]:
        """A run's counters at its last reading, by their whole names."""
        return by_name(self.all_counted(run))

    def seen(self, run: object) -> Seen:
        """What the last complete reading of a run has seen, for the next one to fill."""
        return self._seen.setdefault(run, Seen())

    def unsee(self, run: object) -> None:
        """Have the next reading of a run read all: what the last one has seen may not be booked."""
        self._seen.pop(run, None)

    def go_on(self, run: object, known: Mapping[str, int]) -> None:
        """Note the counters of a run that were booked already, by an earlier node process."""
        self.unsee(run)
        self._last[run] = {}
        differences(self._last[run], known.items())

    def keep(self, runs: Iterable[object]) -> None:
        """Forget the readings of all runs but these."""
        going = set(runs)
        self._seen = {run: seen for run, seen in self._seen.items() if run in going}
        if self._last.keys() <= going:
            return
        self._last = {run: last for run, last in self._last.items() if run in going}
        self._run_tags = {run: tags for run, tags in self._run_tags.items() if run in going}
        self._run_names = {run: names for run, names in self._run_names.items() if run in going}
        for scope in (Scope.INBOUND, Scope.OUTBOUND):
            self._forget_empty(scope, self._pending[scope].names)

    def listed(self, scope: Scope) -> Columns:
        """The users with bytes, or each inbound or outbound with bytes or running. A snapshot."""
        keys, ups, downs = self._pending[scope].columns()
        if scope is Scope.USER:
            return [*map(self._spelling.get, keys, keys)] if self._spelling else keys, ups, downs
        shown = [up or down or self._runs(scope, name) for name, up, down in zip(keys, ups, downs, strict=True)]
        return [*compress(keys, shown)], [*compress(ups, shown)], [*compress(downs, shown)]

    def one(self, scope: Scope, name: str) -> Row | None:
        """The row of one name; None without a row."""
        key, pending = _key(scope, name), self._pending[scope]
        aside = scope is Scope.USER and any(key in taken.sums for taken in self._aside if taken.scope is scope)
        return Row(scope, self._name(scope, key), *pending.both(key)) if aside or key in pending else None

    def take(self, scope: Scope, name: str | None = None) -> SetAside:
        """Put the row of a name aside, or all rows: they begin at zero again. `settle` follows."""
        pending = self._pending[scope]
        if scope is Scope.USER and name is None:
            taken = SetAside(scope, pending)
            self._pending[scope] = Sums()
        else:
            taken = SetAside(scope, pending.take(pending.names if name is None else [_key(scope, name)]))
        if scope is not Scope.USER:
            pending.add(Sums(dict.fromkeys(taken.sums.up, 0), dict.fromkeys(taken.sums.down, 0)))
        self._aside.add(taken)
        return taken

    def settle(self, taken: SetAside, delivered: bool) -> None:
        """Drop the rows put aside for a reply that was delivered; put them back if it was not."""
        self._aside.remove(taken)
        if delivered:
            keys = taken.sums.names
            self._dirty[taken.scope].update(keys)
            self._forget_empty(taken.scope, keys)
        else:
            self._pending[taken.scope].add(taken.sums)

    def changes(self, most: int | None = None) -> list[Row]:
        """Up to `most` rows that changed since the last call, with bytes put aside. A row of zero is a deleted row."""
        found: list[Row] = []
        for scope, dirty in self._dirty.items():
            keys = set(islice(dirty, most and most - len(found)))
            dirty -= keys
            found += self._whole(scope, keys)
        return found

    def everything(self) -> list[Row]:
        """All rows with bytes, including bytes put aside."""
        self._dirty = {scope: set() for scope in DELIVERED}
        rows: list[Row] = []
        for scope in DELIVERED:
            rows += self._whole(scope, set().union(*(sums.names for sums in self._ours(scope))))
        return [row for row in rows if any(row.both)]

    def restore(self, rows: Iterable[Row]) -> None:
        """Add undelivered rows of an earlier ledger."""
        for row in rows:
            self._pending[row.scope].count(row.key, *row.both)
            if row.scope is Scope.USER:
                self._spell(row.key, row.name)

    def by_inbound(self, key: str) -> list[tuple[str, Both]]:
        """The inbounds with bytes of this user, and the totals."""
        found = ((tag, self.totals.one(Scope.USER_INBOUND, f"{key}{SEPARATOR}{tag}")) for tag in self._tags)
        return [(tag, row.both) for tag, row in found if row is not None]

    def restore_totals(self, rows: Iterable[Row]) -> None:
        """Add the totals of an earlier ledger."""
        rows = list(rows)
        self.totals.restore(rows)
        names = (row.name.partition(SEPARATOR) for row in rows if row.scope is Scope.USER_INBOUND)
        self._tags |= {tag: None for _, mark, tag in names if mark}

    def _divide(self, found: dict[Scope, Sums], tags: dict[str, None]) -> None:
        """Add the bytes of users by inbound to those of the users, and convert their names to keys.

        `tags` gets the inbounds.
        """
        apart, users, by_key = found[Scope.USER_INBOUND], found.setdefault(Scope.USER, Sums()), Sums()
        for column, total, keyed in ((apart.up, users.up, by_key.up), (apart.down, users.down, by_key.down)):
            for whole, more in column.items():
                name, _, tag = whole.partition(SEPARATOR)
                total[name] = total.get(name, 0) + more
                key = f"{key_of(name)}{SEPARATOR}{tag}"
                keyed[key] = keyed.get(key, 0) + more
                tags[tag] = None
        self._tags |= tags
        found[Scope.USER_INBOUND] = by_key

    def _add(self, scope: Scope, sums: Sums) -> None:
        self._pending[scope].add(sums)
        dirty = self._dirty[scope]
        for column in (sums.up, sums.down):
            dirty.update(column if scope is Scope.USER else (key for key, more in column.items() if more))

    def _by_key(self, sums: Sums, spelled: dict[str, set[str]]) -> Sums:
        """Convert sums by users' names to sums by key. `spelled` gets the names that are not keys, by key."""
        names = "".join([*sums.up, *sums.down])
        if names.isascii() and names == names.lower() and not self._spelling:
            return sums  # the usual case, much faster than name by name
        by_key = Sums()
        for name, up, down in sums.rows():
            key = key_of(name)
            by_key.count(key, up, down)
            self._spell(key, name)
            if key != name:
                spelled.setdefault(key, set()).add(name)
        return by_key

    def _ours(self, scope: Scope) -> list[Sums]:
        """The pending sums and those put aside."""
        return [self._pending[scope], *(taken.sums for taken in self._aside if taken.scope is scope)]

    def _whole(self, scope: Scope, keys: Collection[str]) -> list[Row]:
        """The rows of these keys, with pending bytes and those put aside."""
        names = [self._spelling.get(key, key) for key in keys] if scope is Scope.USER else keys
        ups, downs = columns(self._ours(scope), keys)
        return [*map(_row, zip(repeat(scope), names, ups, downs))]

    def _name(self, scope: Scope, key: str) -> str:
        return self._spelling.get(key, key) if scope is Scope.USER else key

    def _runs(self, scope: Scope, name: str) -> bool:
        """Whether a run that is still read has this inbound or outbound."""
        return any(f"{scope.value}>>>{name}" in last for last in self._last.values())

    def _forget_empty(self, scope: Scope, keys: Iterable[str]) -> None:
        """Forget the spelling of users without bytes, and empty rows of inbounds and outbounds that are gone."""
        ours = self._ours(scope)
        if scope is Scope.USER:
            for key in self._spelling.keys() & keys:
                if not any(key in sums for sums in ours):
                    del self._spelling[key]
            return
        for key in [*keys]:
            if not any(ours[0].both(key)) and not self._runs(scope, key):
                ours[0].forget(key)

    def _spell(self, key: str, name: str) -> None:
        """Note the spelling of a user's name; the one counted last is used."""
        if key == name:
            self._spelling.pop(key, None)
        else:
            self._spelling[key] = name
