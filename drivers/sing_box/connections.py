"""List the users' open connections of one sing-box process, and cut some of them; used by limits."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from twisted.internet.defer import Deferred

from drivers.process.channel import asking
from drivers.process.child import CoreProcess
from drivers.sing_box.api import Api
from drivers.sing_box.config import Plan
from drivers.sing_box.table import Line, Pair, Table
from drivers.sockets.connections import Descriptors
from drivers.sockets.core_connections import CoreConnections, handle_of, ignore_arrivals, inode_of, live_of, rest_of
from drivers.sockets.sock_diag import Endpoint, Flow, at, flows
from node.base.reactor import PooledReactor
from node.contract.abuse import Request
from node.contract.accounts import Accounts
from node.contract.connections import Address, Arrived, Handle, Live

CONNECTIONS = "the core did not list its connections"
# For more connections than this the kernel is asked in the reactor's thread pool.
INLINE = 50
# Seconds within which the core closes a connection of a removed user; sockets that are still open then are sessions.
CLOSING = 0.01
_NOT_CUT = "sessions of users cannot be cut, only the connections in them; clients may keep the sessions open: {}"
_UNSEEN = "it leads to an inbound whose users the node does not manage: there the core reports no users of connections"


class Connections(CoreConnections):
    """The open connections of one core, whose users are `accounts`. Nothing is followed before the first request."""

    def __init__(
        self, reactor: PooledReactor, api: Api, plan: Plan, process: CoreProcess, accounts: Mapping[str, Accounts]
    ) -> None:
        self._ports_by_tag = plan.tcp_ports
        super().__init__(reactor, [some for ports in self._ports_by_tag.values() for some in ports])
        self.descriptors: Descriptors = Descriptors(process.pid or 0)
        self._api = api
        self._accounts = accounts
        multiplexed = plan.multiplexed & plan.inbounds.keys()
        self._table = Table(plan.tags, multiplexed)
        self.unseen: Mapping[str, str] = dict.fromkeys(sorted(plan.unseen), _UNSEEN)
        self._table_kept = False
        # Addresses and inbounds of sessions of removed users who connected all the same: these are cut in one batch.
        self._unwanted: dict[Endpoint, str] = {}
        if multiplexed:
            # The core lists streams, not sessions: of one that is idle only earlier events show whose it is.
            self._keep_table()

    def announce_to(self, arrived: Arrived) -> None:
        super().announce_to(arrived)
        if arrived is not ignore_arrivals:
            self._keep_table()

    def may_carry(self, key: str) -> bool:
        self._keep_table()
        return (
            self._table.has(key)
            or not self._api.table_is_complete
            or any(key in self._accounts[tag] for tag in self.unseen)
        )

    def requests(self, exempt: Collection[str]) -> Sequence[Request]:
        """As `SeesRequests`."""
        self._keep_table()
        return self._table.requests(exempt, self._reactor.seconds())

    async def look(self, keys: Collection[str]) -> list[Live]:
        await self._complete()
        lines = self._table.of(keys)
        sockets = await self._by_line(lines)
        now = self._reactor.seconds()
        return [_live(line, sockets.get(line.handle), now) for line in lines if line.ids]

    async def forwarded(self, keys: Collection[str]) -> Mapping[str, Collection[Address]]:
        """The addresses that no client's socket has: by X-Forwarded-For, which the core believes. Raises as `look`."""
        await self._complete()
        lines = [line for line in self._table.of(keys) if line.ids and self._ports_by_tag[line.tag]]
        try:
            theirs = {flow.peer for flow in await super()._flows({line.source for line in lines})}
        except OSError:
            return {}
        found: dict[str, set[Address]] = {}
        for line in lines:
            if line.source not in theirs and line.ids:
                found.setdefault(line.key, set()).add(line.address)
        return found

    async def _complete(self) -> None:
        """Have the table list all connections. Raises `CoreFailed`."""
        self._keep_table()
        if not self._api.table_is_complete:
            with asking(CONNECTIONS):
                await self._api.connections()

    async def _by_line(self, lines: Iterable[Line]) -> Mapping[Handle, Flow]:
        """Return the kernel's data of the lines that have a client socket of their own, by line handle."""
        sockets = {line.source: line for line in lines if self._is_socket(line)}
        found = {}
        for flow in await self._flows(sockets.keys()):
            line = sockets[flow.peer]
            if at(flow.port, self._ports_by_tag[line.tag]):
                found[line.handle] = flow
        return found

    async def _flows(self, peers: Collection[Endpoint]) -> Sequence[Flow]:
        try:
            return flows(self._ports, peers) if len(peers) <= INLINE else await super()._flows(peers)
        except OSError as error:
            text = "the kernel does not list connections: only the core reports their bytes and idle times: {}"
            self._complain(text, error)
            return []

    def _peer(self, rest: bytes) -> Endpoint | None:
        """Of a connection whose client still has its own socket, which may be idle at the moment."""
        line, source = self._table.get(rest), self._table.place_of(rest)[1]
        own = self._table.is_free(source) if line is None else self._is_socket(line)
        return source if own else None

    async def reset(self, handles: Iterable[Handle]) -> int:
        found = {handle: line for handle in handles if (line := self._table.get(rest_of(handle))) and line.ids}
        # Copied first: the table forgets connections while they end.
        wanted = {inode_of(handle): line.source for handle, line in found.items() if self._is_socket(line)}
        ids = [frozenset(line.ids) for line in found.values()]
        ended = await self._api.end(id for some in ids for id in some)
        # By inode: another socket may have the same address by now.
        wanted.pop(0, None)
        await self._cut({flow.inode for flow in await self._flows(set(wanted.values()))} & wanted.keys())
        return sum(not ended.isdisjoint(some) for some in ids)

    def _is_socket(self, line: Line) -> bool:
        """Whether the line is a client's own TCP socket, which can be cut.

        Closing only the connections in it would leave the socket open for the next one.
        """
        return bool(self._ports_by_tag[line.tag]) and self._table.is_alone(line)

    async def sessions(self, pairs: Collection[Pair]) -> dict[Endpoint, str]:
        """Map the source addresses of these users' sockets to the inbound. Raises `ApiFailed`."""
        self._keep_table()
        if not self._api.table_is_complete:
            await self._api.connections()
        return self._table.places(pairs)

    async def end_sessions(self, places: Mapping[Endpoint, str]) -> None:
        """Cut the sockets from these addresses: closing connections in a session leaves the session open for more."""
        found = await self._flows(places.keys())
        await self._cut({flow.inode for flow in found if at(flow.port, self._ports_by_tag[places[flow.peer]])})

    async def _cut(self, inodes: Collection[int]) -> None:
        if inodes:
            await self._on_sockets(_NOT_CUT, self.descriptors.reset, inodes)

    def _keep_table(self) -> None:
        if not self._table_kept:
            self._table_kept = True
            self._api.keep_table(self._table, self._on_new)

    def _on_new(self, lines: Iterable[Line]) -> None:
        for line in lines:
            # A user who is just being added may connect before the core confirms it: so only barred users are cut.
            if self._api.bars(line.pair):
                self._end_soon(line)
            else:
                self._announce(line.key, line.address)

    def _end_soon(self, line: Line) -> None:
        """Cut the socket of a removed user, if it is theirs alone, once the core has closed the connection in it."""
        if self._is_socket(line):
            if not self._unwanted:
                self._reactor.callLater(CLOSING, self._end_unwanted)
            self._unwanted[line.source] = line.tag

    def _end_unwanted(self) -> None:
        places, self._unwanted = self._unwanted, {}
        ended = Deferred.fromCoroutine(self.end_sessions(places))
        ended.addErrback(
            lambda failure: self.log.failure("idle sessions of removed users could not be cut: they stay open", failure)
        )


def _live(line: Line, flow: Flow | None, now: float) -> Live:
    """Build the connection from the kernel's data of the client's socket, or else from the core's byte counts."""
    if flow is not None:
        return live_of(line.key, line.address, flow, line.handle, line.tag)
    silent, handle = max(0.0, now - line.moved), handle_of(0, line.handle)
    return Live(line.key, line.address, handle, silent=silent, sent=line.down, received=line.up, tag=line.tag)
