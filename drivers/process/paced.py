"""Pace clients' sockets: the part of `node.contract.connections.Paces` that is the same for all cores."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import TypeVar

from twisted.internet.defer import DeferredLock

from drivers.sockets.connections import Ports, at
from drivers.sockets.descriptors import Descriptors
from drivers.sockets.pacing import Setting, narrow, pace, set_all
from drivers.sockets.pidfd import Unreachable
from drivers.sockets.sock_diag import listeners
from node.base.logs import Logger
from node.base.pool import in_pool
from node.base.reactor import PooledReactor
from node.contract.connections import Handle

T = TypeVar("T")

UDP = "its users connect over UDP, where one socket of the core serves them all"


class Paced:
    """The sockets of one core process.

    `ports`: the TCP ports of each managed inbound's users, none where they use only UDP. `shared`: the inbounds where a
    connection may belong to several users, or to none of the inbound. `inodes` finds the sockets of connections.
    """

    log = Logger()

    def __init__(
        self,
        reactor: PooledReactor,
        descriptors: Descriptors | None,
        ports: Mapping[str, Ports],
        shared: Collection[str],
        inodes: Callable[[Collection[Handle]], Awaitable[Mapping[int, Handle]]],
    ) -> None:
        self._reactor = reactor
        self._descriptors = descriptors
        self._by_tag = {tag: some for tag, some in ports.items() if some}
        self._ports = [some for ports in self._by_tag.values() for some in ports]
        self._apart = {tag: UDP for tag in ports if tag not in self._by_tag}
        self._shared = frozenset(shared)
        self._inodes = inodes
        self._lock = DeferredLock()
        # The rates of future connections by inbound, and the rates that listeners have, by inode.
        self._new: dict[str, int] = {}
        self._told: dict[int, int | None] = {}
        self._fault = ""

    @property
    def unpaced(self) -> Mapping[str, str]:
        """See `node.contract.connections.Paces`."""
        return {**self._apart, **dict.fromkeys(self._by_tag, self._fault)} if self._fault else self._apart

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
            if rate is None or tag not in self._by_tag or tag in self._shared:
                self._new.pop(tag, None)
            else:
                self._new[tag] = rate
        return not (before or self._new) or bool(await self._do(self._tell))

    async def listeners_changed(self) -> None:
        """Apply the rates again: the core may have replaced listeners."""
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
        """Set the rates of future connections on the listeners, whose sockets inherit them."""
        if self._descriptors is None:
            return True
        rates = {inode: self._rate(port) for port, inodes in listeners(self._ports).items() for inode in inodes}
        set_all(
            self._descriptors, {inode: rate for inode, rate in rates.items() if rate != self._told.get(inode)}, pace
        )
        # With the listeners of other cores: those are looked for only once.
        self._told = rates
        return True

    def _rate(self, port: int) -> int | None:
        """Return the highest rate of all inbounds whose users come by this port; None if one has none.

        An inbound that detours to others has the users of several.
        """
        rates = [self._new.get(tag) for tag, ports in self._by_tag.items() if at(port, ports)]
        return None if None in rates else max(filter(None, rates), default=None)

    async def _do(self, work: Callable[[], T]) -> T | None:
        """Do `work` in the thread pool, one at a time; None if the core's sockets cannot be reached."""
        async with self._lock:
            try:
                done = await in_pool(self._reactor, work)
            except (Unreachable, OSError) as error:
                self._complain(str(error))
                return None
            self._fault = ""
            return done

    def _complain(self, fault: str) -> None:
        if not self._fault:
            self.log.warn("the speed limits of users are not applied: {fault}", fault=fault)
        self._fault = fault


class PacedRun:
    """The calls of `node.contract.connections.Paces` for a generation."""

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
