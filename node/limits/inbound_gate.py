"""NODE_QUOTA_ACTION=close: closes the inbounds to new connections while the quota is used up; open ones go on."""

from __future__ import annotations

from twisted.internet.defer import DeferredLock, ensureDeferred

from node.base.errors import CoreFailed
from node.base.logs import Logger
from node.contract.driver import Closes, Generation
from node.contract.generations import Generations

# How often the connections of a core that started while the inbounds were closed are ended: its listeners were open
# for a moment, and it may accept a connection from their backlog after the first time.
EMPTIED = 2


class InboundGate:
    """Closes or opens the inbounds of all cores that serve, new ones included. Call `keep` periodically."""

    log = Logger()

    def __init__(self, generations: Generations) -> None:
        self._generations = generations
        self.closed = False
        # Cores whose inbounds are closed, and how often their connections are still to be ended.
        self._shut: dict[Generation, int] = {}
        self._faults: dict[Generation, str] = {}
        self._lock = DeferredLock()
        generations.watch(self._hurry)

    @property
    def warnings(self) -> list[str]:
        """Warnings for `info`: where users still get in."""
        if not self.closed:
            return []
        open_ports = {port for run in self._shut if isinstance(run, Closes) for port in run.open_ports}
        ports = ", ".join(map(str, sorted(open_ports)))
        udp = f"NODE_QUOTA is used up, but users still get in by UDP, port {ports}: datagrams do not show who is new"
        failed = [f"NODE_QUOTA is used up, but new connections get in: {fault}" for fault in set(self._faults.values())]
        return [udp, *failed] if ports else failed

    def set(self, closed: bool) -> None:
        """Close the inbounds to new connections, or open them."""
        if closed != self.closed:
            self.closed = closed
            self._shut |= dict.fromkeys(self._generations.serving, 0) if closed else {}
            self._hurry()

    async def keep(self) -> None:
        """Close or open the inbounds of each core that is not in the wanted state yet."""
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
                raise CoreFailed("this core cannot close its inbounds")
            if self.closed:
                await self._close(run)
            else:
                await run.open_door()
                self._shut.pop(run, None)
            self._faults.pop(run, None)
        except CoreFailed as error:
            if self._faults.get(run) != error.text and run.alive:
                done = "closed" if self.closed else "opened again"
                self.log.warn("NODE_QUOTA: inbounds could not be {done}: {fault}; retrying", done=done, fault=error)
            self._faults[run] = error.text

    async def _close(self, run: Closes) -> None:
        times = self._shut.setdefault(run, EMPTIED)
        await run.close_door(empty=times > 0)
        self._shut[run] = max(0, times - 1)

    def _hurry(self) -> None:
        if self.closed or self._shut:
            ensureDeferred(self.keep()).addErrback(
                lambda failure: self.log.failure("NODE_QUOTA: closing or opening inbounds failed; retrying", failure)
            )
