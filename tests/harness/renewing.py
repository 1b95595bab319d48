"""A run of a core, and the runs that replace it to apply user changes, without a runner."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from node.backend.context import Context
from node.backend.desired import Accepted, Desired
from node.backend.drain import Drain
from node.backend.options import BackendOptions
from node.backend.renewal import Renewal
from node.backend.replace import Replacement
from node.backend.state import State
from node.base.errors import NodeError
from node.base.logs import LogRing
from node.contract.accounts import Change, Refusal, apply
from node.contract.driver import Driver, Generation, Plan
from node.contract.generations import Generations
from node.events.journal import Journal
from tests.harness.memory import MemoryRecord


class Renewing:
    """`end` is called at the end of each run. `failed` are the errors of runs that did not start."""

    def __init__(
        self,
        reactor: Any,
        driver: Driver,
        plan: Plan,
        run: Generation,
        end: Callable[[Generation], Awaitable[None]] | None = None,
    ) -> None:
        self.run, self.failed, self.ended = run, list[NodeError](), list[Generation]()
        self._at_end = end
        self._generations = Generations()
        self._generations.adopt(run)
        run.when_exited().addCallback(lambda _: self._generations.gone(run))
        record: Any = MemoryRecord()
        desired = self._desired = Desired(reactor, record)
        one_at_a_time = BackendOptions(drain_generations=0)
        context = Context(reactor, LogRing(reactor, 100), desired, self._generations, one_at_a_time, Journal(reactor))
        context.status.enter(State.STARTING)
        context.status.enter(State.RUNNING)
        desired.accepted = Accepted(b"", 0, driver, plan, "", ("", "", frozenset()))
        wind_down: Any = self
        replacement = Replacement(context, wind_down, Drain(context, wind_down))
        self._renewal = Renewal(context, replacement, self.failed.append)

    async def end(self, run: Generation) -> None:
        """Stand-in for `WindDown.end`."""
        self.ended.append(run)
        self._generations.end(run)
        await run.stop()
        if self._at_end:
            await self._at_end(run)

    async def apply(self, changes: Sequence[Change]) -> list[Refusal]:
        """Apply changes as the reconciler does, with another run if necessary. Returns the refusals."""
        refused, left = await self.run.apply(changes)
        if left:
            more, left = await self.run.apply(left)
            refused = refused + more
        return refused + await self.renew(left) if left else refused

    async def renew(self, left: Sequence[Change]) -> list[Refusal]:
        """Start another run with these changes. Returns the refusals."""
        self._desired.roster.target = apply(left, self.run.accounts)
        renewed = await self._renewal.renew(self.run, left)
        self.run = renewed.run
        reason = renewed.fault.text if renewed.fault else ""
        return [Refusal(change.key, f"{change.tag}: {reason}") for change in renewed.out]
