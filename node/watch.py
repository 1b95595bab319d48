"""Looks after a core that runs: does it answer, and are its users the ones that it confirmed?"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from twisted.internet.defer import CancelledError, Deferred, ensureDeferred
from twisted.internet.task import deferLater
from twisted.python.failure import Failure

from drivers.interface import Exit, Generation
from node.errors import NodeError
from node.logs import Logger

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

    def begin(self, generation: Generation) -> None:
        """Watch it until it has exited."""
        for work in (self._health(generation), self._users(generation)):
            watching = ensureDeferred(work)
            watching.addErrback(self._ended)
            generation.when_exited().addCallback(_cancel, watching)

    def _ended(self, failure: Failure) -> None:
        if not failure.check(CancelledError):
            self.log.failure("a core is not watched any more", failure)

    async def _health(self, generation: Generation) -> None:
        while generation.alive:
            await deferLater(self._reactor, INTERVAL)
            if not await self._answers(generation):
                self._hung(generation, f"it did not answer for {PATIENCE:g} s")
                return

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

    async def _users(self, generation: Generation) -> None:
        while generation.alive:
            await deferLater(self._reactor, AUDIT)
            await self._compare(generation)

    async def _compare(self, generation: Generation) -> None:
        try:
            drift = await generation.audit()
            if drift:
                self.log.warn("{drift} users of the core were not as it had confirmed; repairing", drift=drift)
                await self._drifted(generation)
        except NodeError as fault:
            self.log.warn("the core's users were not compared: {reason}", reason=fault.text)


def _cancel(_: Exit, watching: Deferred[None]) -> None:
    watching.cancel()
