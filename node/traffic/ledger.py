"""Traffic accounting, pure: readings of cumulative counters in, rows of bytes not yet delivered out.

A core is never asked to reset. Each reading is compared with the one before of the same run, the difference is booked;
a counter that went down counts from zero. So bytes outlive the core that counted them. Rows that are taken for a reply
are put aside until the reply was delivered: delivered + aside + pending is what was seen, at any time.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import islice, repeat

from node.contract.accounts import key_of
from node.contract.counters import _TRAFFIC, DIRECTIONS, Both, Reading, Row, Scope, _key, counter_name
from node.traffic.sums import Sums, columns
from node.traffic.totals import Added, Totals

UP, DOWN = DIRECTIONS
# A row of its four values, without the step of Python's that `Row` and `Row._make` are.
_row: Callable[[tuple[Scope, str, int, int]], Row] = partial(tuple.__new__, Row)


def differences(last: dict[str, int], reading: Reading) -> dict[Scope, Sums]:
    """What to book by scope and name. `last` is what was read before; afterwards it is what was read by now.

    Zeros of users are left out; of inbounds and outbounds they tell that there is such a one.
    """
    found = {scope.value: Sums() for scope in Scope}
    for counter, value in reading.items():
        before = last.get(counter)
        if value == before:
            continue
        last[counter] = value
        # One that went down counts from zero.
        added = value if before is None or value < before else value - before
        begin, _, direction = counter.rpartition(_TRAFFIC)
        word, separated, name = begin.partition(">>>")
        if separated and word in found and (added or word != Scope.USER.value):
            if direction == UP:
                found[word].up[name] = added
            elif direction == DOWN:
                found[word].down[name] = added
    return {Scope(word): sums for word, sums in found.items() if sums.up or sums.down}


@dataclass(frozen=True, eq=False)
class Taken:
    """The bytes that were put aside for one reply, by key."""

    scope: Scope
    sums: Sums

    @property
    def rows(self) -> Mapping[str, Both]:
        return {key: self.sums.both(key) for key in self.sums.names}


class Ledger:
    """Bytes per user, inbound and outbound, each way, since they were last delivered; `totals` since ever."""

    def __init__(self, totals: Totals | None = None) -> None:
        self.totals = totals or Totals()
        # Is told what users have carried, by key, as it is booked.
        self.booked: Callable[[Sums], None] = lambda _: None
        # By key. Of users those who have bytes; of inbounds and outbounds all that run, too.
        self._pending: dict[Scope, Sums] = {scope: Sums() for scope in Scope}
        # For replies that are on their way; they are ours until those were delivered.
        self._aside: set[Taken] = set()
        self._last: dict[object, dict[str, int]] = {}
        # How a user's name is written, where that is not their key.
        self._spelling: dict[str, str] = {}
        # What differs from what `changes` told last.
        self._dirty: dict[Scope, set[str]] = {scope: set() for scope in Scope}

    @property
    def sizes(self) -> Mapping[Scope, int]:
        """How many rows of each scope there are; inbounds and outbounds without bytes are among them."""
        return {scope: len(sums) for scope, sums in self._pending.items()}

    def book(self, run: object, reading: Reading) -> bool:
        """Book what one run of a core has counted since its last reading. Returns whether that was anything.

        A reading may come in parts: counters that it lacks are as they were.
        """
        last = self._last.setdefault(run, {})
        found = differences(last, reading)
        self.totals.book(_added(found, self.totals.scopes))
        for scope, sums in found.items():
            if scope is Scope.USER:
                sums = self._by_key(sums)
                self.booked(sums)
            self._add(scope, sums)
        return any(sums.moved for sums in found.values())

    def counters(self, run: object, rows: Iterable[Row]) -> dict[str, int]:
        """What one run had counted of these rows when it was read last: what of it is in them."""
        last = self._last.get(run, {})
        names = (counter_name(row.scope, row.name, direction) for row in rows for direction in DIRECTIONS)
        return {name: last[name] for name in names if name in last}

    def known(self, run: object) -> Mapping[str, int]:
        """What one run of a core had counted when it was read last."""
        return self._last.get(run, {})

    def go_on(self, run: object, known: Mapping[str, int]) -> None:
        """This was booked of a run already."""
        self._last[run] = dict(known)

    def keep(self, runs: Iterable[object]) -> None:
        """Only these runs go on; the readings of the others are no longer compared with."""
        going = set(runs)
        if self._last.keys() <= going:
            return
        self._last = {run: last for run, last in self._last.items() if run in going}
        for scope in (Scope.INBOUND, Scope.OUTBOUND):
            self._forget_empty(scope, self._pending[scope].names)

    def listed(self, scope: Scope) -> Iterator[tuple[str, int, int]]:
        """Users who have bytes; every inbound or outbound that has some or runs. As of now, whenever it is read."""
        rows = self._pending[scope].rows()
        if scope is Scope.USER:
            spelling = self._spelling.copy()
            return ((spelling.get(key, key), up, down) for key, up, down in rows) if spelling else rows
        return iter([row for row in rows if any(row[1:]) or self._runs(scope, row[0])])

    def all(self, scope: Scope) -> Iterator[Row]:
        """The same as rows."""
        return (Row(scope, *row) for row in self.listed(scope))

    def one(self, scope: Scope, name: str) -> Row | None:
        """The row of one name; None if there is none."""
        key, pending = _key(scope, name), self._pending[scope]
        told = scope is Scope.USER and any(key in taken.sums for taken in self._aside if taken.scope is scope)
        return Row(scope, self._name(scope, key), *pending.both(key)) if told or key in pending else None

    def take(self, scope: Scope, name: str | None = None) -> Taken:
        """Put the row of a name aside, or all: they begin at zero again. `settle` tells what became of them."""
        pending = self._pending[scope]
        if scope is Scope.USER and name is None:
            taken = Taken(scope, pending)
            self._pending[scope] = Sums()
        else:
            taken = Taken(scope, pending.take(pending.names if name is None else [_key(scope, name)]))
        if scope is not Scope.USER:
            pending.add(Sums(dict.fromkeys(taken.sums.up, 0), dict.fromkeys(taken.sums.down, 0)))
        self._aside.add(taken)
        return taken

    def settle(self, taken: Taken, delivered: bool) -> None:
        """The reply was delivered: its rows are gone. Or it was not: they come back."""
        self._aside.remove(taken)
        if delivered:
            keys = taken.sums.names
            self._dirty[taken.scope].update(keys)
            self._forget_empty(taken.scope, keys)
        else:
            self._pending[taken.scope].add(taken.sums)

    def changes(self, most: int | None = None) -> list[Row]:
        """The rows that are not as they were when they were told last, with what is aside. Zero: there is no row."""
        found: list[Row] = []
        for scope, dirty in self._dirty.items():
            keys = set(islice(dirty, most and most - len(found)))
            dirty -= keys
            found += self._whole(scope, keys)
        return found

    def everything(self) -> list[Row]:
        """All rows that have bytes, with what is aside."""
        self._dirty = {scope: set() for scope in Scope}
        rows: list[Row] = []
        for scope in Scope:
            rows += self._whole(scope, set().union(*(sums.names for sums in self._ours(scope))))
        return [row for row in rows if any(row.both)]

    def restore(self, rows: Iterable[Row]) -> None:
        """Rows of an earlier ledger: nobody has had them."""
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
        """What users have by their names, by key."""
        names = "".join([*sums.up, *sums.down])
        if names.isascii() and names == names.lower() and not self._spelling:
            return sums  # most often, and much faster told at once
        by_key = Sums()
        for name, up, down in sums.rows():
            key = key_of(name)
            by_key.count(key, up, down)
            self._spell(key, name)
        return by_key

    def _ours(self, scope: Scope) -> list[Sums]:
        """What is pending and what is aside."""
        return [self._pending[scope], *(taken.sums for taken in self._aside if taken.scope is scope)]

    def _whole(self, scope: Scope, keys: Collection[str]) -> list[Row]:
        """What is pending of these and what is aside."""
        names = [self._spelling.get(key, key) for key in keys] if scope is Scope.USER else keys
        ups, downs = columns(self._ours(scope), keys)
        return [*map(_row, zip(repeat(scope), names, ups, downs))]

    def _name(self, scope: Scope, key: str) -> str:
        return self._spelling.get(key, key) if scope is Scope.USER else key

    def _runs(self, scope: Scope, name: str) -> bool:
        """Whether this is an inbound or outbound of a run that goes on."""
        counters = [counter_name(scope, name, direction) for direction in DIRECTIONS]
        return any(counter in last for last in self._last.values() for counter in counters)

    def _forget_empty(self, scope: Scope, keys: Iterable[str]) -> None:
        """Users without bytes are spelled no more; inbounds and outbounds without, that are gone, need no row."""
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
        """A user with two spellings is named as they were counted last."""
        if key == name:
            self._spelling.pop(key, None)
        else:
            self._spelling[key] = name


def _added(found: Mapping[Scope, Sums], scopes: Collection[Scope]) -> Iterator[Added]:
    """What was found of these scopes, a counter each."""
    for scope, sums in found.items():
        if scope in scopes:
            yield from ((scope, name, False, more) for name, more in sums.up.items())
            yield from ((scope, name, True, more) for name, more in sums.down.items())
