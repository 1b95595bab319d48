"""Shutting a core down without losing a byte."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from twisted.internet.defer import CancelledError, TimeoutError, ensureDeferred
from twisted.internet.interfaces import IReactorTime
from twisted.internet.task import deferLater

from node.backend.generations import Generations
from node.contract.driver import Generation
from node.logs import Logger

# Seconds that a core which is to end may take to show that its counters can be read, …
FAREWELL = 2.0
# … to take no more connections and end the live ones (a Stop, and the Start behind it, wait for this), …
WINDING = 10.0
# … and its counters to come to rest when nobody is connected any more, and between two looks at them.
REST = 2.0
REST_POLL = 0.02


class WindDown:
    """Shuts a core down without losing a byte: ends its connections, reads its counters until they rest, stops it.

    `read` books what one run has counted by now, and says whether there may be more.
    """

    log = Logger()

    def __init__(
        self, reactor: IReactorTime, generations: Generations, read: Callable[[Generation], Awaitable[bool]]
    ) -> None:
        self._reactor = reactor
        self._generations = generations
        self._read = read

    async def end(self, generation: Generation) -> None:
        """End it, or go on with that where it was cut short."""
        self._generations.end(generation)
        try:
            if generation.alive and await generation.answers(FAREWELL):
                await ensureDeferred(generation.wind_down()).addTimeout(WINDING, self._reactor)
                await self._in_time(generation)
        except CancelledError:
            raise
        except Exception:  # noqa: BLE001 - logged; whatever went wrong, it must not stay
            self.log.failure("a core could not be wound down: what it counted last may be lost")
        try:
            await generation.stop()
        finally:
            if not generation.alive:
                self._generations.gone(generation)

    async def _in_time(self, generation: Generation) -> None:
        """Wait until its counters rest. A core that stalls only now, or a reading of another one, holds up no Start."""
        try:
            await ensureDeferred(self._rest(generation)).addTimeout(REST + REST_POLL, self._reactor)
        except TimeoutError:
            self.log.warn("a core that ends did not give its counters in time: what it counted last may be lost")

    async def _rest(self, generation: Generation) -> None:
        deadline = self._reactor.seconds() + REST
        while generation.alive and await self._read(generation) and self._reactor.seconds() < deadline:
            await deferLater(self._reactor, REST_POLL)
