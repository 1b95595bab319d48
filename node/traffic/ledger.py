"""The traffic ledger, pure: takes readings of cumulative counters, gives rows of bytes not yet delivered.

Counters of a core are never reset. Each reading is compared with the previous one of the same run and the difference is
booked; a counter that went down counts from zero. So bytes outlive the core that counted them. Rows taken for a reply
are put aside until it is delivered: delivered + aside + pending always equals the bytes read.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import islice, repeat

from node.contract.accounts import key_of
from node.contract.counters import _TRAFFIC, DIRECTIONS, Reading, Row, Scope, Seen, _key, counter_name
from node.traffic.sums import Sums, columns
from node.traffic.totals import Totals

# Makes a row of its four values, without the Python-level call that `Row` and `Row._make` cost.
_row: Callable[[tuple[Scope, str, int, int]], Row] = partial(tuple.__new__, Row)


# Where the bytes of a counter belong: a place in a list of columns, two for each scope. The last is for counters of
# nothing that the node knows.
_COLUMNS = [(scope.value, direction) for scope in Scope for direction in DIRECTIONS]
_NOWHERE = len(_COLUMNS)
# The columns from here on are not of users.
_KEEPS_ZEROS = len(DIRECTIONS)


class Counter:
    """A counter of one run: its name taken apart, which costs more than all else, and its value."""

    __slots__ = ("column", "name", "value")

    def __init__(self, counter: str, value: int = 0) -> None:
        begin, _, direction = counter.rpartition(_TRAFFIC)
        word, separated, self.name = begin.partition(">>>")
        column = word, direction
        self.column = _COLUMNS.index(column) if separated and column in _COLUMNS else _NOWHERE
        self.value = value


def differences(last: dict[str, Counter], reading: Reading) -> dict[Scope, Sums]:
    """The bytes to book, by scope and name. `last` has the previous values and is updated to the new ones.

    Zeros of users are left out; those of inbounds and outbounds are kept, as they show that these exist.
    """
    columns: list[dict[str, int]] = [{} for _ in range(_NOWHERE + 1)]
    for counter, value in reading.items():
        known = last.get(counter)
        if known is None:
            known, added = last.setdefault(counter, Counter(counter)), value
        elif value > known.value:
            added = value - known.value
        elif value == known.value:
            continue
        else:
            added = value  # a counter that went down counts from zero
        known.value = value
        if added or known.column >= _KEEPS_ZEROS:
            columns[known.column][known.name] = added
    found = {scope: Sums(*columns[2 * place : 2 * place + 2]) for place, scope in enumerate(Scope)}
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
        self._pending: dict[Scope, Sums] = {scope: Sums() for scope in Scope}
        # Bytes of replies that are not delivered yet.
        self._aside: set[SetAside] = set()
        self._last: dict[object, dict[str, Counter]] = {}
        self._seen: dict[object, Seen] = {}
        # The spelling of users' names, if it differs from their keys.
        self._spelling: dict[str, str] = {}
        # Keys of rows that changed since `changes` returned them last.
        self._dirty: dict[Scope, set[str]] = {scope: set() for scope in Scope}

    @property
    def sizes(self) -> Mapping[Scope, int]:
        """The number of rows of each scope, including inbounds and outbounds without bytes."""
        return {scope: len(sums) for scope, sums in self._pending.items()}

    def book(self, run: object, reading: Reading) -> Mapping[Scope, Sums]:
        """Book what a run of a core has counted since its last reading. Returns the bytes, those of users by key.

        A reading may come in parts: missing counters are taken as unchanged.
        """
        last = self._last.setdefault(run, {})
        found = differences(last, reading)
        self.totals.book(found)
        if Scope.USER in found:
            found[Scope.USER] = self._by_key(found[Scope.USER])
        for scope, sums in found.items():
            self._add(scope, sums)
        return found

    def counters(self, run: object, rows: Iterable[Row]) -> dict[str, int]:
        """A run's counters of these rows at its last reading, which the rows include."""
        last = self._last.get(run, {})
        begins = {scope: f"{scope.value}>>>" for scope in Scope}
        names = (f"{begins[scope]}{name}{_TRAFFIC}{way}" for scope, name, _, _ in rows for way in DIRECTIONS)
        return {name: last[name].value for name in names if name in last}

    def known(self, run: object) -> dict[str, int]:
        """A run's counters at its last reading."""
        return {name: counter.value for name, counter in self._last.get(run, {}).items()}

    def seen(self, run: object) -> Seen:
        """What the last complete reading of a run has seen, for the next one to fill."""
        return self._seen.setdefault(run, Seen())

    def unsee(self, run: object) -> None:
        """Have the next reading of a run read all: what the last one has seen may not be booked."""
        self._seen.pop(run, None)

    def go_on(self, run: object, known: Mapping[str, int]) -> None:
        """Note the counters of a run that were booked already, by an earlier node process."""
        self.unsee(run)
        self._last[run] = {name: Counter(name, value) for name, value in known.items()}

    def keep(self, runs: Iterable[object]) -> None:
        """Forget the readings of all runs but these."""
        going = set(runs)
        self._seen = {run: seen for run, seen in self._seen.items() if run in going}
        if self._last.keys() <= going:
            return
        self._last = {run: last for run, last in self._last.items() if run in going}
        for scope in (Scope.INBOUND, Scope.OUTBOUND):
            self._forget_empty(scope, self._pending[scope].names)

    def listed(self, scope: Scope) -> Iterator[tuple[str, int, int]]:
        """Yield the users with bytes, or each inbound or outbound with bytes or running. A snapshot as of the call."""
        rows = self._pending[scope].rows()
        if scope is Scope.USER:
            spelling = self._spelling.copy()
            return ((spelling.get(key, key), up, down) for key, up, down in rows) if spelling else rows
        return iter([row for row in rows if any(row[1:]) or self._runs(scope, row[0])])

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
        self._dirty = {scope: set() for scope in Scope}
        rows: list[Row] = []
        for scope in Scope:
            rows += self._whole(scope, set().union(*(sums.names for sums in self._ours(scope))))
        return [row for row in rows if any(row.both)]

    def restore(self, rows: Iterable[Row]) -> None:
        """Add undelivered rows of an earlier ledger."""
        for row in rows:
            self._pending[row.scope].count(row.key, *row.both)
            if row.scope is Scope.USER:
                self._spell(row.key, row.name)

    def _add(self, scope: Scope, sums: Sums) -> None:
        self._pending[scope].add(sums)
        dirty = self._dirty[scope]
        for column in (sums.up, sums.down):
            dirty.update(column if scope is Scope.USER else (key for key, more in column.items() if more))

    def _by_key(self, sums: Sums) -> Sums:
        """Convert sums by users' names to sums by key."""
        names = "".join([*sums.up, *sums.down])
        if names.isascii() and names == names.lower() and not self._spelling:
            return sums  # the usual case, much faster than name by name
        by_key = Sums()
        for name, up, down in sums.rows():
            key = key_of(name)
            by_key.count(key, up, down)
            self._spell(key, name)
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
        counters = [counter_name(scope, name, direction) for direction in DIRECTIONS]
        return any(counter in last for last in self._last.values() for counter in counters)

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
