"""The live connections of the users of one run of the core: whose they are, and ending those of removed users.

The core has no call for it. Its access lines say who came from where, and its sockets can be shut down from outside
(`drivers.sockets.connections`). A line that the core drops under load is a connection that is not known here.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Coroutine, Iterable, Iterator, Mapping
from functools import lru_cache, partial
from typing import Any, ParamSpec, TypeVar

from twisted.internet.defer import ensureDeferred
from twisted.internet.interfaces import IDelayedCall
from twisted.internet.task import deferLater
from twisted.internet.threads import deferToThreadPool

from drivers.channel import ApiFailed
from drivers.sockets import connections as sockets
from drivers.sockets import ending
from drivers.sockets import sock_diag as diag
from drivers.sockets.connections import Endpoint, Ports, at
from drivers.sockets.descriptors import Descriptors
from drivers.sockets.live import inode_of, live_of, nobody_listens, peer_of
from drivers.sockets.rights import Unreachable
from drivers.sockets.sock_diag import Connection, connected
from drivers.xray.access import Accepted, Records, parse
from drivers.xray.doors import Door
from drivers.xray.endpoints import Endpoints
from drivers.xray.strays import Online, Strays
from drivers.xray.suspects import Pair, Suspects
from node.contract.accounts import key_of
from node.contract.connections import Address, Arrived, Handle, Live
from node.logs import Logger
from node.reactor import PooledReactor
from protos.handover_pb2 import XrayRun

T = TypeVar("T", bound=set[Endpoint] | list[Connection])
R = TypeVar("R")
P = ParamSpec("P")

# Endpoints that are kept, of all inbounds together; some 40 MB.
CAP = 200_000
# Seconds between two looks at which of them are still connected, …
PRUNE = 60.0
# … the least there are when half the cap is reached, …
PRUNE_FULL = 10.0
# … and after which new ones are looked at, so that they can be told from later ones of the same port.
LEARN = 1.0
# The part of the time that looks take at most, together.
SHARE = 0.02
# Connections above which they are looked at in the reactor's pool.
INLINE = 500
# Seconds that late lines are gathered: one look at 10,000 sockets takes some 0.1 s of a processor.
GATHER = 0.1
# Seconds in which a core notices that its connections have ended.
NOTICE = 0.02
NOT_ENDED = "live connections of removed users cannot be ended, they last until they end by themselves: {}"
_ARROWS = (" >> ", " -> ", " ==> ")


class Connections:
    """Takes the core's lines, and ends connections. `is_in` says whether a pair is let in, or is being let in."""

    log = Logger()

    def __init__(self, reactor: PooledReactor, doors: Mapping[str, Door]) -> None:
        self._reactor = reactor
        self._doors = doors
        self._records = Records()
        self._endpoints = {tag: Endpoints(door.shared) for tag, door in self._doors.items()}
        self._pid: int | None = None
        self.descriptors: Descriptors | None = None
        self._strays: Strays | None = None
        # Is told of each connection of a user who is in, when it is known to be theirs.
        self.arrived: Arrived = nobody_listens
        self._is_in: Callable[[Pair], bool] = lambda _: True
        # Who was put out, and until when they may have connections of which no line told.
        self._put_out: dict[Pair, float] = {}
        self._ports = [some for door in doors.values() for some in door.ports]
        self._suspects = Suspects()
        self._late: dict[Endpoint, Ports] = {}
        self._calls: dict[str, IDelayedCall] = {}
        self._noted = 0
        self._looked = 0.0
        self._looking = False
        self._rest = 0.0
        self._complained = False
        # Connections to the inbounds when they were looked at last.
        self._crowd = 0
        # Connections of removed users that were ended.
        self.cut = 0
        self._tag_of = lru_cache(maxsize=1024)(self._find_tag)
        self._tags_at = lru_cache(maxsize=1024)(self._find_tags)

    def begin(self, pid: int | None, is_in: Callable[[Pair], bool], online: Online) -> None:
        """The core answers: from now on there is somebody to be put out."""
        self._strays = Strays(self._reactor, online)
        self._pid, self._is_in = pid, is_in
        self.descriptors = None if pid is None else Descriptors(pid)

    def take(self, line: str) -> None:
        """A line of the core, whatever it is about."""
        accepted = parse(line)
        believed = self._records.is_one(line, accepted)
        if accepted is None:
            return
        tag = self._tag_of(accepted.detour)
        if tag is not None and not (accepted.udp and self._doors[tag].datagrams):
            (self._note if believed else self._guess)(tag, accepted)

    def leave(self, run: XrayRun) -> None:
        """Note whose the connections are, for the next program of the node."""
        run.cut = self.cut
        run.suspects.CopyFrom(self._suspects.packed(self._reactor.seconds()))
        for tag, endpoints in self._endpoints.items():
            run.places[tag].CopyFrom(endpoints.packed())

    def go_on(self, run: XrayRun) -> None:
        """As an earlier program of the node knew them."""
        self.cut = run.cut
        self._suspects.unpack(run.suspects, self._reactor.seconds())
        for tag, endpoints in self._endpoints.items():
            if tag in run.places:
                endpoints.unpack(run.places[tag])
        self._call("learn", LEARN, self._look_around)

    def of(self, pairs: Iterable[Pair]) -> dict[Endpoint, Ports]:
        """From where these users are connected to these inbounds, and the ports that they came in by."""
        keys: dict[str, set[str]] = {}
        for tag, key in pairs:
            keys.setdefault(tag, set()).add(key)
        found: dict[Endpoint, Ports] = {}
        for tag in keys.keys() & self._doors.keys():
            for where in self._endpoints[tag].of(keys[tag]):
                found[where] = (*found.get(where, ()), *self._doors[tag].ports)
        return found

    def has(self, key: str) -> bool:
        """Whether this user may be connected to any of the inbounds."""
        return any(endpoints.has(key) for endpoints in self._endpoints.values())

    async def look(self, keys: Iterable[str]) -> list[Live]:
        """The connections that are known to be of these users. Raises `OSError` if the kernel does not list them."""
        whose = {where: (key, tag) for tag in self._doors for key, where in self._held(tag, keys)}
        if not whose or self._pid is None:
            return []
        ask = partial(diag.flows, self._ports, whose.keys())
        pool = self._reactor.getThreadPool()
        rows = [(*whose[flow.peer], flow) for flow in await deferToThreadPool(self._reactor, pool, ask)]
        return [live_of(key, flow) for key, tag, flow in rows if at(flow.port, self._doors[tag].ports)]

    async def inodes(self, handles: Iterable[Handle]) -> Mapping[int, Handle]:
        """Those of these connections that are there, by their sockets. Raises `OSError` as `look`."""
        wanted = {inode_of(handle): handle for handle in handles}
        ask = partial(diag.flows, self._ports, {peer_of(handle) for handle in wanted.values()})
        found = await deferToThreadPool(self._reactor, self._reactor.getThreadPool(), ask)
        return {flow.inode: wanted[flow.inode] for flow in found if flow.inode in wanted}

    def _held(self, tag: str, keys: Iterable[str]) -> Iterator[tuple[str, Endpoint]]:
        endpoints = self._endpoints[tag]
        for key in keys:
            yield from ((key, where) for where in endpoints.of((key,)) if endpoints.holder(where) == key)

    async def reset(self, handles: Iterable[Handle]) -> int:
        """End these connections, as `look` told them. Returns how many there were."""
        by_inode = {inode_of(handle): handle for handle in handles}
        if self.descriptors is None or not by_inode:
            return 0
        ended = await self._on_sockets(ending.reset, self.descriptors, by_inode.keys()) or set()
        for inode in ended:
            self._forget(peer_of(by_inode[inode]))
        return len(ended)

    async def suspect(self, changed: Iterable[Pair]) -> None:
        """These get a new credential next: who of them is connected by now came with the old one."""
        pairs = [pair for pair in changed if pair[0] in self._doors]
        if not pairs or self._pid is None:
            return
        try:
            peers = await self._ask(connected)
        except OSError as error:
            self._complain(f"connections by an old credential may live on: the kernel does not list them: {error}")
            return
        self._suspects.add(pairs, peers, self._reactor.seconds())
        self._call("prune", PRUNE, self._look_around)

    def put_out(self, pairs: Iterable[Pair]) -> None:
        """These were removed. Of a connection that they made before no line may have told: then the core is asked."""
        until = self._reactor.seconds() + PRUNE
        self._put_out |= {pair: until for pair in pairs if pair[0] in self._doors}
        if self._put_out:
            self._call("learn", max(LEARN, self._rest), self._look_around)

    async def _ask(self, kernel: Callable[[Ports], T]) -> T:
        """Who is connected to the inbounds; asked in the pool where there were many the last time."""
        if self._crowd > INLINE:
            found = await deferToThreadPool(self._reactor, self._reactor.getThreadPool(), kernel, self._ports)
        else:
            found = kernel(self._ports)
        self._crowd = len(found)
        return found

    async def end(self, wanted: Mapping[Endpoint, Ports]) -> None:
        """End these connections, of users who are out or have another credential than they came with."""
        if not wanted or self.descriptors is None or self._pid is None:
            return
        ended = await self._on_sockets(ending.end, self._pid, self.descriptors, wanted) or set()
        self.cut += len(ended)
        for where in ended:
            self._forget(where)

    async def end_handshakes(self, tags: Iterable[str]) -> None:
        """End connections to these inbounds of which the core has not said whose they are, and give it a moment."""
        ports = [some for tag in tags for some in self._doors[tag].ports]
        try:
            peers = await self._ask(connected)
        except OSError as error:
            self._complain(f"users who shake hands are not found: the kernel does not list connections: {error}")
            return
        known = [endpoints.holder for endpoints in self._endpoints.values()]
        await self.end({peer: ports for peer in peers if not any(holder(peer) for holder in known)})
        await deferLater(self._reactor, NOTICE)

    async def hang_up(self, ports: Ports) -> None:
        """End all connections to these ports, whosever they are, and give the core a moment to notice."""
        if self._pid is not None:
            await self._on_sockets(sockets.hang_up, self._pid, ports)
        await deferLater(self._reactor, NOTICE)

    async def flush(self) -> None:
        """End at once what was to be ended soon."""
        await self._end_late()

    def stop(self) -> None:
        """The core ends, or ended."""
        self._pid = None
        for call in self._calls.values():
            call.cancel()
        self._calls.clear()

    def _find_tag(self, detour: str) -> str | None:
        """The inbound that an access line names; its tag may have arrows in it, too. None if it is not managed."""
        tags = [tag for tag in self._doors if any(detour.startswith(tag + arrow) for arrow in _ARROWS)]
        return max(tags, key=len, default=None)

    def _find_tags(self, port: int) -> list[str]:
        """The inbounds whose users come in by a port."""
        return [tag for tag, door in self._doors.items() if any(port in some for some in door.ports)]

    def _note(self, tag: str, accepted: Accepted) -> None:
        where, key = accepted.endpoint, key_of(accepted.email)
        endpoints = self._endpoints[tag]
        holder = endpoints.holder(where)
        if self._doors[tag].shared and holder and self._is_in((tag, holder)) and not self._is_in((tag, key)):
            return  # A user who is in loses no connection for one who is not, whatever a late line says.
        if endpoints.note(where, key):
            self._call("learn", max(LEARN, self._rest), self._look_around)
            self._mind((tag, key), where)
            if holder != key:
                self._welcome((tag, key), where)
        else:
            self._call("claims", max(GATHER, self._rest), self._look_around)
        self._count()

    def _guess(self, tag: str, accepted: Accepted) -> None:
        key = key_of(accepted.email)
        if self._is_in((tag, key)):
            self._endpoints[tag].guess(accepted.endpoint, key)
            self._call("learn", max(LEARN, self._rest), self._look_around)
            self._count()

    def _count(self) -> None:
        self._noted += 1
        if self._noted >= CAP // 8:
            self._make_room()

    def _mind(self, pair: Pair, where: Endpoint) -> None:
        """End this connection of a user's if they are out, or came by a credential that they had before."""
        if not self._is_in(pair) or self._suspects.has(pair, where, self._reactor.seconds()):
            self._end_soon(pair[0], where)

    def _end_soon(self, tag: str, where: Endpoint) -> None:
        self._late[where] = self._doors[tag].ports
        self._call("late", GATHER, self._end_late)

    def _welcome(self, pair: Pair, where: Endpoint) -> None:
        if where in self._late:
            return
        try:
            self.arrived(pair[1], where[:-2])
        except Exception:  # noqa: BLE001 - logged; the core's lines are read for more, and it dies where nobody does
            self.log.failure("what is done about a new connection failed")

    async def _end_late(self) -> None:
        late, self._late = self._late, {}
        await self.end(late)

    async def _on_sockets(self, work: Callable[P, R], *arguments: P.args, **words: P.kwargs) -> R | None:
        """What comes of work on the core's sockets; None if they cannot be had, which is said once."""
        pool = self._reactor.getThreadPool()
        try:
            return await deferToThreadPool(self._reactor, pool, work, *arguments, **words)
        except Unreachable as error:
            self._complain(NOT_ENDED.format(error))
            return None

    def _complain(self, text: str) -> None:
        """Once: it would be the same each time."""
        if not self._complained:
            self.log.error("{text}", text=text)
        self._complained = True

    def _forget(self, where: Endpoint) -> None:
        for endpoints in self._endpoints.values():
            endpoints.forget((where,))

    async def _look_around(self) -> None:
        """Tell whose the endpoints are, and forget those that are not connected any more."""
        if self._looking:
            self._call("again", GATHER, self._look_around)
            return
        self._looking, self._looked = True, self._reactor.seconds()
        for endpoints in self._endpoints.values():
            endpoints.age()
        try:
            live = await self._live()
        finally:
            self._looking = False
        for tag, there in live.items():
            for where, key in self._endpoints[tag].renewed(there).items():
                self._welcome((tag, key), where)
            for where, key in self._endpoints[tag].settle(there).items():
                self._mind((tag, key), where)
                self._welcome((tag, key), where)
        self._rest = (self._reactor.seconds() - self._looked) / SHARE
        await self._claim(live)
        self._suspects.prune(self._reactor.seconds())
        if self._suspects or any(map(len, self._endpoints.values())):
            self._call("prune", PRUNE, self._look_around)

    async def take_stock(self, online: Mapping[Address, Collection[str]]) -> None:
        """Of connections that were there before anything was heard: they are of the one user who is online there."""
        live = await self._live()
        for tag, there in live.items():
            for where in there:
                if self._endpoints[tag].holder(where) is None:
                    self._attribute(tag, where, online.get(where[:-2], ()))
        self._call("prune", PRUNE, self._look_around)

    async def _claim(self, live: Mapping[str, Mapping[Endpoint, int | None]]) -> None:
        """Find whose the connections are of which no line told, where somebody wants to know of each."""
        now = self._reactor.seconds()
        self._put_out = {pair: until for pair, until in self._put_out.items() if now < until}
        if self._strays is None or (self.arrived is nobody_listens and not self._put_out):
            return
        some = [(tag, there) for tag, there in live.items() if not self._doors[tag].shared]
        nobodys = [(tag, where) for tag, there in some for where in there if self._endpoints[tag].holder(where) is None]
        try:
            found = await self._strays.claim(nobodys)
        except ApiFailed as error:
            self.log.debug("connections of which no line told are nobody's for now: {fault}", fault=error)
            return
        for (tag, where), keys in found.items():
            self._attribute(tag, where, keys)
        if self._strays.fresh:
            self._call("learn", max(LEARN, self._rest), self._look_around)

    def _attribute(self, tag: str, where: Endpoint, keys: Collection[str]) -> None:
        """These users are online where a connection comes from that is nobody's: it is of one who is out, or theirs."""
        if any((tag, key) in self._put_out and not self._is_in((tag, key)) for key in keys):
            self._end_soon(tag, where)
        elif len(keys) == 1 and not self._doors[tag].leads_on:
            # Where others are led on, it may be one of theirs: they share an address, too.
            (key,) = keys
            if self._is_in((tag, key)) and self._endpoints[tag].presume(where, key):
                self._welcome((tag, key), where)

    async def _live(self) -> Mapping[str, Mapping[Endpoint, int | None]]:
        """Who is connected to each inbound, by which socket; of none if that cannot be known."""
        try:
            found = await self._ask(diag.connections)
        except OSError as error:
            self._complain(f"a user may be taken for another one who had the port before: {error}")
            peers = await self._on_sockets(sockets.peers, self._pid) if self._pid is not None else None
            return dict.fromkeys(self._doors, dict.fromkeys(peers)) if peers else {}
        live: dict[str, dict[Endpoint, int | None]] = {tag: {} for tag in self._doors}
        for peer, port, cookie in found:
            for tag in self._tags_at(port):
                live[tag][peer] = cookie
        return live

    def _make_room(self) -> None:
        """Keep to the cap, and prune early where it comes near."""
        self._noted = 0
        while sum(map(len, self._endpoints.values())) > CAP - CAP // 8:
            max(self._endpoints.values(), key=len).drop(CAP // 8)
        size = sum(map(len, self._endpoints.values()))
        if size > CAP // 2 and self._reactor.seconds() > self._looked + PRUNE_FULL:
            self._call("early prune", 0, self._look_around)

    def _call(self, name: str, seconds: float, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Have `work` done in a while, unless that is due already or the core is gone."""
        if name in self._calls or self._pid is None:
            return

        def run() -> None:
            del self._calls[name]
            ensureDeferred(work()).addErrback(
                lambda failure: self.log.failure("connections were not ended or pruned", failure)
            )

        self._calls[name] = self._reactor.callLater(seconds, run)
