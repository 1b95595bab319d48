"""Traffic accounting, pure: readings of cumulative counters in, rows of bytes not yet delivered out.

A core is never asked to reset. Each reading is compared with the one before of the same run, the difference is booked;
a counter that went down counts from zero. So bytes outlive the core that counted them. Rows that are taken for a reply
are put aside until the reply was delivered: delivered + aside + pending is what was seen, at any time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum
from typing import NamedTuple

from node.users import key_of

DIRECTIONS = ("uplink", "downlink")
# Bytes up and down.
Both = tuple[int, int]
NOTHING: Both = (0, 0)
# What a core has counted, by names as the cores have them: `user>>>NAME>>>traffic>>>uplink`. See `counter_name`.
Reading = Mapping[str, int]

_USER = "user>>>"
_TRAFFIC = ">>>traffic>>>"


class Scope(Enum):
    """What a traffic counter belongs to."""

    USER = "user"
    INBOUND = "inbound"
    OUTBOUND = "outbound"


SCOPES = {scope.value: scope for scope in Scope}


class Row(NamedTuple):
    """The bytes of one user, inbound or outbound. `name` is spelled as a core was given it."""

    scope: Scope
    name: str
    uplink: int
    downlink: int

    @property
    def key(self) -> str:
        """What a row is told by: two names of users that differ in case are one."""
        return _key(self.scope, self.name)

    @property
    def both(self) -> Both:
        return self.uplink, self.downlink


def counter_name(scope: Scope, name: str, direction: str) -> str:
    """The name of a counter in a reading."""
    return f"{scope.value}>>>{name}{_TRAFFIC}{direction}"


class Difference(NamedTuple):
    """What one counter says more than before, of which name, and whether down or up."""

    scope: Scope
    name: str
    key: str
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
    word, _, rest = counter.partition(">>>")
    name, _, direction = rest.rpartition(_TRAFFIC)
    scope = SCOPES.get(word)
    if scope is None or direction not in DIRECTIONS:
        return None
    return Difference(scope, name, _key(scope, name), direction == "downlink", added)


class Ledger:
    """Bytes per user, inbound and outbound, each way, since they were last delivered."""

    def __init__(self) -> None:
        self._pending: dict[Scope, dict[str, Both]] = {scope: {} for scope in Scope}
        # In replies that are on their way; they are ours until those were delivered.
        self._aside: dict[Scope, dict[str, Both]] = {scope: {} for scope in Scope}
        self._last: dict[object, Reading] = {}
        # How a user's name is written, where that is not his key.
        self._spelling: dict[str, str] = {}
        # What differs from what `changes` told last.
        self._dirty: set[tuple[Scope, str]] = set()

    def last(self, run: object) -> Reading:
        """The last reading of a run."""
        return self._last.get(run, {})

    def book(self, run: object, reading: Reading) -> bool:
        """Book what one run of a core has counted since its last reading. Returns whether that was anything."""
        found = differences(self.last(run), reading)
        self.compared(run, reading)
        self.add(found)
        return any(difference.added for difference in found)

    def compared(self, run: object, reading: Reading) -> None:
        """The next reading of this run is compared with this one; counters that it lacks, with those before it."""
        before = self.last(run)
        self._last[run] = reading if before.keys() <= reading.keys() else {**before, **reading}

    def add(self, found: Iterable[Difference]) -> None:
        """Book differences."""
        for scope, name, key, down, added in found:
            rows = self._pending[scope]
            uplink, downlink = rows.get(key, NOTHING)
            rows[key] = (uplink, downlink + added) if down else (uplink + added, downlink)
            if added:
                self._dirty.add((scope, key))
                if scope is Scope.USER:
                    self._spell(key, name)

    def keep(self, runs: Iterable[object]) -> None:
        """Only these runs go on; the readings of the others are no longer compared with."""
        going = set(runs)
        self._last = {run: last for run, last in self._last.items() if run in going}

    def all(self, scope: Scope) -> list[Row]:
        """Users who have bytes; every inbound or outbound that has some or runs."""
        rows = self._pending[scope].items()
        if scope is Scope.USER:
            return [Row(scope, self._name(scope, key), *both) for key, both in rows if any(both)]
        return [Row(scope, name, *both) for name, both in rows if any(both) or self._runs(scope, name)]

    def one(self, scope: Scope, name: str) -> Row | None:
        """The row of one name; None if there is none."""
        key = _key(scope, name)
        both = self._pending[scope].get(key)
        return None if both is None else Row(scope, self._name(scope, key), *both)

    def take(self, rows: Iterable[Row]) -> list[Row]:
        """Put these rows aside: they begin at zero again. `settle` tells what became of them."""
        taken = [row for row in rows if any(row.both)]
        for row in taken:
            key = row.key
            self._pending[row.scope][key] = _less(self._pending[row.scope][key], row.both)
            self._aside[row.scope][key] = _more(self._aside[row.scope].get(key, NOTHING), row.both)
        return taken

    def settle(self, taken: Iterable[Row], delivered: bool) -> None:
        """Rows that were put aside are gone for good if they were delivered, and come back if not."""
        for row in taken:
            key = row.key
            left = _less(self._aside[row.scope].pop(key), row.both)
            if any(left):
                self._aside[row.scope][key] = left
            if delivered:
                self._dirty.add((row.scope, key))
                self._forget_if_empty(row.scope, key)
            else:
                self._pending[row.scope][key] = _more(self._pending[row.scope].get(key, NOTHING), row.both)

    def changes(self) -> list[Row]:
        """The rows that are not as they were when this was asked last, with what is aside. Zero: there is no row."""
        dirty, self._dirty = self._dirty, set()
        return [self._whole(scope, key) for scope, key in dirty]

    def everything(self) -> list[Row]:
        """All rows that have bytes, with what is aside."""
        self._dirty = set()
        keys = {(scope, key) for rows in (self._pending, self._aside) for scope in Scope for key in rows[scope]}
        rows = (self._whole(scope, key) for scope, key in keys)
        return [row for row in rows if any(row.both)]

    def restore(self, rows: Iterable[Row]) -> None:
        """Rows of an earlier ledger: nobody has had them."""
        for row in rows:
            key = row.key
            self._pending[row.scope][key] = _more(self._pending[row.scope].get(key, NOTHING), row.both)
            if row.scope is Scope.USER:
                self._spell(key, row.name)

    def _whole(self, scope: Scope, key: str) -> Row:
        both = _more(self._pending[scope].get(key, NOTHING), self._aside[scope].get(key, NOTHING))
        return Row(scope, self._name(scope, key), *both)

    def _name(self, scope: Scope, key: str) -> str:
        return self._spelling.get(key, key) if scope is Scope.USER else key

    def _runs(self, scope: Scope, name: str) -> bool:
        counters = [counter_name(scope, name, direction) for direction in DIRECTIONS]
        return any(counter in last for last in self._last.values() for counter in counters)

    def _forget_if_empty(self, scope: Scope, key: str) -> None:
        """A user without bytes needs no row."""
        if scope is Scope.USER and not any(self._pending[scope].get(key, NOTHING)):
            self._pending[scope].pop(key, None)
            if key not in self._aside[scope]:
                self._spelling.pop(key, None)

    def _spell(self, key: str, name: str) -> None:
        """Who has two spellings is named as he was counted last."""
        if key == name:
            self._spelling.pop(key, None)
        else:
            self._spelling[key] = name


def _key(scope: Scope, name: str) -> str:
    return key_of(name) if scope is Scope.USER else name


def _more(one: Both, other: Both) -> Both:
    return one[0] + other[0], one[1] + other[1]


def _less(one: Both, other: Both) -> Both:
    return one[0] - other[0], one[1] - other[1]
