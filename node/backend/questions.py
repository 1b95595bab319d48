"""Queries to the core; if a run ends while it is asked, the runs that serve then are asked instead."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import TypeVar

from twisted.internet.interfaces import IReactorTime

from node.backend.health import lives
from node.base.errors import CoreFailed
from node.contract.driver import Generation
from node.contract.generations import Generations

T = TypeVar("T")
Ask = Callable[[Generation], Awaitable[T]]


class Questions:
    """Queries runs, each once. `current` returns the run to ask, and raises if no run serves."""

    def __init__(self, reactor: IReactorTime, current: Callable[[], Generation], generations: Generations) -> None:
        self._reactor = reactor
        self._current = current
        self._generations = generations

    async def one(self, ask: Ask[T]) -> T:
        """Ask the current run. Raises as `current`, and what `ask` raises."""
        while True:
            run = self._current()
            for answer in (await self._asked(run, ask, lambda: [self._generations.current])).values():
                return answer

    async def all(self, ask: Ask[T]) -> list[T]:
        """Ask every run that may have users' connections. Raises as `one`."""
        answers: dict[Generation, T] = {}
        while self._current() not in answers:
            for run in self._generations.serving:
                if run not in answers:
                    answers.update(await self._asked(run, ask, lambda: self._generations.serving))
        return list(answers.values())

    async def _asked(
        self, run: Generation, ask: Ask[T], asked: Callable[[], Collection[Generation | None]]
    ) -> Mapping[Generation, T]:
        """The run's answer; empty if it failed and is not among the runs in `asked` any more."""
        try:
            return {run: await ask(run)}
        except CoreFailed:
            if run in asked():
                # A core that was killed may not be known to be gone yet.
                await lives(run, self._reactor)
            if run in asked():
                raise
            return {}
