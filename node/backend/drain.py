"""Ends draining cores: when they have no connections left, after a timeout, or to make room for another one."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from twisted.internet.defer import ensureDeferred
from twisted.internet.task import deferLater

from node.backend.context import Context, Worker
from node.backend.faults import in_background, pid_of
from node.backend.probation import SECONDS as PROBATION
from node.backend.wind_down import DRAINED, WindDown
from node.base.errors import NodeError
from node.base.logs import Logger
from node.base.periodic import Periodic
from node.base.waiting import lasting, together
from node.contract.abilities import Shares
from node.contract.driver import Generation
from node.events.kinds import Kind
from node.machine.memory import available, resident

# Seconds between two checks, and how long a core drains at least: as long as the node may go back to it, and until a
# client whose handshake it answered has connected, within 3 s even if a packet is lost (1 s, then 3 s: Linux'
# TCP_TIMEOUT_INIT).
LOOK = 1.0
SETTLED = max(3.0, PROBATION)
# Seconds that a new core waits for memory before draining cores are ended for it, and between two checks meanwhile.
ROOM = 1.0
ROOM_LOOK = 0.1
# Memory that a starting core needs, as a multiple of the previous core's, and bytes that stay free.
PEAK = 2.5
SPARE = 64 * 1024**2


class Drain(Worker):
    """Watches the draining runs and ends them in time."""

    log = Logger()

    def __init__(self, context: Context, wind_down: WindDown) -> None:
        super().__init__(context)
        self._wind_down = wind_down
        # When each began to drain.
        self._since: dict[Generation, float] = {}
        # The connections of each at the last check; and how many connections early ends have cost since the node began.
        self._connections: dict[Generation, int] = {}
        self.dropped = 0
        # Runs that are being ended early; and whether to end none, while the node hands them over.
        self._ends: set[Generation] = set()
        self.paused = False
        self._looking = Periodic("checking draining cores", self._look, LOOK, self._reactor)

    @property
    def warnings(self) -> list[str]:
        return self._looking.warnings

    @property
    def connections(self) -> int:
        """The connections of all draining runs at the last check."""
        return sum(self._connections.get(run, 0) for run in self._since)

    @property
    def full(self) -> bool:
        """Whether another draining run would end one of these early."""
        current = self._generations.current
        crowded = 0 < self._options.drain_generations <= len(self._holding)
        return crowded or (bool(self._since) and current is not None and self.lacks(current))

    @property
    def _holding(self) -> list[Generation]:
        """Draining runs with connections, or not checked yet; oldest first."""
        return [run for run in self._since if self._connections.get(run, 1)]

    @property
    def ending(self) -> bool:
        """Whether a run is being ended early."""
        return bool(self._ends)

    def since(self, run: Generation) -> float:
        """When this run began to drain, in the reactor's seconds; now, if it does not drain."""
        return self._since.get(run, self._reactor.seconds())

    def inherit(self, since: Mapping[Generation, float]) -> None:
        """Take over draining runs, oldest first, from the previous node process, with the times when they began."""
        self._since = {**since, **self._since}

    def begin(self) -> None:
        """Watch the runs that began to drain; end some if there are too many."""
        if not self._looking.running:
            self._looking.start()
        for run in self._generations.draining:
            if run not in self._since:
                self._since[run] = self._reactor.seconds()
                self._journal.tell(Kind.DRAIN_BEGUN, "a core drains: a new one has taken over", **pid_of(run))
        self._forget()
        # Only now that the new run serves: one that fails to start costs no connections, nor waits for an end.
        in_background(self._thin_out(), "a draining core above DRAIN_GENERATIONS could not be ended")

    async def _thin_out(self) -> None:
        """End draining runs beyond DRAIN_GENERATIONS, the one with the fewest connections first."""
        if len(self._holding) > self._options.drain_generations:
            await together(map(self._count, self._holding))
        while len(holding := self._holding) > self._options.drain_generations:
            await self._end_early(await self._emptiest(holding), "more cores drain than DRAIN_GENERATIONS allows")

    async def _emptiest(self, runs: Sequence[Generation]) -> Generation:
        """The run with the fewest connections; among equals the oldest."""
        counts = await together(map(self._count, runs))
        return min(zip(counts, runs, strict=True), key=lambda counted: counted[0])[1]

    async def _count(self, run: Generation) -> float:
        """The number of connections of a run; infinite if it cannot be known."""
        try:
            count = await run.connected() if isinstance(run, Shares) else math.inf
        except NodeError as error:
            self.log.warn(
                "a draining core's connections could not be counted: {reason}; if memory is short, it is ended last",
                reason=error.text,
            )
            return math.inf
        if run in self._since and isinstance(count, int):
            self._connections[run] = count
        return count

    def stop(self) -> None:
        """Stop watching: no run drains any more."""
        self._since.clear()
        self._looking.stop()

    async def make_room(self, run: Generation) -> str:
        """Make room for another run like this one: if memory is short, end runs with the fewest connections first.

        Returns why there is no room, or an empty text.
        """
        if not self._options.drain_generations:
            return "DRAIN_GENERATIONS is 0"
        self._forget()
        patient_until = self._reactor.seconds() + ROOM
        while (others := [other for other in self._since if other is not run]) and self.lacks(run):
            other = await self._emptiest(others)
            if self._connections.get(other, 1) and self._reactor.seconds() < patient_until:
                await deferLater(self._reactor, ROOM_LOOK)
            else:
                # Goes on if the Start is aborted meanwhile.
                await lasting(ensureDeferred(self._end_early(other, "a new core needs its memory")))
            self._forget()
        return "there is not enough memory for two cores" if self.lacks(run) else ""

    def lacks(self, run: Generation) -> bool:
        """Whether there is too little memory for another run like this one."""
        size = resident(run.pid) if run.pid is not None else 0
        return available() < PEAK * size + SPARE

    async def _look(self) -> None:
        if self.paused:
            return
        self._forget()
        # Without a current run the newest draining one gets the new connections: leave it alone.
        serving = self._generations.serving[:1]
        await together(self._look_at(run, since) for run, since in tuple(self._since.items()) if run not in serving)

    async def _look_at(self, run: Generation, since: float) -> None:
        age = self._reactor.seconds() - since
        if age >= self._options.drain_timeout:
            await self._end_early(run, f"it has drained for {self._options.drain_timeout:g} s (DRAIN_TIMEOUT)")
        elif isinstance(run, Shares):
            self._connections[run] = await run.connected()
            if age >= SETTLED and not self._connections[run] and not self.paused:
                await self._over(run)

    async def _end_early(self, run: Generation, reason: str) -> None:
        # Removed first, so that nothing else ends it meanwhile.
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
        self.log.info("ending a draining core with {count} connections: {reason}", count=count, reason=reason)
        text = f"a draining core was ended with {count} connections: {reason}"
        self._journal.tell(Kind.DRAIN_CUT, text, connections=count, reason=reason, **pid_of(run))
        await self._over(run)

    async def _over(self, run: Generation) -> None:
        self._since.pop(run, None)
        if run in self._generations.draining:
            await self._wind_down.end(run, DRAINED)

    def _forget(self) -> None:
        """Forget runs that do not drain any more: they died, serve again, or are being ended elsewhere."""
        self._since = {run: since for run, since in self._since.items() if run in self._generations.draining}
        self._connections = {run: count for run, count in self._connections.items() if run in self._since}
