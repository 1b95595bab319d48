"""The live connections of the users of one run of sing-box, for limits: whose they are, and ending some of them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from twisted.internet.threads import deferToThreadPool

from drivers.channel import asking
from drivers.process.child import CoreProcess
from drivers.sing_box.api import Api
from drivers.sing_box.config import Plan
from drivers.sing_box.table import Line, Table
from drivers.sockets import ending
from drivers.sockets.connections import Endpoint, at
from drivers.sockets.descriptors import Descriptors
from drivers.sockets.rights import Unreachable
from drivers.sockets.sock_diag import Flow, flows
from node.contract.accounts import Accounts
from node.contract.connections import Arrived, Handle, Live
from node.logs import Logger
from node.reactor import PooledReactor

CONNECTIONS = "the core did not list its connections"
# Connections above which the kernel is asked of them in the reactor's pool.
INLINE = 50
# Bytes of an inode in a handle, in front of the line's.
_INODE = 8
_UNSEEN = "it leads to an inbound whose users are not the node's, and there the core does not say whose connections are"


def nobody(key: str, address: bytes) -> None:
    """Nobody wants to know."""


class Connections:
    """`accounts` are those who are in. Nothing is followed until somebody asks for something."""

    log = Logger()

    def __init__(
        self, reactor: PooledReactor, api: Api, plan: Plan, process: CoreProcess, accounts: Mapping[str, Accounts]
    ) -> None:
        self._reactor = reactor
        self._api = api
        self._process = process
        self.descriptors = Descriptors(process.pid or 0)
        self._accounts = accounts
        self._table = Table(plan.tags)
        self._ports = plan.doors
        self._all_ports = [some for ports in self._ports.values() for some in ports]
        self.unseen: Mapping[str, str] = dict.fromkeys(sorted(plan.unseen), _UNSEEN)
        self._arrived: Arrived = nobody
        self._heeded = False
        self._complaints = set[str]()

    @property
    def arrived(self) -> Arrived:
        return self._arrived

    @arrived.setter
    def arrived(self, arrived: Arrived) -> None:
        self._arrived = arrived
        if arrived is not nobody:
            self._heed()

    def may_carry(self, key: str) -> bool:
        self._heed()
        return self._table.has(key) or not self._api.heeds or any(key in self._accounts[tag] for tag in self.unseen)

    async def look(self, keys: Collection[str]) -> list[Live]:
        self._heed()
        if not self._api.heeds:
            with asking(CONNECTIONS):
                await self._api.connections()
        lines = self._table.of(keys)
        sockets = await self._flows(lines)
        now = self._reactor.seconds()
        return [_live(line, sockets.get(line.handle), now) for line in lines if line.ids]

    async def _flows(self, lines: Iterable[Line]) -> Mapping[Handle, Flow]:
        """What the kernel knows of those that are a client's own socket."""
        sockets = {line.source: line for line in lines if self._is_socket(line)}
        found = {}
        for flow in await self._ask(sockets.keys()):
            line = sockets[flow.peer]
            if at(flow.port, self._ports[line.tag]):
                found[line.handle] = flow
        return found

    async def _ask(self, peers: Collection[Endpoint]) -> Sequence[Flow]:
        asked = self._all_ports, frozenset(peers)
        try:
            if len(peers) <= INLINE:
                return flows(*asked)
            return await deferToThreadPool(self._reactor, self._reactor.getThreadPool(), flows, *asked)
        except OSError as error:
            self._complain(
                "how connections fare is known as the core tells it: the kernel does not list them: {}", error
            )
            return []

    async def inodes(self, handles: Iterable[Handle]) -> Mapping[int, Handle]:
        """By which sockets these come, those that are a client's own still; one may carry nothing at the moment."""
        wanted = {inode: handle for handle in handles if (inode := _inode_of(handle))}
        places = {self._table.place_of(_line_of(handle))[1] for handle in wanted.values() if self._is_own(handle)}
        return {flow.inode: wanted[flow.inode] for flow in await self._ask(places) if flow.inode in wanted}

    def _is_own(self, handle: Handle) -> bool:
        line = self._table.get(_line_of(handle))
        if line is not None:
            return self._is_socket(line)
        return self._table.is_free(self._table.place_of(_line_of(handle))[1])

    async def end(self, connections: Iterable[Live]) -> int:
        found = {each.handle: line for each in connections if (line := self._table.get(_line_of(each.handle)))}
        found = {handle: line for handle, line in found.items() if line.ids}
        # As it is now: the table forgets them while they end.
        wanted = {_inode_of(handle): line.source for handle, line in found.items() if self._is_socket(line)}
        ids = [frozenset(line.ids) for line in found.values()]
        ended = await self._api.end(id for some in ids for id in some)
        await self._cut({inode: source for inode, source in wanted.items() if inode})
        return sum(not ended.isdisjoint(some) for some in ids)

    def _is_socket(self, line: Line) -> bool:
        """Whether the client's own socket can end: else one that it keeps open would bring the next connection."""
        return bool(self._ports[line.tag]) and self._table.is_alone(line)

    async def _cut(self, wanted: Mapping[int, Endpoint]) -> None:
        """End these sockets, that is those of them that are there: another one may have the place by now."""
        there = {flow.inode for flow in await self._ask(set(wanted.values()))} & wanted.keys()
        if not there:
            return
        try:
            await deferToThreadPool(self._reactor, self._reactor.getThreadPool(), ending.reset, self.descriptors, there)
        except Unreachable as error:
            self._complain("clients keep sessions whose connections were ended: {}", error)

    def _complain(self, text: str, error: Exception) -> None:
        """Once: it would be the same each time."""
        if text not in self._complaints:
            self._complaints.add(text)
            self.log.warn("{text}", text=text.format(error))

    def _heed(self) -> None:
        if not self._heeded:
            self._heeded = True
            self._api.heed(self._table, self._hear)

    def _hear(self, lines: Iterable[Line]) -> None:
        for line in lines:
            # Not whom the node knows to be in: who is just being let in may be faster than the core says yes.
            if not self._api.bars((line.tag, line.key)):
                try:
                    self._arrived(line.key, line.address)
                except Exception:  # noqa: BLE001 - logged; the stream that told of it is needed for more
                    self.log.failure("what is done about a new connection failed")


def _live(line: Line, flow: Flow | None, now: float) -> Live:
    """As the kernel knows the client's socket; without one, as the core tells of the bytes.

    The handle has the socket in it: the next one from the same port, which clients may choose, is another connection.
    """
    if flow is None:
        silent, handle = max(0.0, now - line.moved), bytes(_INODE) + line.handle
        return Live(line.key, line.address, handle, silent=silent, sent=line.down, received=line.up)
    moved = flow.silent, flow.sent, flow.received, flow.waiting, flow.round_trip
    return Live(line.key, line.address, flow.inode.to_bytes(_INODE) + line.handle, *moved)


def _inode_of(handle: Handle) -> int:
    """0: it has no socket of its own, or none that is known."""
    return int.from_bytes(handle[:_INODE])


def _line_of(handle: Handle) -> Handle:
    return handle[_INODE:]
