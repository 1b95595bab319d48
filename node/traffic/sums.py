"""Bytes up and down by name, a column each: thousands are added up without a step of Python's for each. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from itertools import chain, repeat
from operator import add

from node.contract.counters import Both


@dataclass(eq=False)
class Sums:
    """A name that is in neither column has no bytes; one that is in one of them may have none, too."""

    up: dict[str, int] = field(default_factory=dict)
    down: dict[str, int] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.names)

    def __contains__(self, name: str) -> bool:
        return name in self.up or name in self.down

    @property
    def names(self) -> Collection[str]:
        """Those of either column, once each, in the order in which they came."""
        return dict.fromkeys(chain(self.up, self.down)).keys()

    @property
    def moved(self) -> bool:
        """Whether there are any bytes."""
        return any(self.up.values()) or any(self.down.values())

    def both(self, name: str) -> Both:
        return self.up.get(name, 0), self.down.get(name, 0)

    def rows(self) -> Iterator[tuple[str, int, int]]:
        """Each name with its bytes, as of now."""
        names = [*self.names]
        return zip(names, *columns([self], names), strict=True)

    def add(self, more: Sums) -> None:
        for mine, theirs in ((self.up, more.up), (self.down, more.down)):
            mine.update(zip(theirs, map(add, theirs.values(), map(mine.get, theirs, repeat(0))), strict=True))

    def count(self, name: str, up: int = 0, down: int = 0) -> None:
        """Add the bytes of one name."""
        for mine, more in ((self.up, up), (self.down, down)):
            if more:
                mine[name] = mine.get(name, 0) + more

    def forget(self, name: str) -> None:
        for mine in (self.up, self.down):
            mine.pop(name, None)

    def take(self, names: Collection[str]) -> Sums:
        """Those of these names that have bytes; they have no more here."""
        taken = Sums()
        for mine, theirs in ((self.up, taken.up), (self.down, taken.down)):
            theirs.update({name: mine.pop(name) for name in names if mine.get(name)})
        return taken


def columns(several: Collection[Sums], names: Collection[str]) -> tuple[list[int], list[int]]:
    """What these names have in all of them together, up and down."""
    return _column([sums.up for sums in several], names), _column([sums.down for sums in several], names)


def _column(several: list[dict[str, int]], names: Collection[str]) -> list[int]:
    found = [map(column.get, names, repeat(0)) for column in several]
    return [*found[0]] if len(found) == 1 else [*map(sum, zip(*found, strict=True))]
