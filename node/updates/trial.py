"""Other files under what runs: brought in beside it, watched while they prove themselves, else taken back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from twisted.internet.interfaces import IReactorTime
from twisted.internet.task import deferLater

from node.contract.driver import Generation
from node.errors import NodeError
from node.updates.jobs import Refused

# Seconds for which a run that took over has to hold, between two looks at it, and for another one to come in its place.
HOLD, LOOK, BACK = 5.0, 0.25, 20.0

Due = Callable[[Generation], bool]


def always(_: Generation) -> bool:
    """Whatever runs is due for another run."""
    return True


class Status(Protocol):
    @property
    def awaited(self) -> bool:
        """A run is on its way."""


class Happened(Protocol):
    @property
    def losses(self) -> Mapping[str, int]:
        """Cores that were wanted and went away, by reason."""


class Runner(Protocol):
    """What runs: see `node.backend.runner`."""

    @property
    def status(self) -> Status: ...

    @property
    def happened(self) -> Happened: ...

    @property
    def on_probation(self) -> bool: ...

    @property
    def returned(self) -> str: ...

    async def exchange(self, core: str, use: Callable[[], None], back: Callable[[], None], due: Due) -> bool: ...


class Trial:
    """Tries files on the one backend."""

    def __init__(self, reactor: IReactorTime, runner: Runner) -> None:
        self._reactor = reactor
        self._runner = runner

    async def bring_in(self, core: str, use: Callable[[], None], back: Callable[[], None], due: Due = always) -> bool:
        """Have the core of this name run from what `use` chooses: see `Runner.exchange`.

        Returns whether another run took over for it, which holds. Raises `Refused` with why it does not; then `back`
        was called, and what there was runs.
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
        """What there was runs again, by itself or now. Returns why it has to."""
        until = self._reactor.seconds() + BACK
        while self._runner.status.awaited and self._reactor.seconds() < until:
            await deferLater(self._reactor, LOOK)
        if reason := self._runner.returned:
            return reason
        try:
            await self._runner.exchange(core, _nothing, _nothing, always)
        except NodeError as error:
            return f"the core did not hold, and the one before it does not come up either: {error.text}"
        return "the core did not hold, and the one before it runs again"


def _nothing() -> None:
    pass
