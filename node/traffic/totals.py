"""Total bytes by name since the state file began, pure. Controllers cannot reset them, so they never decrease."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from itertools import islice

from node.contract.counters import Both, Row, Scope, _key
from node.traffic.sums import Sums

# Names kept for each scope at most; the bytes of further names are booked together, as OTHERS.
MOST = {Scope.INBOUND: 1000, Scope.OUTBOUND: 1000, Scope.USER: 250_000, Scope.USER_INBOUND: 500_000}
OTHERS = "(others)"
# A full scope is looked through for names to delete once for so many names in it that found no room: some of 100,000
# users may find none for ever, while a look through 500,000 names takes 0.1 s.
WORTH = 100
LASTING = frozenset({Scope.INBOUND, Scope.OUTBOUND, Scope.USER_INBOUND})


class Totals:
    """The totals of these scopes; other scopes are ignored."""

    def __init__(self, scopes: Collection[Scope] = LASTING, most: dict[Scope, int] | None = None) -> None:
        self._rows: dict[Scope, dict[str, Row]] = {scope: {} for scope in scopes}
        self._most = most or MOST
        # Rows that changed since `changes` returned them last.
        self._dirty: set[tuple[Scope, str]] = set()
        # How often a name has found no room since the last look for names to delete.
        self._turned_away: dict[Scope, int] = {}

    def book(self, found: Mapping[Scope, Sums]) -> None:
        """Add counted bytes."""
        for scope in self._rows.keys() & found.keys():
            for name, up, down in found[scope].rows():
                self._add(scope, name, (up, down))

    def restore(self, rows: Iterable[Row]) -> None:
        """Add the totals of an earlier node to those counted already."""
        for row in rows:
            if row.scope in self._rows:
                self._add(row.scope, row.name, row.both)

    def all(self, scope: Scope) -> list[Row]:
        """The totals of a scope, as of now."""
        return [*self._rows.get(scope, {}).values()]

    def one(self, scope: Scope, key: str) -> Row | None:
        """The total of one key, if there is one."""
        return self._rows.get(scope, {}).get(key)

    def changes(self, most: int | None = None) -> list[Row]:
        """Up to `most` totals that changed since the last call. Zero is a deleted one."""
        dirty = set(islice(self._dirty, most))
        self._dirty -= dirty
        return [self._rows[scope].get(key, Row(scope, key, 0, 0)) for scope, key in dirty]

    def everything(self) -> list[Row]:
        """All totals."""
        self._dirty = set()
        return [row for rows in self._rows.values() for row in rows.values()]

    def make_room(self, scope: Scope, stays: Callable[[str], bool]) -> None:
        """If names found no room in the scope, delete the names for which `stays` returns False."""
        rows = self._rows.get(scope, {})
        if self._turned_away.get(scope, 0) > len(rows) // WORTH:
            self._turned_away[scope] = 0
            for key in [key for key in rows if key != OTHERS and not stays(key)]:
                del rows[key]
                self._dirty.add((scope, key))

    def _add(self, scope: Scope, name: str, more: Both) -> None:
        rows, key = self._rows[scope], _key(scope, name)
        if key not in rows and len(rows) >= self._most[scope]:
            name = key = OTHERS
            self._turned_away[scope] = self._turned_away.get(scope, 0) + 1
        before = rows.get(key)
        if before is None:
            rows[key] = Row(scope, name, *more)
        elif any(more):
            rows[key] = Row(scope, name, before.uplink + more[0], before.downlink + more[1])
        if any(more):
            self._dirty.add((scope, key))
