"""Looks after a core that runs: does it answer, and are its users the ones that it confirmed?"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from twisted.internet.task import deferLater
from twisted.logger import Logger

from drivers.interface import Exit, Generation
from node.errors import NodeError
from node.periodic import Periodic

# Seconds between two questions, and how long an answer may take; a core that needs longer is treated as gone.
INTERVAL = 5.0
PATIENCE = 10.0
# Seconds before a core that gave no answer is asked again.
AGAIN = 0.5
# Seconds between two looks at the core's own list of users.
AUDIT = 60.0


class Watch:
    """Asks each generation for as long as it lives."""

    log = Logger()

    def __init__(
        self,
        reactor: Any,
        hung: Callable[[Generation, str], None],
        drifted: Callable[[Generation], Awaitable[None]],
    ) -> None:
        self._reactor = reactor
        self._hung = hung
        self._drifted = drifted
        self._looks: list[Periodic] = []

    @property
    def warnings(self) -> list[str]:
        """What an operator should know: a core that is not watched as it should be."""
        return [warning for look in self._looks for warning in look.warnings]

    def begin(self, generation: Generation) -> None:
        """Watch it until it has exited."""
        for name, seconds, work in (
            ("asking the core whether it answers", INTERVAL, self._health),
            ("comparing the core's users", AUDIT, self._compare),
        ):
            look = Periodic(name, partial(work, generation), seconds, self._reactor)
            self._looks.append(look)
            look.start()
            generation.when_exited().addCallback(self._ended, look)

    def _ended(self, _: Exit, look: Periodic) -> None:
        look.stop()
        self._looks.remove(look)

    async def _health(self, generation: Generation) -> None:
        if not await self._answers(generation):
            self._hung(generation, f"it did not answer for {PATIENCE:g} s")

    async def _answers(self, generation: Generation) -> bool:
        """Ask until its time is over: a broken connection is made anew, and its users are compared then."""
        deadline = self._reactor.seconds() + PATIENCE
        left, again = PATIENCE, False
        while generation.alive and left > 0:
            if await generation.answers(left):
                if again:
                    await self._compare(generation)
                return True
            await deferLater(self._reactor, AGAIN)
            left, again = deadline - self._reactor.seconds(), True
        return not generation.alive

    async def _compare(self, generation: Generation) -> None:
        try:
            drift = await generation.audit()
            if drift:
                self.log.warn("{drift} users of the core were not as it had confirmed; repairing", drift=drift)
                await self._drifted(generation)
        except NodeError as fault:
            self.log.warn("the core's users were not compared: {reason}", reason=fault.text)
