"""What controllers say of routing: taken into the desired backend, and brought to the core that runs."""

from __future__ import annotations

import secrets
from collections.abc import Callable

from node.backend.control import Control, Settled
from node.backend.desired import FIXED, Accepted, Desired
from node.backend.generations import Generations
from node.backend.settling import Settling
from node.backend.state import Status
from node.contract.driver import Reroutable, Routes
from node.contract.routing import Routing
from node.errors import InvalidConfig, InvalidRequest, NotStarted, UnknownName, Unsupported, shown

# Rules that may be added, and the characters of all together: each is read by the core again when another one comes.
MOST = 1000
MOST_TEXT = 4 * 1024**2
# Seconds that a core may take to answer at all.
ANSWER = 2.0


class Router:
    """Adds and removes rules, and leads balancers. One change at a time, in order with Starts and Stops.

    What a core did not answer about is in force when it does: nothing is given up while it lives.
    """

    def __init__(
        self, status: Status, control: Control, desired: Desired, generations: Generations, settling: Settling
    ) -> None:
        self._status = status
        self._control = control
        self._desired = desired
        self._generations = generations
        self._settling = settling

    async def add(self, text: str, reset: bool) -> None:
        """Append the rule of this JSON; with `reset` all others go. Raises what `Reroutable.rerouted` raises."""

        def adding(accepted: Accepted) -> Routing:
            routing = accepted.routing.adding(text, secrets.token_hex(4), reset)
            if len(routing.added) > MOST or sum(len(rule.text) for rule in routing.added) > MOST_TEXT:
                raise InvalidRequest(f"no more than {MOST:,} rules, of {MOST_TEXT:,} characters together, can be added")
            return routing

        await self._change(adding)

    async def remove(self, tag: str) -> None:
        """Remove the rule of this tag; one that is not there is fine. Raises `InvalidRequest` for none."""
        if not tag:
            raise InvalidRequest("a rule is removed by its tag")

        def removing(accepted: Accepted) -> Routing:
            there = tag in _reroutable(accepted).rule_tags
            return accepted.routing.without(tag) if there else accepted.routing

        await self._change(removing)

    async def lead(self, balancer: str, target: str) -> None:
        """Have a balancer lead there; with an empty target it chooses again. Raises `UnknownName`."""

        def leading(accepted: Accepted) -> Routing:
            if balancer not in _reroutable(accepted).balancers:
                raise UnknownName(f"there is no balancer {shown(balancer)}")
            return accepted.routing.leading(balancer, target)

        await self._change(leading)

    async def _change(self, change: Callable[[Accepted], Routing]) -> None:
        async def work(settled: Settled) -> None:
            # It says nothing of users.
            settled()
            await self._perform(change)

        await self._control.run(work, core=True)
        await self._desired.recorded()

    async def _perform(self, change: Callable[[Accepted], Routing]) -> None:
        before, _ = self._require()
        routing = change(before)
        if routing == before.routing:
            return
        wanted, adds = await before.with_routing(routing), not set(routing.added) <= set(before.routing.added)
        if adds:
            # By a process of its own: some rules that the core can read it does not outlive.
            await wanted.runs.check({tag: {} for tag in wanted.runs.tags})
        # What is on its way for users was begun without it.
        await self._settling.idle()
        accepted, run = self._require()
        if accepted is not before:
            raise NotStarted("another backend took its place")
        # Whatever is launched from now on has it.
        self._desired.reroute(wanted)
        try:
            await run.reroute(wanted.runs)
        except Exception as error:
            if self._desired.accepted is wanted and await self._is_refused(run, error, adds):
                self._desired.reroute(before)
            raise
        finally:
            if self._desired.accepted is wanted:
                self._desired.keep_routing()

    async def _is_refused(self, run: Routes, error: Exception, adds: bool) -> bool:
        """Whether a change that failed is not to be in force.

        A core that ended may have done so because of it, one that hangs because of a rule that it was to have. A rule
        that was to go may be gone, and would come back in another place. Where another run has come up with the change,
        that is not to blame.
        """
        if isinstance(error, InvalidConfig):
            return True
        failed = not run.alive or (adds and not await run.answers(ANSWER))
        return failed and self._generations.current in (run, None)

    def _require(self) -> tuple[Accepted, Routes]:
        """What runs, and the run of it. Raises as `Status.require`, and `Unsupported`."""
        self._status.require()
        accepted, run = self._desired.accepted, self._generations.current
        if accepted is None or run is None:
            raise NotStarted("users are being applied")
        if not isinstance(run, Routes):
            raise Unsupported(FIXED)
        return accepted, run


def _reroutable(accepted: Accepted) -> Reroutable:
    if not isinstance(accepted.runs, Reroutable):
        raise Unsupported(FIXED)
    return accepted.runs
