"""Routing changes by controllers: taken into the desired state and applied to the running core."""

from __future__ import annotations

import secrets
from collections.abc import Callable

from node.backend.context import Context, Worker
from node.backend.control import Settled
from node.backend.desired import FIXED, Accepted
from node.backend.settling import Settling
from node.base.errors import InvalidConfig, InvalidRequest, NotStarted, UnknownName, Unsupported, shown
from node.contract.abilities import Routes
from node.contract.driver import Reroutable
from node.contract.routing import Routing

# Rules that may be added, and their characters in all: the core parses all of them again whenever one is added.
MOST = 1000
MOST_TEXT = 4 * 1024**2
# Seconds that a core may take to answer after a failed change.
ANSWER = 2.0


class Router(Worker):
    """Adds and removes rules, and sets targets of balancers. One change at a time, in order with Starts and Stops.

    A change that the core did not confirm stays wanted while the core lives, and is applied when it answers again.
    """

    def __init__(self, context: Context, settling: Settling) -> None:
        super().__init__(context)
        self._settling = settling

    async def add(self, text: str, reset: bool) -> None:
        """Append a rule (JSON); `reset` removes all others. Raises what `Reroutable.rerouted` raises."""

        def adding(accepted: Accepted) -> Routing:
            routing = accepted.routing.adding(text, secrets.token_hex(4), reset)
            if len(routing.added) > MOST or sum(len(rule.text) for rule in routing.added) > MOST_TEXT:
                raise InvalidRequest(
                    f"too many rules: at most {MOST:,}, of {MOST_TEXT:,} characters together, can be added"
                )
            return routing

        await self._change(adding)

    async def remove(self, tag: str) -> None:
        """Remove the rule with this tag, if there is one. Raises `InvalidRequest` for an empty tag."""
        if not tag:
            raise InvalidRequest("the tag of the rule to remove is empty")

        def removing(accepted: Accepted) -> Routing:
            there = tag in _reroutable(accepted).rule_tags
            return accepted.routing.without(tag) if there else accepted.routing

        await self._change(removing)

    async def lead(self, balancer: str, target: str) -> None:
        """Fix a balancer to a target; with an empty target it chooses by itself again. Raises `UnknownName`."""

        def leading(accepted: Accepted) -> Routing:
            if balancer not in _reroutable(accepted).balancers:
                raise UnknownName(f"there is no balancer {shown(balancer)}")
            return accepted.routing.leading(balancer, target)

        await self._change(leading)

    async def _change(self, change: Callable[[Accepted], Routing]) -> None:
        async def work(settled: Settled) -> None:
            # Users do not change: the next operation need not wait.
            settled()
            await self._perform(change)

        await self._control.run(work, core=True)
        await self._desired.recorder.kept()

    async def _perform(self, change: Callable[[Accepted], Routing]) -> None:
        before, _ = self._require()
        routing = change(before)
        if routing == before.routing:
            return
        wanted, adds = await before.with_routing(routing), not set(routing.added) <= set(before.routing.added)
        if adds:
            # Checked in a process of its own: a core can crash with a rule although it parses it.
            await wanted.runs.check({tag: {} for tag in wanted.runs.tags})
        # A run that is starting for users was launched without the change.
        await self._settling.idle()
        accepted, run = self._require()
        if accepted is not before:
            raise NotStarted("another Start replaced the backend: the routing was not changed")
        # Every run launched from now on has the change.
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
        """Whether to take a failed change back.

        A core that ended may have crashed because of it; one that hangs, because of an added rule. A removal is kept
        while the core lives: the rule may be gone already and would come back in another place. If another run has
        started with the change, the change is not to blame.
        """
        if isinstance(error, InvalidConfig):
            return True
        failed = not run.alive or (adds and not await run.answers(ANSWER))
        return failed and self._generations.current in (run, None)

    def _require(self) -> tuple[Accepted, Routes]:
        """The accepted backend and its current run. Raises as `Status.require`, and `Unsupported`."""
        self._status.require()
        accepted, run = self._desired.accepted, self._generations.current
        if accepted is None or run is None:
            raise NotStarted("the core is being restarted to apply users")
        if not isinstance(run, Routes):
            raise Unsupported(FIXED)
        return accepted, run


def _reroutable(accepted: Accepted) -> Reroutable:
    if not isinstance(accepted.runs, Reroutable):
        raise Unsupported(FIXED)
    return accepted.runs
