"""The time in which a run that took over has to show that it holds, and the way back to the one before it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from twisted.internet.interfaces import IReactorTime

from node.backend.desired import Accepted
from node.backend.generations import Generations
from node.contract.driver import Generation, Shares
from node.periodic import Periodic

# Seconds that it lasts at least, between two questions in it, and that an answer may take: so long that a core which
# is merely busy, on a machine that is, is not taken for one that hangs. It lasts until the last question is answered.
SECONDS = 5.0
ASK = 1.0
ANSWER = 5.0


@dataclass(frozen=True)
class Taken:
    """A run that took over, and the one before it, of what was accepted then."""

    run: Generation
    before: Shares
    accepted: Accepted


class Probation:
    """`hung` is told of a run that does not answer in it."""

    def __init__(
        self, reactor: IReactorTime, generations: Generations, hung: Callable[[Generation, str], None]
    ) -> None:
        self._reactor = reactor
        self._generations = generations
        self._hung = hung
        self._taken: Taken | None = None
        self._until = 0.0
        self._asking = Periodic("asking a new core whether it holds", self._ask, ASK, reactor)

    @property
    def under_way(self) -> bool:
        return self._taken is not None

    def begin(self, run: Generation, before: Shares, accepted: Accepted, seconds: float | None = None) -> None:
        """This run took over from that one. An earlier one has ended."""
        self._taken = Taken(run, before, accepted)
        self._asking.start()
        self._until = self._reactor.seconds() + (SECONDS if seconds is None else seconds)

    def left(self, before: Generation) -> float | None:
        """Seconds for which there is a way back to this run, at least; None if there is none."""
        taken = self._taken
        if taken is None or taken.before is not before:
            return None
        return max(0.0, self._until - self._reactor.seconds())

    def end(self) -> None:
        """There is no way back any more."""
        self._taken = None
        self._asking.stop()

    def way_back(self, run: Generation) -> Taken | None:
        """Where to go if this run has failed just now."""
        taken = self._taken
        if taken is None or taken.run is not run:
            return None
        return taken if taken.before in self._generations.draining and taken.before.alive else None

    async def _ask(self) -> None:
        taken = self._taken
        if taken is None or not self.way_back(taken.run):
            self.end()
        elif await taken.run.answers(ANSWER):
            if self._reactor.seconds() >= self._until:
                self.end()
        elif taken.run.alive:
            self._hung(taken.run, f"it did not answer for {ANSWER:g} s just after it took over")
