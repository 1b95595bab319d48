"""Keeps the core's inbounds closed to new connections while the node has used up what it may; those there are go on."""

from __future__ import annotations

from twisted.internet.defer import DeferredLock, ensureDeferred

from node.backend.generations import Generations
from node.contract.driver import Closes, Generation
from node.errors import CoreFailed
from node.logs import Logger

# How often the connections of a run are ended that came up while the door was closed: its listeners were open for a
# moment, and it may have accepted somebody from their queues after the first time.
EMPTIED = 2


class Door:
    """Closes each run that serves, new ones when they come. `keep` is to be called again and again."""

    log = Logger()

    def __init__(self, generations: Generations) -> None:
        self._generations = generations
        self.closed = False
        # Runs that are closed, and how often their connections are still to be ended.
        self._shut: dict[Generation, int] = {}
        self._faults: dict[Generation, str] = {}
        self._lock = DeferredLock()
        generations.watch(self._hurry)

    @property
    def warnings(self) -> list[str]:
        """Where users get in all the same."""
        if not self.closed:
            return []
        open_ports = {port for run in self._shut if isinstance(run, Closes) for port in run.open_ports}
        ports = ", ".join(map(str, sorted(open_ports)))
        by_udp = [f"users still get in by UDP, at port {ports}: it does not tell who is new"] if ports else []
        return by_udp + [f"new connections are still taken: {fault}" for fault in set(self._faults.values())]

    def set(self, closed: bool) -> None:
        """Close it, to those who are not in yet, or open it."""
        if closed != self.closed:
            self.closed = closed
            self._shut |= dict.fromkeys(self._generations.serving, 0) if closed else {}
            self._hurry()

    async def keep(self) -> None:
        """Have every run as it is to be."""
        async with self._lock:
            serving = self._generations.serving
            for known in (self._shut, self._faults):
                for gone in known.keys() - {*serving}:
                    del known[gone]
            for run in serving:
                if self.closed or run in self._shut:
                    await self._set(run)

    async def _set(self, run: Generation) -> None:
        try:
            if not isinstance(run, Closes):
                raise CoreFailed("this core cannot be closed to them")
            if self.closed:
                await self._close(run)
            else:
                await run.open_door()
                self._shut.pop(run, None)
            self._faults.pop(run, None)
        except CoreFailed as error:
            if self._faults.get(run) != error.text and run.alive:
                self.log.warn("the inbounds are not open or closed as they are to be: {fault}", fault=error)
            self._faults[run] = error.text

    async def _close(self, run: Closes) -> None:
        times = self._shut.setdefault(run, EMPTIED)
        await run.close_door(empty=times > 0)
        self._shut[run] = max(0, times - 1)

    def _hurry(self) -> None:
        if self.closed or self._shut:
            ensureDeferred(self.keep()).addErrback(
                lambda failure: self.log.failure("the inbounds were not closed, or opened", failure)
            )
