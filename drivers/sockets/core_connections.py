"""The connections of one core's users: their handles, and the part of listing and closing them that cores share.

A handle begins with the inode of the client's socket: a later socket of the same port, which clients can choose, is
another connection.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import ParamSpec, TypeVar

from twisted.internet.interfaces import IReactorTime

from drivers.sockets import sock_diag
from drivers.sockets.connections import Descriptors
from drivers.sockets.pidfd import Unreachable
from drivers.sockets.sock_diag import Endpoint, Flow, Ports
from node.base.logs import Logger
from node.base.pool import in_pool
from node.base.reactor import PooledReactor
from node.contract.connections import Address, Arrived, Handle, Live

P = ParamSpec("P")
R = TypeVar("R")

_INODE = 8
# Seconds after the kernel has counted a connection until a look surely finds it: a virtual processor may stand still in
# between.
LISTED = 0.05
# Seconds for which a look may stand for later ones: it does not show which connections have ended since.
STALE = 1.0


def ignore_arrivals(_: str, __: Address) -> None:
    """The default of `arrived`: no limit needs it."""


def live_of(key: str, address: Address, flow: Flow, rest: bytes, tag: str) -> Live:
    """A user's connection; `rest` is the part of its handle after the inode."""
    moved = flow.silent, flow.sent, flow.received, flow.waiting, flow.round_trip
    return Live(key, address, handle_of(flow.inode, rest), *moved, tag)


def handle_of(inode: int, rest: bytes) -> Handle:
    """`inode` is 0 for a connection without a socket of its own, or without one that is known."""
    return inode.to_bytes(_INODE) + rest


def inode_of(handle: Handle) -> int:
    return int.from_bytes(handle[:_INODE])


def rest_of(handle: Handle) -> bytes:
    return handle[_INODE:]


class Arrivals:
    """Tells whether connections may have come since a look at all connections."""

    def __init__(self, clock: IReactorTime) -> None:
        self._clock = clock
        self._count = -1
        # When the count was first seen (seconds).
        self._since = 0.0

    def may_miss(self, look: float) -> bool:
        """Whether a look that began then (seconds) may lack a connection that exists now."""
        try:
            count = sock_diag.arrivals()
        except (OSError, ValueError):
            return True
        now = self._clock.seconds()
        if count != self._count:
            self._count, self._since = count, now
        return look < max(self._since + LISTED, now - STALE)


class CoreConnections:
    """The connections to the `ports` of one core. `arrived` is called for each new one of a user."""

    log = Logger()

    def __init__(self, reactor: PooledReactor, ports: Ports) -> None:
        self._reactor = reactor
        self._ports = ports
        # None until the process is known.
        self.descriptors: Descriptors | None = None
        self.arrived: Arrived = ignore_arrivals
        self._complaints = set[str]()

    def announce_to(self, arrived: Arrived) -> None:
        """Call `arrived` for each new connection from now on."""
        self.arrived = arrived

    async def look(self, keys: Collection[str]) -> list[Live]:
        """List the connections known to be of these users. Raises `OSError` and `CoreFailed`."""
        raise NotImplementedError

    async def reset(self, handles: Iterable[Handle]) -> int:
        """Close these connections, given by their handles from `look`. Returns how many there were."""
        raise NotImplementedError

    async def inodes(self, handles: Iterable[Handle]) -> Mapping[int, Handle]:
        """Map the inodes of clients' sockets to these handles, of those that still have one. Raises `OSError`."""
        wanted = {inode: handle for handle in handles if (inode := inode_of(handle))}
        peers = {peer for handle in wanted.values() if (peer := self._peer(rest_of(handle))) is not None}
        return {flow.inode: wanted[flow.inode] for flow in await self._flows(peers) if flow.inode in wanted}

    def _peer(self, rest: bytes) -> Endpoint | None:
        """The client's address and port, by the part of a handle after the inode; None if it has no socket."""
        raise NotImplementedError

    async def _flows(self, peers: Collection[Endpoint]) -> Sequence[Flow]:
        """The kernel's data of the connections from these addresses. Raises `OSError`."""
        return await in_pool(self._reactor, sock_diag.flows, self._ports, frozenset(peers))

    def _announce(self, key: str, address: Address) -> None:
        try:
            self.arrived(key, address)
        except Exception:  # noqa: BLE001 - logged; what the core reports next must still be read
            self.log.failure("handling a new connection failed: the limits of its user may not apply to it")

    async def _on_sockets(self, fault: str, work: Callable[P, R], *arguments: P.args, **words: P.kwargs) -> R | None:
        """Run work on the core's sockets in the pool; None, with the complaint `fault`, if it cannot reach them."""
        try:
            return await in_pool(self._reactor, work, *arguments, **words)
        except Unreachable as error:
            self._complain(fault, error)
            return None

    def _complain(self, text: str, error: Exception) -> None:
        """Log each complaint once: it would be the same each time."""
        if text not in self._complaints:
            self._complaints.add(text)
            self.log.error("{text}", text=text.format(error))
