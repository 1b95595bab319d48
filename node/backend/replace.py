"""Replaces runs of a core: starts a new one beside the serving one if they can share listeners, else restarts."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import TypeVar

from twisted.internet.defer import CancelledError, ensureDeferred
from twisted.internet.task import deferLater
from twisted.python.failure import Failure

from node.backend.context import Context, Worker
from node.backend.drain import Drain
from node.backend.wind_down import WindDown
from node.base.errors import CoreFailed, NodeError, PortTaken
from node.base.logs import Logger
from node.base.waiting import lasting, outcomes, together
from node.contract.abilities import NotShared, Shares
from node.contract.accounts import Accounts, Change, diff
from node.contract.driver import Generation, Plan

T = TypeVar("T")

# Seconds between two tries to get a port that is taken, and the least that the last try must have left.
PORT_RETRY = 0.25
LAST_TRY = 1.0
# Seconds that the serving run may take to answer before a new one starts beside it: it may be busy.
ANSWER = 2.0
# Seconds for which the launch of a run that shares no listeners goes on after it was cancelled.
UNWANTED = 1.0
# Seconds in which a new run has to accept a connection on every inbound.
PROOF = 5.0

# Returns the accounts that the new run should have now; called at the launch, and again when it takes over. Raises if
# the run is not wanted any more.
Target = Callable[[], Mapping[str, Accounts]]
# Has the core check the next run before a restart ends the serving ones; raises what is wrong with it.
Check = Callable[[], Awaitable[None]]


class Replacement(Worker):
    """Launches runs and ends those that they replace."""

    log = Logger()

    def __init__(self, context: Context, wind_down: WindDown, drain: Drain) -> None:
        super().__init__(context)
        self._wind_down = wind_down
        self.drain = drain
        # Returns the run that the previous node process handed over for this plan, or None. Called once.
        self.recover: Callable[[Plan], Awaitable[Generation | None]] | None = None
        # Why the last replacement restarted the core although a run served.
        self.obstacles: list[str] = []

    def disinherit(self) -> bool:
        """Recover no handed-over run any more. Returns whether one was still to be recovered."""
        left, self.recover = self.recover, None
        return left is not None

    async def bring(
        self, plan: Plan, target: Target, deadline: float, least: float = LAST_TRY, check: Check | None = None
    ) -> Generation:
        """Launch the next run: beside the newest serving one if both can share its listeners, else in its place.

        A port that is taken is retried until the deadline; the launch has at least `least` seconds. Raises what
        `Plan.launch` or `check` raises. The serving run goes on then if the new one was to run beside it, or failed the
        check; else no run is left.
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
            self.log.warn("restarting the core, which ends all connections: {obstacle}", obstacle=obstacle)
        return await self._restart(plan, target, deadline, least)

    async def beside(
        self, plan: Plan, target: Target, deadline: float, least: float, whole: bool = False
    ) -> Generation:
        """Launch a run beside the newest serving one, which goes on even if this fails.

        Raises `NotShared` if they cannot share listeners, what `Plan.launch` raises, and with `whole` `CoreFailed` if
        the new one lacks users who came meanwhile.
        """
        before = self._generations.serving[0]
        if not isinstance(before, Shares):
            raise NotShared("this core cannot share its listeners")
        if not await before.answers(ANSWER):
            raise NotShared("the core does not answer")
        if obstacles := await before.obstacles(plan):
            raise NotShared("; ".join(obstacles))
        if reason := await self.drain.make_room(before):
            raise NotShared(reason)
        # The launch has its full time even if making room took long.
        return await self._overlap(before, plan, target, max(deadline, self._reactor.seconds() + least), whole)

    async def end_all(self) -> None:
        """End every run, also those whose end was aborted half-way."""
        await together(map(self._wind_down.end, self._generations.counting))

    async def _restart(self, plan: Plan, target: Target, deadline: float, least: float) -> Generation:
        """End every run, with its last counters, then launch; no user is served meanwhile."""
        target()
        await self.end_all()
        found: list[Generation | Failure] = []

        async def launch() -> None:
            found.extend(await outcomes([self._launch(plan, target, max(deadline, self._reactor.seconds() + least))]))

        launching = ensureDeferred(launch())
        try:
            await lasting(launching)
        except CancelledError:
            await launching.addTimeout(UNWANTED, self._reactor)
            await self._end_unwanted(found[0])
            raise
        return _unless_failed(found[0])

    async def _end_unwanted(self, found: Generation | Failure) -> None:
        """End a core that started alone, if it did, and is not wanted any more.

        It listens before it answers, so it may have had connections: its counters are read.
        """
        if not isinstance(found, Failure) or not found.check(CancelledError, NodeError):
            await self._wind_down.end(_unless_failed(found))

    async def _overlap(self, before: Shares, plan: Plan, target: Target, deadline: float, whole: bool) -> Generation:
        """Launch beside the serving run and direct new connections to the new one once it has proved that it serves.

        Existing connections stay with their run. Raises `CoreFailed` if the new one does not serve, and `NotShared`.
        The new one is gone then, or drains if it may have connections.
        """
        run = await self._launch(plan, target, deadline, before)
        self._generations.come(run)
        try:
            await self._take_over(run, target, min(PROOF, max(LAST_TRY, deadline - self._reactor.seconds())), whole)
        except BaseException:
            await self._give_up(before, run)
            raise
        return run

    async def _take_over(self, run: Generation, target: Target, seconds: float, whole: bool) -> None:
        assert isinstance(run, Shares)
        try:
            await run.join()
            await run.prove(seconds)
            missing = await catch_up(run, target)
            if whole and any(change.packed is not None for change in missing):
                raise CoreFailed("users came meanwhile whom the new core does not take while it runs")
            # Without a turn of the reactor between: users removed from now on are removed from this run, too.
            self._generations.take_over(run)
            await run.lead()
        except NotShared as error:
            # A run that has ended cannot share listeners either: that is no reason to end the serving one.
            if await run.answers(LAST_TRY):
                raise
            raise CoreFailed(f"the new core started and then stopped answering: {error}") from error
        # The last check: a Stop or a Start that came meanwhile does not know this run.
        target()
        if not run.alive:
            raise CoreFailed("the new core started and ended at once")

    async def _give_up(self, before: Shares, run: Generation) -> None:
        """Give up a new run that failed or is not wanted any more: it drains if it may have connections, else dies."""
        if run not in self._generations.serving:
            run.kill()
            try:
                await run.stop()
            finally:
                self._generations.gone(run)
            return
        self._generations.drain(run)
        self.drain.begin()
        try:
            if before in self._generations.serving:
                await before.lead()
        except NotShared as error:
            self.log.warn(
                "the node gave up a new core, but new connections still go to it, not to the previous one: {reason}",
                reason=str(error),
            )

    async def _launch(self, plan: Plan, target: Target, deadline: float, before: Shares | None = None) -> Generation:
        while True:
            if before is not None:
                # Before each try: the end of a failed one may release the hold that keeps the kernel from giving
                # connections to the next run too early.
                await before.join()
            try:
                return await plan.launch(target(), round(deadline - self._reactor.seconds(), 1))
            except PortTaken:
                if self._reactor.seconds() + PORT_RETRY + LAST_TRY > deadline:
                    raise
                await deferLater(self._reactor, PORT_RETRY)


def _unless_failed(found: T | Failure) -> T:
    if isinstance(found, Failure):
        found.raiseException()
    return found


async def catch_up(run: Generation, target: Target) -> list[Change]:
    """Apply the current target to a run that has just started. Returns the changes that it does not take now."""
    before: list[Change] = []
    while (changes := diff(run.accounts, target())) and changes != before:
        before = changes
        await run.apply(changes)
    return changes
