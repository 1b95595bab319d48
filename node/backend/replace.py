"""Strategies that bring another run of a core in the place of those that are there. One launcher, for all of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from twisted.internet.interfaces import IReactorTime
from twisted.internet.task import deferLater

from node.backend.generations import Generations
from node.backend.wind_down import WindDown
from node.contract.accounts import Accounts
from node.contract.driver import Generation, Plan
from node.errors import PortTaken
from node.waiting import together

# Seconds between two tries to get a port that is taken, and what the last try must have left.
PORT_RETRY = 0.25
LAST_TRY = 1.0

# The accounts that the next run begins with, asked when it is launched. Raises where it is not wanted any more.
Target = Callable[[], Mapping[str, Accounts]]


class Replacement:
    """Launches runs, and ends those before them."""

    def __init__(self, reactor: IReactorTime, generations: Generations, wind_down: WindDown) -> None:
        self._reactor = reactor
        self._generations = generations
        self.end = wind_down.end

    async def restart(self, plan: Plan, target: Target, deadline: float, least: float = LAST_TRY) -> Generation:
        """End every run without losing a byte, then launch the next; meanwhile nobody is served.

        A port that is taken is tried again until the deadline; the launch has `least` seconds even so. Raises what
        `Plan.launch` raises; no run is left then.
        """
        await self.end_all()
        return await self._launch(plan, target, max(deadline, self._reactor.seconds() + least))

    async def end_all(self) -> None:
        """End every run; those that an operation was about to end when it was aborted, too."""
        await together(map(self.end, self._generations.counting))

    async def _launch(self, plan: Plan, target: Target, deadline: float) -> Generation:
        while True:
            try:
                return await plan.launch(target(), round(deadline - self._reactor.seconds(), 1))
            except PortTaken:
                if self._reactor.seconds() + PORT_RETRY + LAST_TRY > deadline:
                    raise
                await deferLater(self._reactor, PORT_RETRY)
