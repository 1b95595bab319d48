"""One upgrade of the node in place, in its order: the next program is tried, then everything is left to it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from twisted.internet.defer import Deferred, ensureDeferred
from twisted.internet.task import deferLater
from twisted.internet.threads import deferToThreadPool
from twisted.python.failure import Failure

from node.errors import NodeError
from node.logs import Logger
from node.reactor import PooledReactor
from node.upgrade.program import Program, Refused, Successor, Try

# Seconds between two looks at whether what runs can be left, and until the operator is told that it cannot: a core may
# not come up for long, and where the next version goes on with one core alone, one that drains takes DRAIN_TIMEOUT.
LOOK = 0.5
STEADY = 900.0
# … and until the next try after one that came too early all the same.
AGAIN = 3.0


class Node(Protocol):
    """What there is to be left."""

    def unsteady(self, several: bool) -> str:
        """Why that cannot be now; empty if it can. `several`: to a program that can go on with more than one core."""

    async def rehearse(self) -> None:
        """Do what can be done before that, while all is served. Raises `NodeError` for what stands against it."""

    async def succeed(self, program: Program, successor: Successor) -> str:
        """Leave everything, and become that program. Returns only if that cannot be now, and why: all goes on then."""

    def refuse(self, reason: str) -> None:
        """Tell that there is no upgrade, and why."""


class Upgrades:
    """Runs one at a time. `program` is what is run again, or why that cannot be; `run` runs one to its end."""

    log = Logger()

    def __init__(self, reactor: PooledReactor, node: Node, program: Program | str, run: Try) -> None:
        self._reactor = reactor
        self._node = node
        self._program = program
        self._run = run
        self._going = False
        self._keeping: Deferred[None] | None = None

    def prepare(self) -> None:
        """Copy what this program is, as early as can be: another version may be installed any time."""
        if isinstance(self._program, Program):
            self._keeping = self._in_pool(self._program.copy)

    def begin(self) -> None:
        """There is no way back to an earlier program: the next one's is to this one."""
        if isinstance(self._program, Program):
            if self._keeping is None:
                self.prepare()
            assert self._keeping is not None
            keep = self._program.keep
            self._keeping.addCallback(lambda _: self._in_pool(keep))

    def _in_pool(self, work: Callable[[], None]) -> Deferred[None]:
        return deferToThreadPool(self._reactor, self._reactor.getThreadPool(), work).addErrback(self._not_kept)

    def _not_kept(self, failure: Failure) -> None:
        self.log.warn("a version that fails cannot be gone back from: {reason}", reason=failure.getErrorMessage())

    def ask(self) -> None:
        """Begin one, if none is under way."""
        ensureDeferred(self.wanted()).addErrback(self._failed)

    async def test(self, modules: Path) -> str:
        """Have the modules there say whether they could take over. Returns what they say. Raises `Refused`."""
        if isinstance(self._program, str):
            raise Refused(self._program)
        if self._keeping is not None:
            # What is tried is installed next: the way back is not to lead there.
            await self._keeping
        return (await self._program.test(self._run, modules)).version

    async def wanted(self) -> str:
        """Begin one. Returns only if it cannot be, and why."""
        if self._going:
            return "one is under way already"
        self._going = True
        try:
            if isinstance(self._program, str):
                raise Refused(self._program)
            if self._keeping is not None:
                # Until then the way back leads to the version before this one.
                await self._keeping
            successor = await self._program.test(self._run)
            deadline = self._reactor.seconds() + STEADY
            while True:
                await self._steady(successor.several, deadline)
                await self._node.rehearse()
                if not (reason := await self._node.succeed(self._program, successor)):
                    return ""  # the process ends instead
                if self._reactor.seconds() > deadline:
                    raise Refused(f"{reason}; ask again later")
                self.log.info("the upgrade waits: {reason}", reason=reason)
                # Not at once: controllers had to come again for this try.
                await deferLater(self._reactor, AGAIN)
        except NodeError as refused:
            self._node.refuse(str(refused))
            return str(refused)
        finally:
            self._going = False

    async def _steady(self, several: bool, deadline: float) -> None:
        """Wait until what runs can be left. Raises `Refused` after this time."""
        if reason := self._node.unsteady(several):
            self.log.info("the upgrade waits: {reason}", reason=reason)
        while reason := self._node.unsteady(several):
            if self._reactor.seconds() > deadline:
                raise Refused(f"{reason}; ask again later")
            await deferLater(self._reactor, LOOK)

    def _failed(self, failure: Failure) -> None:
        self.log.failure("the upgrade failed", failure)
