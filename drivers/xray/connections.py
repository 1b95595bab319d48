"""Attribute the live connections of one run of the core to users, and cut those of removed users.

The core has no call for this. Its access lines name the user and source of each connection, and its sockets can be
closed from outside (`drivers.sockets.connections`). Under load the core drops lines; such connections are unknown here.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Coroutine, Iterable, Mapping
from functools import lru_cache
from typing import TypeVar

from twisted.internet.defer import Deferred, ensureDeferred
from twisted.internet.task import deferLater

from drivers.process.channel import ApiFailed
from drivers.sockets import connections as sockets
from drivers.sockets import sock_diag as diag
from drivers.sockets.connections import Descriptors
from drivers.sockets.core_connections import Arrivals, CoreConnections, ignore_arrivals, inode_of, live_of, rest_of
from drivers.sockets.sock_diag import Connection, Endpoint, Ports, at, cookies
from drivers.xray.access import Accepted, Records, inbound_in, parse
from drivers.xray.ingress import Ingress
from drivers.xray.ownership import LATE, Endpoints, OldCredentials, Online, Pair, Unlogged
from drivers.xray.requests import Requests
from node.base.alarm import Alarm
from node.base.governor import Governor
from node.base.pool import in_pool
from node.base.reactor import PooledReactor
from node.contract.accounts import key_of
from node.contract.connections import Address, Handle, Live
from protos.handover_pb2 import XrayRun

T = TypeVar("T", bound=dict[Endpoint, int] | list[Connection])

# The most endpoints kept, over all inbounds; some 40 MB.
CAP = 200_000
# Seconds between two looks at which endpoints are still connected, …
PRUNE = 60.0
# … at least, when half the cap is reached, …
PRUNE_FULL = 10.0
# … and until a new endpoint's socket is looked up, to tell it from a later one with the same port.
LEARN = 1.0
# The share of time that all looks may take.
SHARE = 0.02
# The addresses that the core never lists as online.
LOCAL = frozenset({bytes((127, 0, 0, 1)), bytes(15) + b"\1"})
# Above this many connections a look runs in the reactor's pool.
INLINE = 500
# Seconds for which late lines are batched: one look at 10,000 sockets takes some 0.1 s of a processor.
GATHER = 0.1
# Seconds that a stopping core has to read the last bytes, between two checks of that, and then to count them.
DRY, POLL, NOTICE = 0.5, 0.005, 0.02
NO_SOCKETS: Mapping[Endpoint, int] = {}
_NOT_ENDED = "connections of removed users cannot be cut and stay open until a peer closes them: {}"


class Connections(CoreConnections):
    """Reads the core's lines and cuts connections of removed users."""

    def __init__(self, reactor: PooledReactor, ingress: Mapping[str, Ingress], tags: Collection[str] = ()) -> None:
        """`tags`: of all managed inbounds, if there are more than in `ingress`."""
        super().__init__(reactor, [some for entry in ingress.values() for some in entry.ports])
        self._ingress = ingress
        self._records = Records()
        self._endpoints = {tag: Endpoints(entry.shared) for tag, entry in self._ingress.items()}
        self._pid: int | None = None
        self._unlogged: Unlogged | None = None
        self._is_in: Callable[[Pair], bool] = lambda _: True
        # Removed users, and until when (seconds) they may have connections without an access line.
        self._removed: dict[Pair, float] = {}
        self._old_credentials = OldCredentials()
        self._arrivals = Arrivals(reactor)
        # With the inbound, and the cookie of the socket; 0 for any.
        self._to_cut: dict[Endpoint, tuple[str, int]] = {}
        self._look_alarm = Alarm(reactor, lambda: self._in_background(self._look_around()))
        self._cut_alarm = Alarm(reactor, lambda: self._in_background(self.flush()))
        self._noted = 0
        self._looked = 0.0
        self._looking = False
        self._governor = Governor(reactor, SHARE)
        # How many connections the last look found.
        self._crowd = 0
        # How many connections of removed users were cut.
        self.cut = 0
        self.requests = Requests(tags or ingress)
        # Inbounds with users whom neither the core lists nor the kernel: over UDP, or through a proxy, from `LOCAL`.
        self.hidden: set[str] = set()
        self._tag_of = lru_cache(maxsize=1024)(lambda detour: inbound_in(detour, tags or ingress))
        self._tags_at = lru_cache(maxsize=1024)(self._find_tags)

    def begin(self, pid: int | None, is_in: Callable[[Pair], bool], online: Online) -> None:
        """The core answers: users can be removed from now on. `is_in`: whether the core has a user, or may soon."""
        self._unlogged = Unlogged(self._reactor, online)
        self._pid, self._is_in = pid, is_in
        self.descriptors = None if pid is None else Descriptors(pid)

    def take(self, line: str) -> None:
        """Process any line of the core."""
        accepted = parse(line)
        believed = self._records.is_one(line, accepted)
        if accepted is None:
            return
        if self.requests.wanted and believed:
            self.requests.take(accepted)
        tag = self._tag_of(accepted.detour)
        if tag is None:
            return
        entry = self._ingress.get(tag)
        if entry is None or accepted.datagram or (accepted.udp and entry.datagrams):
            self._hide(tag, accepted.endpoint, believed)
        elif accepted.forwarded or not entry.ports:
            # A reverse proxy has the client's socket.
            self._hide(tag, accepted.endpoint, believed)
            if self._is_in((tag, key := key_of(accepted.email))):
                self._announce(key, accepted.endpoint[:-2])
        else:
            (self._note if believed else self._guess)(tag, accepted)

    def _hide(self, tag: str, where: Endpoint, believed: bool = True) -> None:
        """Note a user without a TCP socket of their own, if the core does not list their address either."""
        if believed and where[:-2] in LOCAL:
            self.hidden.add(tag)

    def leave(self, run: XrayRun) -> None:
        """Save the owners of the connections for the next node process."""
        run.cut = self.cut
        run.hidden.extend(sorted(self.hidden))
        run.suspects.CopyFrom(self._old_credentials.packed(self._reactor.seconds()))
        for tag, endpoints in self._endpoints.items():
            run.places[tag].CopyFrom(endpoints.packed())

    def go_on(self, run: XrayRun) -> None:
        """Restore what an earlier node process saved."""
        self.cut = run.cut
        self.hidden.update(run.hidden)
        self._old_credentials.unpack(run.suspects, self._reactor.seconds())
        for tag, endpoints in self._endpoints.items():
            if tag in run.places:
                endpoints.unpack(run.places[tag])
        self._look_within(LEARN)

    def of(self, pairs: Iterable[Pair]) -> dict[Endpoint, Ports]:
        """The endpoints from which these users are connected to these inbounds, each with the inbound's ports."""
        keys: dict[str, set[str]] = {}
        for tag, key in pairs:
            keys.setdefault(tag, set()).add(key)
        found: dict[Endpoint, Ports] = {}
        for tag in keys.keys() & self._ingress.keys():
            for where in self._endpoints[tag].of(keys[tag]):
                found[where] = (*found.get(where, ()), *self._ingress[tag].ports)
        return found

    def has(self, key: str) -> bool:
        """Whether this user may be connected to any of the inbounds."""
        return any(endpoints.has(key) for endpoints in self._endpoints.values())

    def addresses(self, key: str) -> set[Address]:
        """The addresses from which the user may have connections with sockets of their own."""
        return {where[:-2] for endpoints in self._endpoints.values() for where in endpoints.of((key,))}

    def owners(self, addresses: Container[Address]) -> set[str]:
        """The users who may be connected from these addresses."""
        return set[str]().union(*(endpoints.owners(addresses) for endpoints in self._endpoints.values()))

    def mixed_at(self, addresses: Container[Address]) -> list[str]:
        """The inbounds to which a connection from these addresses carries several users."""
        return [tag for tag, endpoints in self._endpoints.items() if endpoints.is_mixed(addresses)]

    @property
    def mixed(self) -> list[str]:
        """The inbounds to which some connection carries several users."""
        return [tag for tag, endpoints in self._endpoints.items() if endpoints.mixed]

    async def look(self, keys: Collection[str]) -> list[Live]:
        whose = {
            where: (key, tag)
            for tag, endpoints in self._endpoints.items()
            for key in keys
            for where in endpoints.of((key,))
            if endpoints.holder(where) == key
        }
        if not whose or self._pid is None:
            return []
        rows = [(*whose[flow.peer], flow) for flow in await self._flows(whose.keys())]
        return [
            live_of(key, flow.peer[:-2], flow, flow.peer, tag)
            for key, tag, flow in rows
            if at(flow.port, self._ingress[tag].ports)
        ]

    def _peer(self, rest: bytes) -> Endpoint:
        return rest

    async def reset(self, handles: Iterable[Handle]) -> int:
        by_inode = {inode_of(handle): handle for handle in handles}
        if self.descriptors is None or not by_inode:
            return 0
        ended = await self._on_sockets(_NOT_ENDED, self.descriptors.reset, by_inode.keys()) or set()
        for inode in ended:
            self._forget(rest_of(by_inode[inode]))
        return len(ended)

    async def credentials_change(self, changed: Iterable[Pair]) -> None:
        """These users get a new credential next: connections that exist now were made with the old one."""
        pairs = [pair for pair in changed if pair[0] in self._ingress]
        if not pairs or self._pid is None:
            return
        try:
            if self._arrivals.may_miss(self._old_credentials.looked):
                begun = self._reactor.seconds()
                self._old_credentials.look(await self._ask(cookies), begun)
        except OSError as error:
            self._complain("the kernel does not list connections: those of old credentials may stay open: {}", error)
            return
        self._old_credentials.add(pairs, self._reactor.seconds())
        self._look_within(PRUNE)

    def note_removed(self, pairs: Iterable[Pair]) -> None:
        """These users were removed. The core is asked about connections for which it dropped the access line."""
        until = self._reactor.seconds() + PRUNE
        self._removed |= {pair: until for pair in pairs if pair[0] in self._ingress}
        if self._removed:
            self._look_within(max(LEARN, self._governor.left))

    def left_lately(self, pair: Pair) -> bool:
        """Whether access lines of the user's connections from before a removal may still come."""
        return self._reactor.seconds() < self._removed.get(pair, 0.0) - PRUNE + LATE

    async def _ask(self, kernel: Callable[[Ports], T]) -> T:
        """Ask the kernel for the connections to the inbounds; in the pool if the last look found many."""
        if self._crowd > INLINE:
            found = await in_pool(self._reactor, kernel, self._ports)
        else:
            found = kernel(self._ports)
        self._crowd = len(found)
        return found

    async def end(self, wanted: Mapping[Endpoint, Ports], sockets: Mapping[Endpoint, int] = NO_SOCKETS) -> None:
        """Cut these connections, of removed users or of old credentials. `sockets`: the cookies that some must have."""
        if not wanted or self.descriptors is None or self._pid is None:
            return
        ended = await self._on_sockets(_NOT_ENDED, self.descriptors.end, wanted, sockets) or set()
        self.cut += len(ended)
        for where in ended:
            self._forget(where)

    async def end_crowded(self, tags: Collection[str]) -> None:
        """Cut all connections to those of these inbounds where a connection can carry several users."""
        crowded = [entry.ports for tag, entry in self._ingress.items() if tag in tags and entry.crowded]
        ports = [some for each in crowded for some in each]
        if not ports or self.descriptors is None:
            return
        try:
            found = await in_pool(self._reactor, lambda: diag.flows(ports, diag.connected(ports)))
        except OSError as error:
            self._complain(_NOT_ENDED, error)
            return
        await self._on_sockets(_NOT_ENDED, self.descriptors.reset, {flow.inode for flow in found})

    async def close_all(self, ports: Ports) -> None:
        """Close all connections to these ports. Returns when the core has read what had arrived, or after `DRY`."""
        hang_up = sockets.hang_up
        ended = await self._on_sockets(_NOT_ENDED, hang_up, self._pid, ports) if self._pid is not None else None
        deadline = self._reactor.seconds() + DRY
        try:
            while ended and self._reactor.seconds() < deadline and diag.unread(ports, ended):
                await deferLater(self._reactor, POLL)
        except OSError as error:
            self._complain("the last bytes of connections that close with the core may not be counted: {}", error)
        # The core counts the last bytes a moment after it has read them.
        await deferLater(self._reactor, NOTICE)

    async def flush(self) -> None:
        """Cut at once the connections that were to be cut soon."""
        late, self._to_cut = self._to_cut, {}
        sockets = {where: socket for where, (_, socket) in late.items() if socket}
        await self.end({where: self._ingress[tag].ports for where, (tag, _) in late.items()}, sockets)
        for where in sockets:
            # It is still held if it is a new connection from the same port.
            if (key := self._endpoints[late[where][0]].holder(where)) is not None:
                self._announce_at(where, key)

    def stop(self) -> None:
        """The core is stopping or has exited."""
        self._pid = None
        self._look_alarm.cancel()
        self._cut_alarm.cancel()

    def _find_tags(self, port: int) -> list[str]:
        """The managed inbounds whose users connect to a port."""
        return [tag for tag, entry in self._ingress.items() if any(port in some for some in entry.ports)]

    def _note(self, tag: str, accepted: Accepted) -> None:
        where, key = accepted.endpoint, key_of(accepted.email)
        endpoints = self._endpoints[tag]
        holder = endpoints.holder(where)
        if self._ingress[tag].shared and holder and self._is_in((tag, holder)) and not self._is_in((tag, key)):
            return  # A late line of a removed user must not cost a current user their connection.
        if endpoints.note(where, key):
            self._look_within(max(LEARN, self._governor.left))
            self._cut_if_outdated((tag, key), where)
            if holder != key:
                self._announce_at(where, key)
        else:
            self._look_within(max(GATHER, self._governor.left))
        self._count()

    def _guess(self, tag: str, accepted: Accepted) -> None:
        key = key_of(accepted.email)
        if self._is_in((tag, key)):
            self._endpoints[tag].guess(accepted.endpoint, key)
            self._look_within(max(LEARN, self._governor.left))
            self._count()

    def _count(self) -> None:
        self._noted += 1
        if self._noted >= CAP // 8:
            self._make_room()

    def _cut_if_outdated(self, pair: Pair, where: Endpoint) -> None:
        """Cut this connection if its user was removed, or made it with an old credential."""
        if not self._is_in(pair):
            self._cut_soon(pair[0], where)
        elif self._old_credentials.has(pair, where, self._reactor.seconds()):
            self._cut_soon(pair[0], where, self._old_credentials.socket(where))

    def _cut_soon(self, tag: str, where: Endpoint, socket: int = 0) -> None:
        _, before = self._to_cut.get(where, (tag, socket))
        self._to_cut[where] = tag, socket if socket == before else 0
        if self._pid is not None:
            self._cut_alarm.within(GATHER)

    def _announce_at(self, where: Endpoint, key: str) -> None:
        if where not in self._to_cut:
            self._announce(key, where[:-2])

    def _forget(self, where: Endpoint) -> None:
        for endpoints in self._endpoints.values():
            endpoints.forget((where,))

    async def _look_around(self) -> None:
        """Look at all connections: settle the owners of endpoints, and forget endpoints that are gone."""
        if self._looking:
            self._look_within(GATHER)
            return
        self._looking, self._looked = True, self._reactor.seconds()
        for endpoints in self._endpoints.values():
            endpoints.age()
        try:
            live = await self._live()
        finally:
            self._looking = False
        for tag, there in live.items():
            if self._ingress[tag].either:
                for where in self._endpoints[tag].unfound(there):
                    self._hide(tag, where)
            for where, key in self._endpoints[tag].renewed(there).items():
                self._announce_at(where, key)
            for where, key in self._endpoints[tag].settle(there).items():
                self._cut_if_outdated((tag, key), where)
                self._announce_at(where, key)
        self._governor.worked(self._looked)
        await self._claim(live)
        self._old_credentials.prune(self._reactor.seconds())
        if self._old_credentials or any(map(len, self._endpoints.values())):
            self._look_within(PRUNE)

    async def take_stock(self, online: Mapping[Address, Collection[str]]) -> None:
        """Attribute the connections of a core that was taken over: to the one user online at their address."""
        live = await self._live()
        for tag, there in live.items():
            for where in there:
                if self._endpoints[tag].holder(where) is None:
                    self._attribute(tag, where, online.get(where[:-2], ()))
        self._look_within(PRUNE)

    async def _claim(self, live: Mapping[str, Mapping[Endpoint, int | None]]) -> None:
        """Attribute connections without an access line, if limits or a removal need to know their owner."""
        now = self._reactor.seconds()
        self._removed = {pair: until for pair, until in self._removed.items() if now < until}
        if self._unlogged is None or (self.arrived is ignore_arrivals and not self._removed):
            return
        some = [(tag, there) for tag, there in live.items() if not self._ingress[tag].shared]
        strays = [(tag, where) for tag, there in some for where in there if self._endpoints[tag].holder(where) is None]
        try:
            found = await self._unlogged.claim(strays)
        except ApiFailed as error:
            self.log.debug("connections without an access line stay without a known user: {fault}", fault=error)
            return
        for (tag, where), keys in found.items():
            self._attribute(tag, where, keys)
        if self._unlogged.fresh:
            self._look_within(max(LEARN, self._governor.left))

    def _attribute(self, tag: str, where: Endpoint, keys: Collection[str]) -> None:
        """Attribute a connection to the only user online at its address; cut it if a removed one is online there."""
        if any((tag, key) in self._removed and not self._is_in((tag, key)) for key in keys):
            self._cut_soon(tag, where)
        elif len(keys) == 1 and not self._ingress[tag].forwards:
            # Where connections are led on, it may belong to another inbound's user at the same address.
            (key,) = keys
            if self._is_in((tag, key)) and self._endpoints[tag].presume(where, key):
                self._announce_at(where, key)

    async def _live(self) -> Mapping[str, Mapping[Endpoint, int | None]]:
        """Per inbound: the peers and the cookie of their socket, if known. Empty if they cannot be listed."""
        try:
            found = await self._ask(diag.connections)
        except OSError as error:
            self._complain("the kernel does not list connections: one may be attributed to a wrong user: {}", error)
            peers = await self._on_sockets(_NOT_ENDED, sockets.peers, self._pid) if self._pid is not None else None
            return dict.fromkeys(self._ingress, dict.fromkeys(peers)) if peers else {}
        live: dict[str, dict[Endpoint, int | None]] = {tag: {} for tag in self._ingress}
        for peer, port, cookie in found:
            for tag in self._tags_at(port):
                live[tag][peer] = cookie
        return live

    def _make_room(self) -> None:
        """Drop the oldest endpoints near the cap, and prune early above half of it."""
        self._noted = 0
        while sum(map(len, self._endpoints.values())) > CAP - CAP // 8:
            max(self._endpoints.values(), key=len).drop(CAP // 8)
        size = sum(map(len, self._endpoints.values()))
        if size > CAP // 2 and self._reactor.seconds() > self._looked + PRUNE_FULL:
            self._look_within(0)

    def _look_within(self, seconds: float) -> None:
        """Look around after these seconds, or before, unless the core is gone."""
        if self._pid is not None:
            self._look_alarm.within(seconds)

    def _in_background(self, work: Coroutine[Deferred[None], None, None]) -> None:
        text = "checking or cutting the core's connections failed: some of removed users may stay open"
        ensureDeferred(work).addErrback(lambda failure: self.log.failure(text, failure))
