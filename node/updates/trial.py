"""Switch the running core to other files: start a new core beside it, watch it, and go back if it fails."""

from __future__ import annotations

from collections.abc import Callable

from twisted.internet.interfaces import IReactorTime
from twisted.internet.task import deferLater

from node.backend.runner import Runner
from node.base.errors import NodeError
from node.contract.driver import Generation
from node.updates.record import Refused

# Seconds that a new core must last, between two checks of it, and to wait for the one that replaces a failed one.
HOLD, LOOK, BACK = 5.0, 0.25, 20.0


class Trial:
    """Tries files on the node's backend."""

    def __init__(self, reactor: IReactorTime, runner: Runner) -> None:
        self._reactor = reactor
        self._runner = runner

    async def bring_in(
        self, core: str, use: Callable[[], None], back: Callable[[], None], due: Callable[[Generation], bool]
    ) -> bool:
        """Switch the core of this name to what `use` chooses: see `Runner.exchange`.

        Returns whether a new core took over, and lasted; False if none had to. Raises `Refused` with the reason if it
        failed; then `back` was called, and the previous files are in use again.
        """
        losses = self._losses
        try:
            took = await self._runner.exchange(core, use, back, due)
        except NodeError as error:
            raise Refused(error.text) from error
        if took and not await self._holds(losses):
            back()
            raise Refused(await self._taken_back(core))
        return took

    @property
    def _losses(self) -> int:
        return sum(self._runner.happened.losses.values())

    async def _holds(self, losses: int) -> bool:
        until = self._reactor.seconds() + HOLD
        while self._reactor.seconds() < until or self._runner.on_probation:
            if self._losses != losses:
                return False
            await deferLater(self._reactor, LOOK)
        return self._losses == losses

    async def _taken_back(self, core: str) -> str:
        """Wait until the previous files run again, or start a core from them. Returns why the new one failed."""
        until = self._reactor.seconds() + BACK
        while self._runner.status.awaited and self._reactor.seconds() < until:
            await deferLater(self._reactor, LOOK)
        if reason := self._runner.returned:
            return reason
        try:
            await self._runner.exchange(core, lambda: None, lambda: None, lambda _: True)
        except NodeError as error:
            return f"the new core failed soon after it took over, and the one before it does not start: {error.text}"
        return "the new core failed soon after it took over, and the one before it runs again"
