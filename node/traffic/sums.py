"""Bytes by name, in two columns (up and down): thousands are added without a Python-level step for each. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, repeat
from operator import add

from node.contract.counters import Both

# Names, and their bytes up and down.
Columns = tuple[Sequence[str], Sequence[int], Sequence[int]]


@dataclass(eq=False)
class Sums:
    """Bytes up and down by name. A missing name has no bytes; an entry may be 0."""

    up: dict[str, int] = field(default_factory=dict)
    down: dict[str, int] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.names)

    def __contains__(self, name: str) -> bool:
        return name in self.up or name in self.down

    @property
    def names(self) -> Collection[str]:
        """The names in either column, without duplicates, in order of arrival."""
        return dict.fromkeys(chain(self.up, self.down)).keys()

    @property
    def moved(self) -> bool:
        """Whether there are any bytes."""
        return any(self.up.values()) or any(self.down.values())

    def both(self, name: str) -> Both:
        return self.up.get(name, 0), self.down.get(name, 0)

    def columns(self) -> Columns:
        """Each name with its bytes up and down; a snapshot."""
        names = [*self.names]
        return names, *columns([self], names)

    def rows(self) -> Iterator[tuple[str, int, int]]:
        """Yield each name with its bytes up and down; a snapshot as of the call."""
        return zip(*self.columns(), strict=True)

    def add(self, more: Sums) -> None:
        for mine, theirs in ((self.up, more.up), (self.down, more.down)):
            sums = zip(theirs, map(add, theirs.values(), map(mine.get, theirs, repeat(0))), strict=True)
            mine.update(sums if mine else theirs)

    def count(self, name: str, up: int = 0, down: int = 0) -> None:
        """Add the bytes of one name."""
        for mine, more in ((self.up, up), (self.down, down)):
            if more:
                mine[name] = mine.get(name, 0) + more

    def forget(self, name: str) -> None:
        for mine in (self.up, self.down):
            mine.pop(name, None)

    def take(self, names: Collection[str]) -> Sums:
        """Remove and return the bytes of these names."""
        taken = Sums()
        for mine, theirs in ((self.up, taken.up), (self.down, taken.down)):
            theirs.update({name: mine.pop(name) for name in names if mine.get(name)})
        return taken


def columns(several: Collection[Sums], names: Collection[str]) -> tuple[list[int], list[int]]:
    """The bytes of these names, up and down, added over several sums."""
    return _column([sums.up for sums in several], names), _column([sums.down for sums in several], names)


def _column(several: list[dict[str, int]], names: Collection[str]) -> list[int]:
    found = [map(column.get, names, repeat(0)) for column in several]
    return [*found[0]] if len(found) == 1 else [*map(sum, zip(*found, strict=True))]
