"""Readiness checks: made every second, so that a request is cheap and all clients get the same answer."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from twisted.internet.defer import ensureDeferred
from twisted.internet.interfaces import IReactorTime

from node.backend.state import State, Status
from node.base.errors import NodeError
from node.base.logs import Logger
from node.base.part import Part
from node.base.periodic import Periodic
from node.contract.abilities import Accepts
from node.contract.generations import Generations
from node.state.store import Store

# Seconds between two rounds of checks.
INTERVAL = 1.0
# Returns what is wrong, or "".
Check = Callable[[], Coroutine[Any, Any, str]]
_NOT_YET = "not checked yet"


class Readiness(Part):
    """Makes `checks`, by name. `changed` is called when the node becomes ready or unready."""

    title = "the readiness check"
    log = Logger()

    def __init__(self, reactor: IReactorTime, checks: Mapping[str, Check], changed: Callable[[bool], None]) -> None:
        self.checks = checks
        # The faults, by name of the check.
        self.faults: Mapping[str, str] = dict.fromkeys(checks, _NOT_YET)
        self._changed = changed
        self._looking = Periodic("the readiness check", self.look, INTERVAL, reactor)

    @property
    def ready(self) -> bool:
        return not self.faults

    @property
    def warnings(self) -> list[str]:
        """Whether the checks themselves fail, so that the verdict is old."""
        return self._looking.warnings

    def begin(self) -> None:
        """Make the first checks at once."""
        ensureDeferred(self.look()).addErrback(
            lambda failure: self.log.failure("the first readiness check failed; the node tries again", failure)
        )
        self._looking.start()

    def stop(self) -> None:
        self._looking.stop()

    async def look(self) -> None:
        """Make all checks."""
        found = {name: fault for name, check in self.checks.items() if (fault := await self._fault(name, check))}
        before, self.faults = self.ready, found
        if self.ready != before:
            self._changed(self.ready)

    async def _fault(self, name: str, check: Check) -> str:
        try:
            return await check()
        except NodeError as error:
            return error.text
        except Exception as error:  # noqa: BLE001 - logged; a check that cannot be made has failed
            if name not in self.faults:
                self.log.failure("the readiness check {name} failed by a fault of the node: it is not ready", name=name)
            return f"internal error: {type(error).__name__}; the node's log has more"


def checks(store: Store, status: Status, generations: Generations) -> Mapping[str, Check]:
    """The checks `state` (on disk), `core` and `inbounds`; without a backend the last two succeed."""

    async def state() -> str:
        return store.fault

    async def core() -> str:
        if status.stopped or _serves(status, generations):
            return ""
        return f"the core is {status.state}" + (f": {status.reason}" if status.reason else "")

    async def inbounds() -> str:
        run = generations.current
        if status.stopped or not isinstance(run, Accepts):
            return ""
        return "; ".join(await run.deaf())

    return {"state": state, "core": core, "inbounds": inbounds}


def _serves(status: Status, generations: Generations) -> bool:
    """Whether a core serves; while a Start brings up another core, the old one does."""
    run = generations.current
    return run is not None and run.alive and status.state in (State.RUNNING, State.STARTING)
