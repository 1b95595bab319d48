"""The part of `node.contract.connections.Paces` that is the same for all cores: their clients' sockets are."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import TypeVar

from twisted.internet.defer import DeferredLock
from twisted.internet.threads import deferToThreadPool

from drivers.sockets.connections import Ports, at
from drivers.sockets.descriptors import Descriptors
from drivers.sockets.pacing import Setting, narrow, pace, set_all
from drivers.sockets.rights import Unreachable
from drivers.sockets.sock_diag import listeners
from node.contract.connections import Handle
from node.logs import Logger
from node.reactor import PooledReactor

T = TypeVar("T")

UDP = "its users come by UDP, and one socket of the core's serves them all"


class Paced:
    """The sockets of one run of a core.

    `doors`: the ports by which users of each managed inbound come in, those without any by UDP alone; `shared`: those
    of them where a connection may be of several users, or of others than the inbound's. `inodes` finds the sockets of
    connections.
    """

    log = Logger()

    def __init__(
        self,
        reactor: PooledReactor,
        descriptors: Descriptors | None,
        doors: Mapping[str, Ports],
        shared: Collection[str],
        inodes: Callable[[Collection[Handle]], Awaitable[Mapping[int, Handle]]],
    ) -> None:
        self._reactor = reactor
        self._descriptors = descriptors
        self._doors = {tag: ports for tag, ports in doors.items() if ports}
        self._ports = [some for ports in self._doors.values() for some in ports]
        self._apart = {tag: UDP for tag in doors if tag not in self._doors}
        self._shared = frozenset(shared)
        self._inodes = inodes
        self._lock = DeferredLock()
        # What connections to come are held to, by inbound, and the listeners that were told, by inode.
        self._new: dict[str, int] = {}
        self._told: dict[int, int | None] = {}
        self._fault = ""

    @property
    def unpaced(self) -> Mapping[str, str]:
        """See `node.contract.connections.Paces`."""
        return {**self._apart, **dict.fromkeys(self._doors, self._fault)} if self._fault else self._apart

    async def pace(self, rates: Mapping[Handle, int | None]) -> set[Handle]:
        """See `node.contract.connections.Paces`."""
        return await self._set(rates, pace)

    async def narrow(self, windows: Mapping[Handle, int | None]) -> set[Handle]:
        """See `node.contract.connections.Paces`."""
        return await self._set(windows, narrow)

    async def pace_new(self, rates: Mapping[str, int | None]) -> bool:
        """See `node.contract.connections.Paces`."""
        before = bool(self._new) or any(self._told.values())
        for tag, rate in rates.items():
            if rate is None or tag not in self._doors or tag in self._shared:
                self._new.pop(tag, None)
            else:
                self._new[tag] = rate
        return not (before or self._new) or bool(await self._do(self._tell))

    async def listeners_changed(self) -> None:
        """The core may have closed and opened some."""
        if self._new:
            await self._do(self._tell)

    async def _set(self, wanted: Mapping[Handle, int | None], setting: Setting) -> set[Handle]:
        descriptors = self._descriptors
        if descriptors is None:
            return set()
        try:
            handles = await self._inodes(wanted.keys())
        except OSError as error:
            self._complain(str(error))
            return set()
        values = {inode: wanted[handle] for inode, handle in handles.items()}
        done = await self._do(lambda: set_all(descriptors, values, setting))
        return {handles[inode] for inode in done or ()}

    def _tell(self) -> bool:
        """Have listeners carry what connections to come are held to."""
        if self._descriptors is None:
            return True
        rates = {inode: self._rate(port) for port, inodes in listeners(self._ports).items() for inode in inodes}
        set_all(
            self._descriptors, {inode: rate for inode, rate in rates.items() if rate != self._told.get(inode)}, pace
        )
        # Those of other runs, too: they are looked for once.
        self._told = rates
        return True

    def _rate(self, port: int) -> int | None:
        """Several inbounds' users may come by one port: of one that leads to others, too."""
        rates = [self._new.get(tag) for tag, ports in self._doors.items() if at(port, ports)]
        return None if None in rates else max(filter(None, rates), default=None)

    async def _do(self, work: Callable[[], T]) -> T | None:
        """One thing at a time; None if the core's sockets cannot be had."""
        async with self._lock:
            try:
                done = await deferToThreadPool(self._reactor, self._reactor.getThreadPool(), work)
            except (Unreachable, OSError) as error:
                self._complain(str(error))
                return None
            self._fault = ""
            return done

    def _complain(self, fault: str) -> None:
        if not self._fault:
            self.log.warn("users are not held to their speeds: {fault}", fault=fault)
        self._fault = fault


class PacedRun:
    """Satisfies that part of `node.contract.connections.Paces` for a run of a core."""

    _paced: Paced

    @property
    def unpaced(self) -> Mapping[str, str]:
        return self._paced.unpaced

    async def pace(self, rates: Mapping[Handle, int | None]) -> set[Handle]:
        return await self._paced.pace(rates)

    async def pace_new(self, rates: Mapping[str, int | None]) -> bool:
        return await self._paced.pace_new(rates)

    async def narrow(self, windows: Mapping[Handle, int | None]) -> set[Handle]:
        return await self._paced.narrow(windows)
