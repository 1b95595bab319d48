"""Strategies that bring another run of a core in the place of those that are there. One launcher, for all of them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Protocol

from twisted.internet.interfaces import IReactorTime
from twisted.internet.task import deferLater

from node.backend.generations import Generations
from node.backend.wind_down import WindDown
from node.contract.accounts import Accounts, diff
from node.contract.driver import Generation, NotShared, Plan, Shares
from node.errors import CoreFailed, PortTaken
from node.logs import Logger
from node.waiting import together

# Seconds between two tries to get a port that is taken, and what the last try must have left.
PORT_RETRY = 0.25
LAST_TRY = 1.0
# Seconds that the run which serves may take to answer before another one comes in beside it: it may be busy.
ANSWER = 2.0
# Seconds in which a run that answers has to accept a connection on every inbound.
PROOF = 5.0

# The accounts that the next run begins with, asked when it is launched. Raises where it is not wanted any more, which
# is asked again before it takes over.
Target = Callable[[], Mapping[str, Accounts]]
# Has the core look at what is to be launched where those that serve end before it is; raises what is wrong with it.
Check = Callable[[], Awaitable[None]]


class Room(Protocol):
    """Whether there is room for another run beside those that drain; `node.backend.drain`."""

    @property
    def full(self) -> bool:
        """Whether one that drains would have to end early."""

    def lacks(self, run: Generation) -> bool:
        """Whether there is too little memory for another run like this one."""

    async def make(self, run: Generation) -> str:
        """Make room for a run like this one. Returns why there is none, if there is none."""


class Replacement:
    """Launches runs, and ends those before them."""

    log = Logger()

    def __init__(self, reactor: IReactorTime, generations: Generations, wind_down: WindDown, room: Room) -> None:
        self._reactor = reactor
        self._generations = generations
        self._room = room
        self.end, self.lacks = wind_down.end, room.lacks
        # Gives the run that the node's last program has left for this plan, or none. Asked once.
        self.recover: Callable[[Plan], Awaitable[Generation | None]] | None = None
        # Why the last one was a restart, although a run was there that served.
        self.obstacles: list[str] = []

    @property
    def crowded(self) -> bool:
        """Whether the next run ends an earlier one before its time."""
        return self._room.full

    async def bring(
        self, plan: Plan, target: Target, deadline: float, least: float = LAST_TRY, check: Check | None = None
    ) -> Generation:
        """Launch the next run: beside the newest that serves where both can share its listeners, else in its place.

        A port that is taken is tried again until the deadline; the launch has `least` seconds even so. Raises what
        `Plan.launch` or `check` raises. The one that serves goes on then if the next one was to run beside it, or did
        not get through the check; else none is left.
        """
        obstacles: list[str] = []
        recover, self.recover = self.recover, None
        if recover is not None and (left := await recover(plan)) is not None:
            return left
        if self._generations.serving:
            try:
                run = await self.beside(plan, target, deadline, least)
            except NotShared as error:
                obstacles = [str(error)]
            else:
                self.obstacles = []
                return run
        if check is not None:
            await check()
        self.obstacles = obstacles
        for obstacle in obstacles:
            self.log.warn("connections end with the core, which is restarted: {obstacle}", obstacle=obstacle)
        return await self._restart(plan, target, deadline, least)

    async def beside(self, plan: Plan, target: Target, deadline: float, least: float) -> Generation:
        """Launch beside the newest run that serves, which goes on whatever becomes of this.

        Raises `NotShared` if that cannot be done, and what `Plan.launch` raises.
        """
        before = self._generations.serving[0]
        if not isinstance(before, Shares):
            raise NotShared("this core cannot share its listeners")
        if not await before.answers(ANSWER):
            raise NotShared("the core does not answer")
        if obstacles := await before.obstacles(plan):
            raise NotShared("; ".join(obstacles))
        if reason := await self._room.make(before):
            raise NotShared(reason)
        # What it took to make room is not taken from the time to come up.
        return await self._overlap(before, plan, target, max(deadline, self._reactor.seconds() + least))

    async def end_all(self) -> None:
        """End every run; those that an operation was about to end when it was aborted, too."""
        await together(map(self.end, self._generations.counting))

    async def _restart(self, plan: Plan, target: Target, deadline: float, least: float) -> Generation:
        """End every run without losing a byte, then launch; meanwhile nobody is served."""
        target()
        await self.end_all()
        return await self._launch(plan, target, max(deadline, self._reactor.seconds() + least))

    async def _overlap(self, before: Shares, plan: Plan, target: Target, deadline: float) -> Generation:
        """Launch beside the run that serves, and lead new connections to the new one when it has shown that it serves.

        Connections that are there stay where they are. Raises `CoreFailed` if the new one does not serve, and
        `NotShared`. No new run is left then.
        """
        run = await self._launch(plan, target, deadline, before)
        try:
            await _take_over(run, target)
        except BaseException:
            await run.stop()
            raise
        return run

    async def _launch(self, plan: Plan, target: Target, deadline: float, before: Shares | None = None) -> Generation:
        while True:
            if before is not None:
                # Before each try: of one that failed nobody keeps the kernel from giving connections to the next.
                await before.join()
            try:
                return await plan.launch(target(), round(deadline - self._reactor.seconds(), 1))
            except PortTaken:
                if self._reactor.seconds() + PORT_RETRY + LAST_TRY > deadline:
                    raise
                await deferLater(self._reactor, PORT_RETRY)


async def _let_go(run: Generation, target: Mapping[str, Accounts]) -> None:
    """Nobody gets in by it who was removed while it came up, or has another credential."""
    gone = [change for change in diff(run.accounts, target) if change.key in run.accounts[change.tag]]
    if gone:
        await run.apply([change._replace(packed=None) for change in gone])


async def _take_over(run: Generation, target: Target) -> None:
    assert isinstance(run, Shares)
    try:
        await run.join()
        await run.prove(PROOF)
        await _let_go(run, target())
        await run.lead()
    except NotShared as error:
        # One that has ended cannot be joined by anybody: that is no reason to end the one that serves.
        if await run.answers(LAST_TRY):
            raise
        raise CoreFailed(f"the core came up and does not answer any more: {error}") from error
    # From here on the caller has it: a Stop or a Start that came meanwhile knows nothing of it.
    target()
    if not run.alive:
        raise CoreFailed("the core came up and ended at once")
