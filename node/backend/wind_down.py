"""Shuts a core down without losing a byte of its counters."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from twisted.internet.defer import CancelledError, TimeoutError, ensureDeferred
from twisted.internet.interfaces import IReactorTime
from twisted.internet.task import deferLater

from node.backend.faults import pid_of
from node.base.logs import Logger
from node.contract.driver import Generation
from node.contract.generations import Generations
from node.events.journal import Tells
from node.events.kinds import Kind

# Seconds between two readings, and how many equal ones in a row end the reading once the counters have moved: on a busy
# processor the core's threads may count what they carried a moment later.
REST_POLL = 0.02
EQUAL = 2
UNREAD = "a core ended and its newest counters were not read: {reason}"


@dataclass(frozen=True)
class Patience:
    """Timeouts in seconds for an ending core.

    `answer`: to answer at all; it is asked twice. `wind`: to take no more connections and end the live ones. `rest`:
    for its counters to come to rest when no connection is left.
    """

    answer: float
    wind: float
    rest: float


# A Stop, and the Start after it, wait for the end: with the end of the process it must take less than a panel waits.
CALLER = Patience(answer=2.0, wind=3.0, rest=1.5)
# No caller waits for the end of a draining core.
DRAINED = Patience(answer=5.0, wind=10.0, rest=2.0)


class WindDown:
    """Shuts a core down without losing a byte: ends its connections, reads its counters until they rest, stops it.

    `read` books one run's counters and returns whether there may be more.
    """

    log = Logger()

    def __init__(
        self,
        reactor: IReactorTime,
        generations: Generations,
        read: Callable[[Generation], Awaitable[bool]],
        journal: Tells,
    ) -> None:
        self._reactor = reactor
        self._generations = generations
        self._read = read
        self._journal = journal

    async def book_last(self, generation: Generation) -> None:
        """Book the last counters of a run that has ended unasked, as far as the node knows them without asking it."""
        await self._read(generation)

    async def end(self, generation: Generation, patience: Patience = CALLER) -> None:
        """Wind a run down, or continue an aborted wind-down. A run that does not answer is killed."""
        self._generations.end(generation)
        answered = True
        try:
            # Asked twice: the core may have stalled only for a moment.
            if generation.alive:
                answered = await generation.answers(patience.answer) or await generation.answers(patience.answer)
            if generation.alive and not answered:
                self._unread(generation, "it did not answer")
            elif generation.alive:
                await self._read_out(generation, patience)
        except CancelledError:
            raise
        except Exception as error:  # noqa: BLE001 - logged; the core must end in any case
            self.log.failure("closing a core's connections and reading its last counters failed: the node ends it now")
            self._unread(generation, f"{type(error).__name__}, the node's log has more")
        try:
            if not answered:
                generation.kill()
            await generation.stop()
        finally:
            if not generation.alive:
                self._generations.gone(generation)

    async def _read_out(self, generation: Generation, patience: Patience) -> None:
        try:
            await ensureDeferred(generation.wind_down()).addTimeout(patience.wind, self._reactor)
        except TimeoutError:
            self._unread(generation, f"its connections did not end within {patience.wind:g} s")
        try:
            # Bounded: a core that stalls only now, or a slow reading of another core, must not hold up a Start.
            await ensureDeferred(self._rest(generation)).addTimeout(patience.rest, self._reactor)
        except TimeoutError:
            self._unread(generation, f"they did not come to rest within {patience.rest:g} s")

    async def _rest(self, generation: Generation) -> None:
        left = 1
        while generation.alive and left:
            left = EQUAL if await self._read(generation) else left - 1
            if left:
                await deferLater(self._reactor, REST_POLL)

    def _unread(self, generation: Generation, reason: str) -> None:
        self.log.error(UNREAD + "; its traffic since the last reading is not counted", reason=reason)
        self._journal.tell(Kind.COUNTERS_LOST, UNREAD.format(reason=reason), reason=reason, **pid_of(generation))
