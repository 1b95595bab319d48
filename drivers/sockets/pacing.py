"""Limit the speed of a child process's TCP sockets: the part of `Paces` that is the same for all cores. Linux only.

It takes no capability and no queue discipline: TCP paces itself.
"""

from __future__ import annotations

import errno
import socket
import struct
from collections.abc import Callable, Collection, Mapping
from typing import TypeVar

from twisted.internet.defer import DeferredLock

from drivers.sockets.connections import Descriptors
from drivers.sockets.core_connections import CoreConnections
from drivers.sockets.pidfd import Unreachable
from drivers.sockets.sock_diag import Ports, at, listeners
from node.base.logs import Logger
from node.base.pool import in_pool
from node.base.reactor import PooledReactor
from node.contract.connections import Handle

# From include/uapi/asm-generic/socket.h and linux/tcp.h.
_SO_MAX_PACING_RATE, _SO_BUF_LOCK, _TCP_NOTSENT_LOWAT = 47, 72, 25
_RATE = struct.Struct("@L")
_ANY_RATE = 2 ** (8 * _RATE.size) - 1
# Bytes that a process may write ahead of the sent ones: else those written before the limit take seconds to leave.
AHEAD = 131_072
# The receive buffer of a socket without a limit: the kernel tunes the window up to it.
WIDE = 8 * 2**20
# Errors of sockets that have ended.
_ENDED = (errno.ENOTCONN, errno.EINVAL)

# Sets a limit of a socket; None removes it.
Setting = Callable[[socket.socket, int | None], None]
T = TypeVar("T")

UDP = "its users connect over UDP, where one socket of the core serves them all"


def pace(one: socket.socket, rate: int | None) -> None:
    """Limit sending to so many bytes a second. Connections that a listener accepts later inherit it."""
    one.setsockopt(socket.IPPROTO_TCP, _TCP_NOTSENT_LOWAT, AHEAD if rate else 0)
    one.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, _RATE.pack(min(rate or _ANY_RATE, _ANY_RATE)))


def narrow(one: socket.socket, window: int | None) -> None:
    """Limit the receive buffer to so many bytes, and so the window of the client."""
    one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, window or WIDE)
    if window is None:
        try:
            one.setsockopt(socket.SOL_SOCKET, _SO_BUF_LOCK, 0)
        except OSError as error:
            if error.errno != errno.ENOPROTOOPT:  # Linux before 5.14: it stays as wide as that
                raise


def set_all(descriptors: Descriptors, wanted: Mapping[int, int | None], setting: Setting) -> set[int]:
    """Apply a setting to sockets of a process, by inode. Returns those set; the others do not exist any more.

    Raises `Unreachable`, and `OSError` if the kernel refuses the setting.
    """
    done = set()
    for inode, duplicate in descriptors.taken(wanted):
        if _set(duplicate, wanted[inode], setting):
            done.add(inode)
    return done


def _set(descriptor: int, value: int | None, setting: Setting) -> bool:
    """Apply a setting. Returns False if the socket has ended."""
    one = socket.socket(fileno=descriptor)
    try:
        setting(one, value)
    except OSError as error:
        if error.errno not in _ENDED:
            raise
        return False
    finally:
        one.detach()
    return True


class Paced:
    """The sockets of one core process.

    `ports`: the TCP ports of each managed inbound's users, none where they use only UDP. `shared`: the inbounds where a
    connection may belong to several users, or to none of the inbound.
    """

    log = Logger()

    def __init__(
        self,
        reactor: PooledReactor,
        connections: CoreConnections,
        ports: Mapping[str, Ports],
        shared: Collection[str],
    ) -> None:
        self._reactor = reactor
        self._connections = connections
        self._by_tag = {tag: some for tag, some in ports.items() if some}
        self._ports = [some for ports in self._by_tag.values() for some in ports]
        self._apart = {tag: UDP for tag in ports if tag not in self._by_tag}
        self._shared = frozenset(shared)
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
        descriptors = self._connections.descriptors
        if descriptors is None:
            return set()
        try:
            handles = await self._connections.inodes(wanted)
        except OSError as error:
            self._complain(str(error))
            return set()
        values = {inode: wanted[handle] for inode, handle in handles.items()}
        done = await self._do(lambda: set_all(descriptors, values, setting))
        return {handles[inode] for inode in done or ()}

    def _tell(self) -> bool:
        """Set the rates of future connections on the listeners, whose sockets inherit them."""
        descriptors = self._connections.descriptors
        if descriptors is None:
            return True
        rates = {inode: self._rate(port) for port, inodes in listeners(self._ports).items() for inode in inodes}
        set_all(descriptors, {inode: rate for inode, rate in rates.items() if rate != self._told.get(inode)}, pace)
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
