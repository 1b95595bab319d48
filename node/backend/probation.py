"""The probation of a run that took over: if it fails soon, the node goes back to the previous run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from node.backend.context import Context, Worker
from node.backend.desired import Accepted
from node.base.periodic import Periodic
from node.contract.abilities import Shares
from node.contract.driver import Generation

# Seconds that probation lasts at least, between two health checks, and that an answer may take: long enough that a busy
# core on a busy machine is not mistaken for a hung one. Probation lasts until the last health check is answered.
SECONDS = 5.0
ASK = 1.0
ANSWER = 5.0


@dataclass(frozen=True)
class Takeover:
    """A run that took over, the previous run, and the backend that was accepted for the previous one."""

    run: Generation
    before: Shares
    accepted: Accepted


class Probation(Worker):
    """Health checks of the newest run, while there is a way back. `hung` is called for a run that does not answer."""

    def __init__(self, context: Context, hung: Callable[[Generation, str], None]) -> None:
        super().__init__(context)
        self._hung = hung
        self._takeover: Takeover | None = None
        self._until = 0.0
        self._asking = Periodic("the health check of a new core", self._ask, ASK, self._reactor)

    @property
    def under_way(self) -> bool:
        return self._takeover is not None

    def begin(self, run: Generation, before: Shares, accepted: Accepted, seconds: float | None = None) -> None:
        """Begin the probation of a run that took over from `before`; an earlier probation is over."""
        self._takeover = Takeover(run, before, accepted)
        self._asking.start()
        self._until = self._reactor.seconds() + (SECONDS if seconds is None else seconds)

    def left(self, before: Generation) -> float | None:
        """Seconds for which the node can at least go back to this run; None if it cannot."""
        takeover = self._takeover
        if takeover is None or takeover.before is not before:
            return None
        return max(0.0, self._until - self._reactor.seconds())

    def end(self) -> None:
        """End the probation: there is no way back any more."""
        self._takeover = None
        self._asking.stop()

    def way_back(self, run: Generation) -> Takeover | None:
        """The previous run to go back to if this one fails now; None without a previous run."""
        takeover = self._takeover
        if takeover is None or takeover.run is not run:
            return None
        return takeover if takeover.before in self._generations.draining and takeover.before.alive else None

    async def _ask(self) -> None:
        takeover = self._takeover
        if takeover is None or not self.way_back(takeover.run):
            self.end()
        elif await takeover.run.answers(ANSWER):
            if self._reactor.seconds() >= self._until:
                self.end()
        elif takeover.run.alive:
            self._hung(takeover.run, f"it did not answer for {ANSWER:g} s just after it took over")
