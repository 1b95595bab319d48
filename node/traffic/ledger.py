"""Traffic accounting, pure: readings of cumulative counters in, rows of bytes not yet delivered out.

A core is never asked to reset. Each reading is compared with the one before of the same run, the difference is booked;
a counter that went down counts from zero. So bytes outlive the core that counted them. Rows that are taken for a reply
are put aside until the reply was delivered: delivered + aside + pending is what was seen, at any time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from node.contract.counters import _TRAFFIC, DIRECTIONS, Both, Reading, Row, Scope, _key, counter_name
from node.traffic.totals import Totals

NOTHING: Both = (0, 0)

_USER = "user>>>"


SCOPES = {scope.value: scope for scope in Scope}


class Difference(NamedTuple):
    """What one counter says more than before, of which name, and whether down or up."""

    scope: Scope
    name: str
    down: bool
    added: int


def differences(before: Reading, reading: Reading) -> list[Difference]:
    """What to book. Zeros of users are left out; of inbounds and outbounds they tell that there is such a one."""
    found = []
    for counter, value in reading.items():
        last = before.get(counter)
        if value == last:
            continue
        added = value if last is None or value < last else value - last
        if added or not counter.startswith(_USER):
            difference = _difference(counter, added)
            if difference is not None:
                found.append(difference)
    return found


def _difference(counter: str, added: int) -> Difference | None:
    """None for a counter of something else."""
    begin, _, direction = counter.rpartition(_TRAFFIC)
    word, found, name = begin.partition(">>>")
    scope = SCOPES.get(word)
    if scope is None or not found or direction not in DIRECTIONS:
        return None
    return Difference(scope, name, direction == "downlink", added)


@dataclass(frozen=True, eq=False)
class Taken:
    """The bytes that were put aside for one reply, by key."""

    scope: Scope
    rows: Mapping[str, Both]


class Ledger:
    """Bytes per user, inbound and outbound, each way, since they were last delivered; `totals` since ever."""

    def __init__(self, totals: Totals | None = None) -> None:
        self.totals = totals or Totals()
        self._pending: dict[Scope, dict[str, Both]] = {scope: {} for scope in Scope}
        # For replies that are on their way; they are ours until those were delivered.
        self._aside: set[Taken] = set()
        self._last: dict[object, dict[str, int]] = {}
        # How a user's name is written, where that is not their key.
        self._spelling: dict[str, str] = {}
        # What differs from what `changes` told last.
        self._dirty: dict[Scope, set[str]] = {scope: set() for scope in Scope}

    @property
    def sizes(self) -> Mapping[Scope, int]:
        """How many rows of each scope there are, those without bytes included."""
        return {scope: len(rows) for scope, rows in self._pending.items()}

    def book(self, run: object, reading: Reading) -> bool:
        """Book what one run of a core has counted since its last reading. Returns whether that was anything.

        A reading may come in parts: counters that it lacks are as they were.
        """
        last = self._last.setdefault(run, {})
        # Of many counters few have moved: only those cost more than this look.
        moved = {counter: value for counter, value in reading.items() if last.get(counter) != value}
        found = differences(last, moved)
        last.update(moved)
        self._add(found)
        self.totals.book(found)
        return any(difference.added for difference in found)

    def keep(self, runs: Iterable[object]) -> None:
        """Only these runs go on; the readings of the others are no longer compared with."""
        going = set(runs)
        if self._last.keys() <= going:
            return
        self._last = {run: last for run, last in self._last.items() if run in going}
        for scope in (Scope.INBOUND, Scope.OUTBOUND):
            self._forget_empty(scope, tuple(self._pending[scope]))

    def all(self, scope: Scope) -> Iterator[Row]:
        """Users who have bytes; every inbound or outbound that has some or runs. As of now, whenever it is read."""
        rows, spelling = self._pending[scope].copy(), self._spelling.copy()
        if scope is Scope.USER:
            return (Row(scope, spelling.get(key, key), *both) for key, both in rows.items() if both != NOTHING)
        runs = {name for name in rows if self._runs(scope, name)}
        return (Row(scope, name, *both) for name, both in rows.items() if both != NOTHING or name in runs)

    def one(self, scope: Scope, name: str) -> Row | None:
        """The row of one name; None if there is none."""
        key = _key(scope, name)
        both = self._pending[scope].get(key)
        return None if both is None else Row(scope, self._name(scope, key), *both)

    def take(self, scope: Scope, name: str | None = None) -> Taken:
        """Put the row of a name aside, or all: they begin at zero again. `settle` tells what became of them."""
        pending = self._pending[scope]
        keys = pending if name is None else {_key(scope, name)} & pending.keys()
        taken = Taken(scope, {key: pending[key] for key in keys if pending[key] != NOTHING})
        pending.update(dict.fromkeys(taken.rows, NOTHING))
        self._aside.add(taken)
        return taken

    def settle(self, taken: Taken, delivered: bool) -> None:
        """The reply was delivered: its rows are gone. Or it was not: they come back."""
        self._aside.remove(taken)
        pending = self._pending[taken.scope]
        if delivered:
            self._dirty[taken.scope] |= taken.rows.keys()
            self._forget_empty(taken.scope, taken.rows)
        else:
            pending.update({key: _more(pending.get(key, NOTHING), both) for key, both in taken.rows.items()})

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
        keys = {scope: set(rows) for scope, rows in self._pending.items()}
        for taken in self._aside:
            keys[taken.scope] |= taken.rows.keys()
        return [row for scope in Scope for row in self._whole(scope, keys[scope]) if row.both != NOTHING]

    def restore(self, rows: Iterable[Row]) -> None:
        """Rows of an earlier ledger: nobody has had them."""
        for row in rows:
            key = row.key
            self._pending[row.scope][key] = _more(self._pending[row.scope].get(key, NOTHING), row.both)
            if row.scope is Scope.USER:
                self._spell(key, row.name)

    def _add(self, found: Iterable[Difference]) -> None:
        for scope, name, down, added in found:
            key = _key(scope, name)
            rows = self._pending[scope]
            if not added and (scope is Scope.USER or key in rows):
                continue
            uplink, downlink = rows.get(key, NOTHING)
            rows[key] = (uplink, downlink + added) if down else (uplink + added, downlink)
            if added:
                self._dirty[scope].add(key)
                if scope is Scope.USER:
                    self._spell(key, name)

    def _whole(self, scope: Scope, keys: Iterable[str]) -> Iterator[Row]:
        """What is pending of these and what is aside."""
        pending = self._pending[scope]
        aside = [taken.rows for taken in self._aside if taken.scope is scope]
        for key in keys:
            both = pending.get(key, NOTHING)
            for rows in aside:
                both = _more(both, rows.get(key, NOTHING))
            yield Row(scope, self._name(scope, key), *both)

    def _name(self, scope: Scope, key: str) -> str:
        return self._spelling.get(key, key) if scope is Scope.USER else key

    def _runs(self, scope: Scope, name: str) -> bool:
        """Whether this is an inbound or outbound of a run that goes on."""
        if scope is Scope.USER:
            return False
        counters = [counter_name(scope, name, direction) for direction in DIRECTIONS]
        return any(counter in last for last in self._last.values() for counter in counters)

    def _forget_empty(self, scope: Scope, keys: Iterable[str]) -> None:
        """Users without bytes need no row, nor do inbounds and outbounds that are gone."""
        pending = self._pending[scope]
        for key in keys:
            if pending.get(key) == NOTHING and not self._runs(scope, key):
                del pending[key]
                if scope is Scope.USER and not any(key in taken.rows for taken in self._aside):
                    self._spelling.pop(key, None)

    def _spell(self, key: str, name: str) -> None:
        """A user with two spellings is named as they were counted last."""
        if key == name:
            self._spelling.pop(key, None)
        else:
            self._spelling[key] = name


def _more(one: Both, other: Both) -> Both:
    return one[0] + other[0], one[1] + other[1]
