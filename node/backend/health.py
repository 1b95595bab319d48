"""Health checks of running cores: whether they answer, and whether their users are the confirmed and wanted ones."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial

from twisted.internet.defer import CancelledError, Deferred, TimeoutError, ensureDeferred
from twisted.internet.interfaces import IReactorTime
from twisted.internet.task import deferLater
from twisted.python.failure import Failure

from node.base.errors import NodeError
from node.base.logs import Logger
from node.base.periodic import Periodic
from node.contract.driver import Exit, Generation

# Seconds between two health checks, and how long an answer may take: a core that needs longer counts as hung.
INTERVAL = 5.0
PATIENCE = 10.0
# Seconds before a core that gave no answer is asked again.
AGAIN = 0.5
# Seconds between two audits of the core's own list of users.
AUDIT = 60.0
# Seconds that a core may take to answer after something went wrong.
LIVES = 1.0


class Watch:
    """Checks each generation for as long as it lives. `hung` is called for one that does not answer in time."""

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
        """Health checks and audits that fail with an internal error."""
        return [warning for look in self._looks for warning in look.warnings]

    def begin(self, generation: Generation) -> None:
        """Check a run regularly until it has exited."""
        for name, seconds, work in (
            ("the core's health check", INTERVAL, self._health),
            ("the audit of the core's users", AUDIT, self._compare),
        ):
            look = Periodic(name, partial(work, generation), seconds, self._reactor)
            self._looks.append(look)
            look.start()
            generation.when_exited().addCallback(self._over, look)

    def doubt(self, generation: Generation) -> None:
        """Check a run that did not answer: as soon as it does its users are audited and repaired."""
        if generation not in self._doubted:
            self._doubted.add(generation)
            self._follow(generation)

    def _over(self, _: Exit, look: Periodic) -> None:
        look.stop()
        self._looks.remove(look)

    def _follow(self, generation: Generation) -> None:
        """Check a doubted run once; stop if it exits."""
        watching = ensureDeferred(self._look(generation))
        exited = generation.when_exited().addCallback(_cancel, watching)
        exited.addErrback(_no_more)
        watching.addErrback(self._ended)
        # When it exits all waiters are called in a row: cancelling one then would disturb that.
        watching.addBoth(lambda _: exited.cancel() if generation.alive else None)

    def _ended(self, failure: Failure) -> None:
        if not failure.check(CancelledError):
            self.log.failure(
                "a core did not answer, and the node failed to check whether it hangs; the periodic check goes on",
                failure,
            )

    async def _health(self, generation: Generation) -> None:
        asked = self._reactor.seconds()
        if await self._answers(generation) and self._reactor.seconds() - asked >= AGAIN:
            await self._compare(generation)

    async def _look(self, generation: Generation) -> None:
        try:
            answered = await self._answers(generation)
        finally:
            # A failure from now on needs another check.
            self._doubted.discard(generation)
        if answered:
            await self._compare(generation)

    async def _answers(self, generation: Generation) -> bool:
        """Ask until it answers, over a new connection if one is broken; after PATIENCE it counts as hung."""
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
                self.log.warn(
                    "{drift} users in the core differ from those that it confirmed: the node repairs them", drift=drift
                )
        except NodeError as error:
            self.log.warn(
                "the core's users could not be audited: {reason}; the next audit tries again", reason=error.text
            )
        try:
            await self._repair(generation)
        except NodeError as error:
            self.log.warn("the core's users could not be repaired: {reason}; the next audit retries", reason=error.text)


async def lives(run: Generation, reactor: IReactorTime) -> bool:
    """Whether a run answers after something went wrong. If not, wait for its exit for the rest of LIVES seconds.

    Calls to a core that was killed fail before the node knows of its exit.
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
    """Ignore the cancellation: the check ended before the run."""
    failure.trap(CancelledError)
