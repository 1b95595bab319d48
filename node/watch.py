"""Looks after a core that runs: does it answer, and are its users the ones that it confirmed, and that are wanted?"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
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
        repair: Callable[[Generation], Awaitable[None]],
    ) -> None:
        self._reactor = reactor
        self._hung = hung
        self._repair = repair
        self._doubted: set[Generation] = set()

    def begin(self, generation: Generation) -> None:
        """Watch it until it has exited."""
        self._follow(generation, self._every(INTERVAL, self._health, generation))
        self._follow(generation, self._every(AUDIT, self._compare, generation))

    def doubt(self, generation: Generation) -> None:
        """It did not answer: as soon as it does its users are looked at, and settled."""
        if generation not in self._doubted:
            self._doubted.add(generation)
            self._follow(generation, self._look(generation))

    def _follow(self, generation: Generation, work: Coroutine[Any, Any, None]) -> None:
        """Have this done for as long as the core lives."""
        watching = ensureDeferred(work)
        exited = generation.when_exited().addCallback(_cancel, watching)
        exited.addErrback(_no_more)
        watching.addErrback(self._ended)
        # At its end all who wait are told: none of them may leave then.
        watching.addBoth(lambda _: exited.cancel() if generation.alive else None)

    def _ended(self, failure: Failure) -> None:
        if not failure.check(CancelledError):
            self.log.failure("a core is not watched any more", failure)

    async def _every(
        self, seconds: float, work: Callable[[Generation], Awaitable[None]], generation: Generation
    ) -> None:
        while generation.alive:
            await deferLater(self._reactor, seconds)
            try:
                await work(generation)
            except Exception:
                if not generation.alive:
                    raise
                self.log.failure("a look at the core failed; there will be others")

    async def _health(self, generation: Generation) -> None:
        asked = self._reactor.seconds()
        if await self._answers(generation) and self._reactor.seconds() - asked >= AGAIN:
            await self._compare(generation)

    async def _look(self, generation: Generation) -> None:
        try:
            answered = await self._answers(generation)
        finally:
            # What goes wrong from now on is another doubt.
            self._doubted.discard(generation)
        if answered:
            await self._compare(generation)

    async def _answers(self, generation: Generation) -> bool:
        """Ask until it answers, by a new connection where one is broken; when its time is over it counts as hung."""
        deadline = self._reactor.seconds() + PATIENCE
        while generation.alive and (left := deadline - self._reactor.seconds()) > 0:
            if await generation.answers(left):
                return True
            await deferLater(self._reactor, AGAIN)
        if generation.alive:
            self._hung(generation, f"it did not answer for {PATIENCE:g} s")
        return False

    async def _compare(self, generation: Generation) -> None:
        try:
            drift = await generation.audit()
            if drift:
                self.log.warn("{drift} users of the core were not as it had confirmed; repairing", drift=drift)
        except NodeError as fault:
            self.log.warn("the core's users were not compared: {reason}", reason=fault.text)
        try:
            await self._repair(generation)
        except NodeError as fault:
            self.log.warn("the core's users were not settled: {reason}", reason=fault.text)


def _cancel(_: Exit, watching: Deferred[None]) -> None:
    watching.cancel()


def _no_more(failure: Failure) -> None:
    """Nobody waits for its end any more."""
    failure.trap(CancelledError)
