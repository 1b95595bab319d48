"""Ends the backend's core after a Stop: at once, or after STOP_GRACE, unless a Start takes it back."""

from __future__ import annotations

from node.backend.context import Context, Worker
from node.backend.control import Settled
from node.backend.faults import in_background
from node.backend.supervisor import Supervisor
from node.base.alarm import Alarm
from node.contract.driver import Generation


class Stops(Worker):
    """Performs Stops. `waiting` is the run that the last one left for the Start that follows it."""

    def __init__(self, context: Context, supervisor: Supervisor) -> None:
        super().__init__(context)
        self._supervisor = supervisor
        self.waiting: Generation | None = None
        self.grace = Alarm(self._reactor, self._grace_over)

    async def stop(self, grace: float, settled: Settled) -> None:
        """Let the core wait for a Start for `grace` seconds, or end it."""
        self.grace.cancel()
        self.waiting = self._generations.current or self.waiting
        if grace and self.waiting in self._generations.serving and self._desired.accepted is not None:
            self._generations.retire()
            self.grace.set(grace)
            # Removals that were left undone because a Start or a new run was to end this one.
            in_background(self._supervisor.settling.settle_all(), "users could not be removed from the core")
        else:
            await self._end(settled)

    def _grace_over(self) -> None:
        """End the core after STOP_GRACE, unless a Start that is under way still takes it back."""

        async def work(settled: Settled) -> None:
            if self._status.stopped and not self.grace.pending:
                await self._end(settled)

        in_background(self._control.run(work, core=True, final=True), "the core could not be stopped after STOP_GRACE")

    async def _end(self, settled: Settled) -> None:
        self.waiting = None
        self._desired.clear()
        settled()
        await self._supervisor.end_all()
