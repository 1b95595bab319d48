"""The steps of an upgrade in place: check the next version, wait for a good moment, hand everything over."""

from __future__ import annotations

from collections.abc import Callable

from twisted.internet.defer import Deferred, ensureDeferred
from twisted.internet.task import deferLater
from twisted.python.failure import Failure

from node.base.errors import NodeError
from node.base.logs import Logger
from node.base.part import Part
from node.base.pool import in_pool
from node.base.reactor import PooledReactor
from node.base.waiting import fire
from node.handover.program import Program, Refused, Try
from node.handover.succession import Succession

# Seconds between two checks whether the runs can be handed over, and until the upgrade is refused because they cannot:
# a core may take long to start, and if the next version takes over one core only, a draining one takes DRAIN_TIMEOUT.
LOOK = 0.5
STEADY = 900.0
# … and until the next try after a hand-over that turned out to be too early.
AGAIN = 3.0


class Upgrades(Part):
    """Runs one upgrade at a time.

    `program` is the command to execute again, or why that is impossible; `run` runs a program to its end.
    """

    title = "the upgrades"
    log = Logger()

    def __init__(self, reactor: PooledReactor, node: Succession, program: Program | str, run: Try) -> None:
        self._reactor = reactor
        self._node = node
        self._program = program
        self._run = run
        self._going = False
        # Callers that asked for an upgrade while one was under way.
        self._joined: list[Deferred[str]] = []
        self._keeping: Deferred[None] | None = None

    def start(self) -> None:
        """Copy the running modules as early as possible: another version may be installed any time."""
        if isinstance(self._program, Program):
            self._keeping = self._done(self._program.copy)

    def settle(self, outcome: str | None) -> None:
        """Make the copy the way back: from here on this program does not go back to an earlier one itself."""
        if isinstance(self._program, Program):
            if self._keeping is None:
                self.start()
            assert self._keeping is not None
            keep = self._program.keep
            self._keeping.addCallback(lambda _: self._done(keep))

    def _done(self, work: Callable[[], None]) -> Deferred[None]:
        return in_pool(self._reactor, work).addErrback(self._not_kept)

    def _not_kept(self, failure: Failure) -> None:
        self.log.warn(
            "no copy of the running version: a failed upgrade could not be undone: {reason}",
            reason=failure.getErrorMessage(),
        )

    def ask(self) -> None:
        """Begin an upgrade, unless one is under way."""
        ensureDeferred(self.wanted()).addErrback(self._failed)

    async def wanted(self) -> str:
        """Begin an upgrade, or join the one under way. Returns only if there is no upgrade, with the reason."""
        if self._going:
            self.log.info("an upgrade is already under way: the node begins no second one")
            joined: Deferred[str] = Deferred()
            self._joined.append(joined)
            return await joined
        self._going, reason = True, "the upgrade failed; the node's log has more"
        try:
            reason = await self._upgrade()
        except NodeError as refused:
            reason = str(refused)
            self._node.refuse(reason)
        finally:
            self._going = False
            joined_by, self._joined = self._joined, []
            for waiter in joined_by:
                fire(waiter, reason)
        return reason

    async def _upgrade(self) -> str:
        """Upgrade. Returns only if the process is ending instead. Raises `NodeError` if there is no upgrade."""
        if isinstance(self._program, str):
            raise Refused(self._program)
        if self._keeping is not None:
            # Until then the way back leads to the version before the running one.
            await self._keeping
        deadline = self._reactor.seconds() + STEADY
        while True:
            await self._steady(deadline)
            # Only now: an update may have installed another version while this one waited.
            version = await self._program.test(self._run)
            if self._node.unsteady:
                continue
            if not (reason := await self._node.succeed(self._program, version)):
                return ""
            if self._reactor.seconds() > deadline:
                raise Refused(f"{reason}; ask again later")
            self.log.info("the upgrade waits: {reason}", reason=reason)
            # Not at once: each try makes controllers connect again.
            await deferLater(self._reactor, AGAIN)

    async def _steady(self, deadline: float) -> None:
        """Wait until the node can be handed over. Raises `Refused` after the deadline."""
        if reason := self._node.unsteady:
            self.log.info("the upgrade waits: {reason}", reason=reason)
        while reason := self._node.unsteady:
            if self._reactor.seconds() > deadline:
                raise Refused(f"{reason}; ask again later")
            await deferLater(self._reactor, LOOK)

    def _failed(self, failure: Failure) -> None:
        self.log.failure("the upgrade failed", failure)
