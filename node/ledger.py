"""Traffic accounting, pure: readings of cumulative counters in, rows of bytes not yet taken out.

A core is never asked to reset. Each reading is compared with the one before of the same run, the difference is booked;
a counter that went down counts from zero. So bytes outlive the core that counted them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum
from typing import NamedTuple

from node.users import key_of

DIRECTIONS = ("uplink", "downlink")


class Scope(Enum):
    """What a traffic counter belongs to."""

    USER = "user"
    INBOUND = "inbound"
    OUTBOUND = "outbound"


class Counter(NamedTuple):
    """The name of one cumulative counter of bytes. `direction` is "uplink" or "downlink"."""

    scope: Scope
    name: str
    direction: str


class Ledger:
    """Bytes per user, inbound and outbound, each way, since they were last taken."""

    def __init__(self) -> None:
        self._pending: dict[Counter, int] = {}
        self._last: dict[object, dict[Counter, int]] = {}
        # How a user's name is written, where that is not his key.
        self._spelling: dict[str, str] = {}

    def book(self, run: object, reading: Mapping[Counter, int]) -> None:
        """Book what one run of a core has counted since its last reading."""
        last = self._last.setdefault(run, {})
        for counter, value in reading.items():
            before = last.get(counter, 0)
            last[counter] = value
            added = value - before if value >= before else value
            key = self._key(counter)
            self._pending[key] = self._pending.get(key, 0) + added
            if added and counter.scope is Scope.USER:
                self._spell(key.name, counter.name)

    def keep(self, runs: Iterable[object]) -> None:
        """Only these runs go on; the readings of the others are no longer compared with."""
        going = set(runs)
        self._last = {run: last for run, last in self._last.items() if run in going}

    def all(self, scope: Scope) -> list[tuple[Counter, int]]:
        """Users who have bytes; every inbound or outbound, both directions, zeros too."""
        rows = [(counter, value) for counter, value in self._pending.items() if counter.scope is scope]
        if scope is Scope.USER:
            return [row for row in rows if row[1]]
        names = dict.fromkeys(counter.name for counter, _ in rows)
        return [row for name in names for row in self.one(scope, name) or ()]

    def one(self, scope: Scope, name: str) -> list[tuple[Counter, int]] | None:
        """Both directions of one name; None if it was never counted."""
        counters = [self._key(Counter(scope, name, direction)) for direction in DIRECTIONS]
        if not any(counter in self._pending for counter in counters):
            return None
        return [(counter, self._pending.get(counter, 0)) for counter in counters]

    def take(self, counters: Iterable[Counter]) -> None:
        """These were read with a reset: they begin at zero again."""
        for counter in counters:
            if counter in self._pending:
                self._pending[counter] = 0

    def spelled(self, counter: Counter) -> str:
        """The name as the core was given it."""
        return self._spelling.get(counter.name, counter.name) if counter.scope is Scope.USER else counter.name

    def _key(self, counter: Counter) -> Counter:
        if counter.scope is not Scope.USER:
            return counter
        return counter._replace(name=key_of(counter.name))

    def _spell(self, key: str, name: str) -> None:
        """Who has two spellings is named as he was counted last."""
        if key == name:
            self._spelling.pop(key, None)
        else:
            self._spelling[key] = name
