"""Looks after a core that runs: does it answer, and are its users the ones that it confirmed?"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from twisted.internet.defer import CancelledError, Deferred, ensureDeferred
from twisted.internet.task import deferLater
from twisted.logger import Logger
from twisted.python.failure import Failure

from drivers.interface import Exit, Generation
from node.errors import NodeError

# Seconds between two questions, and how long an answer may take; a core that needs longer is treated as gone.
INTERVAL = 5.0
PATIENCE = 10.0
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
            if not await generation.answers(PATIENCE) and generation.alive:
                self._hung(generation, f"it did not answer for {PATIENCE:g} s")
                return

    async def _users(self, generation: Generation) -> None:
        while generation.alive:
            await deferLater(self._reactor, AUDIT)
            try:
                drift = await generation.audit()
            except NodeError as fault:
                self.log.warn("the core's users were not compared: {reason}", reason=fault.text)
                continue
            if drift:
                self.log.warn("{drift} users of the core were not as it had confirmed; repairing", drift=drift)
                await self._drifted(generation)


def _cancel(_: Exit, watching: Deferred[None]) -> None:
    watching.cancel()
