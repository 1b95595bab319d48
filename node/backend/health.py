"""Looks after a core that runs: does it answer, and are its users the ones that it confirmed, and that are wanted?"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial

from twisted.internet.defer import CancelledError, Deferred, TimeoutError, ensureDeferred
from twisted.internet.interfaces import IReactorTime
from twisted.internet.task import deferLater
from twisted.python.failure import Failure

from node.contract.driver import Exit, Generation
from node.errors import NodeError
from node.logs import Logger
from node.periodic import Periodic

# Seconds between two questions, and how long an answer may take; a core that needs longer is treated as gone.
INTERVAL = 5.0
PATIENCE = 10.0
# Seconds before a core that gave no answer is asked again.
AGAIN = 0.5
# Seconds between two looks at the core's own list of users.
AUDIT = 60.0
# Seconds that a core which refused something may take to show that it lives.
LIVES = 1.0


class Watch:
    """Asks each generation for as long as it lives."""

    log = Logger()

    def __init__(
        self,
        reactor: IReactorTime,
        hung: Callable[[Generation, str], None],
        repair: Callable[[Generation], Awaitable[None]],
    ) -> None:
        self._reactor = reactor
        self._hung = hung
        self._repair = repair
        self._doubted: set[Generation] = set()
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
            generation.when_exited().addCallback(self._over, look)

    def doubt(self, generation: Generation) -> None:
        """It did not answer: as soon as it does its users are looked at, and settled."""
        if generation not in self._doubted:
            self._doubted.add(generation)
            self._follow(generation)

    def _over(self, _: Exit, look: Periodic) -> None:
        look.stop()
        self._looks.remove(look)

    def _follow(self, generation: Generation) -> None:
        """Look at it for as long as it lives."""
        watching = ensureDeferred(self._look(generation))
        exited = generation.when_exited().addCallback(_cancel, watching)
        exited.addErrback(_no_more)
        watching.addErrback(self._ended)
        # At its end all who wait are told: none of them may leave then.
        watching.addBoth(lambda _: exited.cancel() if generation.alive else None)

    def _ended(self, failure: Failure) -> None:
        if not failure.check(CancelledError):
            self.log.failure("a core is not watched any more", failure)

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
        except NodeError as error:
            self.log.warn("the core's users were not compared: {reason}", reason=error.text)
        try:
            await self._repair(generation)
        except NodeError as error:
            self.log.warn("the core's users were not settled: {reason}", reason=error.text)


async def lives(run: Generation, reactor: IReactorTime) -> bool:
    """Whether a run answers after something went wrong; where it does not, its end is waited for, for a moment.

    Calls to a core that was killed fail before its end is known.
    """
    deadline = reactor.seconds() + LIVES
    if await run.answers(LIVES):
        return True
    with suppress(TimeoutError):
        await run.when_exited().addTimeout(max(0.0, deadline - reactor.seconds()), reactor)
    return False


def _cancel(_: Exit, watching: Deferred[None]) -> None:
    watching.cancel()


def _no_more(failure: Failure) -> None:
    """Nobody waits for its end any more."""
    failure.trap(CancelledError)
