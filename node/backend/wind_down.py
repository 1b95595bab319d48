"""The end of a core that shall end: it serves nobody any more, all that it served is counted, and then it goes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from twisted.internet.defer import CancelledError
from twisted.internet.task import deferLater

from node.contract.driver import Generation
from node.logs import Logger

# Seconds that a core which shall end may take to show that its counters can be read, …
FAREWELL = 2.0
# … and its counters to come to rest when nobody is connected any more, and between two looks at them.
REST = 2.0
REST_POLL = 0.02


class Farewell:
    """Cores that are ending. They still count: `read_counters` books that, and says whether it was anything."""

    log = Logger()

    def __init__(self, reactor: Any, read_counters: Callable[[], Awaitable[bool]]) -> None:
        self._reactor = reactor
        self._read_counters = read_counters
        self.ending: list[Generation] = []

    async def end(self, generation: Generation) -> None:
        """End it, or go on with that where it was cut short."""
        if generation not in self.ending:
            self.ending.append(generation)
        try:
            if generation.alive and await generation.answers(FAREWELL):
                await generation.wind_down()
                await self._rest()
        except CancelledError:
            raise
        except Exception:  # noqa: BLE001 - logged; whatever went wrong, it must not stay
            self.log.failure("a core could not be wound down: what it counted last may be lost")
        await generation.stop()
        if generation in self.ending:
            self.ending.remove(generation)

    async def _rest(self) -> None:
        deadline = self._reactor.seconds() + REST
        while await self._read_counters() and self._reactor.seconds() < deadline:
            await deferLater(self._reactor, REST_POLL)
