"""One `Keeper` for each serving run."""

from __future__ import annotations

from collections.abc import Iterator

from node.backend.context import Context, Worker
from node.backend.desired import Accepted
from node.backend.health import Watch
from node.backend.keeper import Keeper
from node.contract.driver import Generation
from node.contract.generations import Follower


class Keepers(Worker, Follower):
    """Has a keeper for each run from before its first connection until it ends."""

    def __init__(self, context: Context, watch: Watch) -> None:
        super().__init__(context)
        self._common = context
        self._watch = watch
        self._keepers: dict[Generation, Keeper] = {}
        self._generations.follow(self)

    def __iter__(self) -> Iterator[Keeper]:
        return iter([self._keepers[run] for run in self._generations.serving])

    def of(self, run: Generation | None) -> Keeper | None:
        """The keeper of a run; None if it does not serve."""
        return self._keepers.get(run) if run is not None else None

    def expect(self, run: Generation, accepted: Accepted) -> None:
        """Note the backend of a run that joins next, if it is not the one accepted now."""
        self._keepers[run] = Keeper(self._common, run, accepted, self._watch)

    def accept(self, run: Generation | None, accepted: Accepted | None) -> None:
        """Note the backend that is accepted while this run serves."""
        if (keeper := self.of(run)) is not None and accepted is not None:
            keeper.accepted = accepted

    def joined(self, run: Generation) -> None:
        if run not in self._keepers:
            assert self._desired.accepted is not None
            self.expect(run, self._desired.accepted)

    def left(self, run: Generation) -> None:
        del self._keepers[run]
