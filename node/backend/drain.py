"""Ends runs that drain: when nobody is connected to them any more, at a limit of time, or for want of room."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from twisted.internet.interfaces import IReactorTime

from node.backend.faults import in_background, pid_of
from node.backend.generations import Generations
from node.backend.probation import SECONDS as PROBATION
from node.contract.driver import Generation, Shares
from node.errors import NodeError
from node.events.journal import Tells
from node.events.kinds import Kind
from node.logs import Logger
from node.machine.memory import available, resident
from node.periodic import Periodic
from node.waiting import together

# Seconds between two looks, and how long a run stays at least: while there is a way back to it, and for a client that
# was answered by it, who comes within 3 s also if a packet was lost (1 s, then 3 s: Linux' TCP_TIMEOUT_INIT).
LOOK = 1.0
SETTLED = max(3.0, PROBATION)
# How much memory a run takes while it comes up, of that of the one before it, and what is left untouched.
PEAK = 2.5
SPARE = 64 * 1024**2


@dataclass(frozen=True)
class Limits:
    """How long a run may drain, in seconds, and how many may at once."""

    timeout: float = 600.0
    generations: int = 4


class Drain:
    """Looks after the runs whose place another one took."""

    log = Logger()

    def __init__(
        self,
        reactor: IReactorTime,
        generations: Generations,
        limits: Limits,
        end: Callable[[Generation], Awaitable[None]],
        journal: Tells,
    ) -> None:
        self._reactor = reactor
        self._generations = generations
        self._limits = limits
        self._end = end
        self._journal = journal
        # Since when each drains.
        self._since: dict[Generation, float] = {}
        # Of each, at the last look; and how many were ended before their time, since the node began.
        self._connections: dict[Generation, int] = {}
        self.dropped = 0
        # Those that are about to end; and whether none is to, for they are being left to another program.
        self._ends: set[Generation] = set()
        self.paused = False
        self._looking = Periodic("looking after cores that drain", self._look, LOOK, reactor)

    @property
    def warnings(self) -> list[str]:
        return self._looking.warnings

    @property
    def connections(self) -> int:
        """How many connections the runs that drain had when they were looked at last."""
        return sum(self._connections.get(run, 0) for run in self._since)

    @property
    def full(self) -> bool:
        """Whether the next one ends the oldest before its time."""
        return 0 < self._limits.generations <= len(self._since)

    @property
    def ending(self) -> bool:
        """Whether one is about to end."""
        return bool(self._ends)

    def since(self, run: Generation) -> float:
        """When it began to drain."""
        return self._since.get(run, self._reactor.seconds())

    def inherit(self, since: Mapping[Generation, float]) -> None:
        """An earlier program of the node has left these, which have drained since then; oldest first."""
        self._since = {**since, **self._since}

    def begin(self) -> None:
        """A run took the place of those that drain now."""
        if not self._looking.running:
            self._looking.start()
        for run in self._generations.draining:
            if run not in self._since:
                self._since[run] = self._reactor.seconds()
                self._journal.tell(Kind.DRAIN_BEGUN, "a core drains: another one took its place", **pid_of(run))
        self._forget()
        # Only now: what did not come up has ended nobody's connections, and has not waited for an end.
        for run in tuple(self._since)[: -self._limits.generations or None]:
            in_background(self._end_early(run, "too many drain"), "a core that drains was not ended")

    def stop(self) -> None:
        """No run drains any more."""
        self._since.clear()
        self._looking.stop()

    async def make(self, run: Generation) -> str:
        """Satisfies `node.backend.replace.Room`: the oldest end before their time where memory is short."""
        if not self._limits.generations:
            return "DRAIN_GENERATIONS is 0"
        self._forget()
        while (others := [other for other in self._since if other is not run]) and self.lacks(run):
            await self._end_early(others[0], "another one needs its memory")
        return "there is not enough memory for two cores" if self.lacks(run) else ""

    def lacks(self, run: Generation) -> bool:
        """Satisfies `node.backend.replace.Room`."""
        size = resident(run.pid) if isinstance(run, Shares) and run.pid is not None else 0
        return available() < PEAK * size + SPARE

    async def _look(self) -> None:
        if self.paused:
            return
        self._forget()
        # Where no run is the current one, the newest of these is given new connections until there is.
        serving = self._generations.serving[:1]
        await together(self._look_at(run, since) for run, since in tuple(self._since.items()) if run not in serving)

    async def _look_at(self, run: Generation, since: float) -> None:
        age = self._reactor.seconds() - since
        if age >= self._limits.timeout:
            await self._end_early(run, f"it has drained for {self._limits.timeout:g} s")
        elif isinstance(run, Shares):
            self._connections[run] = await run.connected()
            if age >= SETTLED and not self._connections[run] and not self.paused:
                await self._over(run)

    async def _end_early(self, run: Generation, reason: str) -> None:
        # Meanwhile nobody else is to begin with it.
        self._since.pop(run, None)
        self._ends.add(run)
        try:
            await self._cut(run, reason)
        finally:
            self._ends.discard(run)

    async def _cut(self, run: Generation, reason: str) -> None:
        try:
            ended = await run.connected() if isinstance(run, Shares) else 0
            count = str(ended) if isinstance(run, Shares) else "its"
            self.dropped += ended
        except NodeError as error:
            count = f"an unknown number ({error.text}) of"
        self.log.info("a core that drains is ended with {count} connections: {reason}", count=count, reason=reason)
        text = f"a core that drained was ended with {count} connections: {reason}"
        self._journal.tell(Kind.DRAIN_CUT, text, connections=count, reason=reason, **pid_of(run))
        await self._over(run)

    async def _over(self, run: Generation) -> None:
        self._since.pop(run, None)
        if run in self._generations.draining:
            await self._end(run)

    def _forget(self) -> None:
        """Those that do not drain any more: they died, serve again, or are ended by others."""
        self._since = {run: since for run, since in self._since.items() if run in self._generations.draining}
        self._connections = {run: count for run, count in self._connections.items() if run in self._since}
