"""One `Keeper` for each serving run."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from node.backend.keeper import Keeper
from node.contract.driver import Generation
from node.contract.generations import Generations


class Keepers:
    """Creates and drops keepers as runs come and go: `keep` makes one before its run gets connections."""

    def __init__(self, generations: Generations, keep: Callable[[Generation], Keeper]) -> None:
        self._generations = generations
        self._keep = keep
        self._keepers: dict[Generation, Keeper] = {}
        generations.watch(self._follow)

    def __iter__(self) -> Iterator[Keeper]:
        return iter(tuple(self._keepers.values()))

    def of(self, run: Generation) -> Keeper | None:
        """The keeper of a run; None if it does not serve."""
        return self._keepers.get(run)

    def _follow(self) -> None:
        """Update the keepers after a run came or went."""
        serving = self._generations.serving
        self._keepers = {run: self._keepers.get(run) or self._keep(run) for run in serving}
