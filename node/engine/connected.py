"""Who is connected to the runs that serve, draining ones included, and from where; ends connections."""

from __future__ import annotations

import ipaddress
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import nsmallest

from twisted.internet.task import deferLater

from node.backend.desired import BUILD_INLINE
from node.backend.listing import MOST, MOST_BYTES
from node.backend.runner import Runner
from node.base.errors import InvalidRequest, UnknownName, Unsupported, shown
from node.base.pool import in_pool
from node.base.reactor import PooledReactor
from node.base.slices import slices
from node.base.waiting import together
from node.contract.abilities import CountsOnline, ListsOnline
from node.contract.accounts import key_of
from node.contract.connections import Address, KeepsOut, Live, SeesConnections, SeesForwarded
from node.contract.driver import Generation
from node.events.journal import Journal
from node.events.kinds import Kind
from node.events.users import LONGEST_NAME, NAMED, listing
from protos.service_pb2 import (
    DropConnectionsRequest,
    DropConnectionsResponse,
    ListOnlineResponse,
    StatsOnlineIpListResponse,
    User,
)

# Users whose addresses are requested in parallel, and whose connections are listed at a time: some ten milliseconds.
AT_ONCE, TURN = 64, 5000
# Seconds after its first bytes within which a core reports a connection and its user.
LAG = 0.25
NO_LIST = "this core cannot list the users who are online"
BLIND = "the core does not report the users of its connections"
FRONTED = "a reverse proxy has the sockets of some of its users, and the core does not report which"


@dataclass(frozen=True)
class Wanted:
    """Which connections to end: those to which all that is given applies."""

    key: str = ""
    address: Address = b""
    tag: str = ""

    def has(self, live: Live) -> bool:
        return (not self.address or live.address == self.address) and (not self.tag or live.tag == self.tag)

    def users_of(self, run: Generation) -> Mapping[str, Collection[str]]:
        """The users of a run who may have such a connection, by inbound, without inbounds that have none."""
        users = {tag: some for tag, some in run.accounts.items() if self.tag in ("", tag)}
        if self.key:
            return {tag: [self.key] for tag, some in users.items() if self.key in some}
        return {tag: some for tag, some in users.items() if some}


@dataclass
class Dropped:
    """The connections that were ended, the users they were of, and the inbounds whose connections go on, and why."""

    ended: int = 0
    keys: set[str] = field(default_factory=set)
    unsupported: dict[str, str] = field(default_factory=dict)


class Connected:
    """The connections of users to all runs that serve."""

    def __init__(self, reactor: PooledReactor, runner: Runner, journal: Journal) -> None:
        self._reactor = reactor
        self._runner = runner
        self._journal = journal

    async def addresses(self, name: str) -> StatsOnlineIpListResponse:
        """The addresses from which a user is connected.

        Raises `UnknownName`, and `Unsupported` if the user may be connected and the core does not report it.
        """
        key = key_of(name)
        return _row(name, await self._known(name), (await self._forwarded([key])).get(key, ()))

    async def count(self, name: str) -> int:
        """From how many addresses a user is connected. Raises `UnknownName` and `Unsupported`."""
        try:
            return len(await self._known(name))
        except Unsupported:
            if not any(isinstance(run, CountsOnline) for run in self._runner.generations.serving):
                raise
            self._require_listed(key_of(name))
            # An address that is connected to two generations counts twice then.
            key = key_of(name)

            async def count(run: Generation) -> int:
                return await run.online_count(key) if isinstance(run, CountsOnline) else 0

            return sum(await self._runner.ask_all(count))

    async def page(self, after: str, limit: int) -> ListOnlineResponse:
        """The users online after this name, with their addresses: as many as fit into a reply. Raises `Unsupported`."""
        reply, online = ListOnlineResponse(), set[str]()
        for keys, unlisted in await self._runner.ask_all(_listed):
            online |= keys
            reply.unsupported.update(unlisted)
        online = {key for key in online if self._packed(key) is not None}
        reply.total = len(online)
        begin, limit = key_of(after), min(limit or MOST, MOST)
        page = await self._first([key for key in online if key > begin], limit + 1)
        size, last = 0, ""
        async for part in slices(self._reactor, page[:limit], AT_ONCE):
            forwarded = await self._forwarded(part)
            for key, addresses in zip(part, await together(map(self._addresses, part)), strict=True):
                row = _row(self._name_of(key), addresses, forwarded.get(key, ()))
                size += row.ByteSize()
                if reply.users and size > MOST_BYTES:
                    reply.next = last
                    return reply
                if addresses:
                    reply.users.append(row)
                last = key
        reply.next = last if len(page) > limit else ""
        return reply

    async def drop(self, request: DropConnectionsRequest) -> DropConnectionsResponse:
        """End these connections, also those that began just before. Raises `InvalidRequest` and as `addresses`."""
        wanted, dropped = self._wanted(request), Dropped()
        if not any(isinstance(run, SeesConnections) for run in self._runner.generations.serving):
            raise Unsupported(BLIND)
        await deferLater(self._reactor, LAG)
        try:
            await self._runner.ask_all(lambda run: self._drop(run, wanted, dropped))
        finally:
            if dropped.ended:
                self._tell(wanted, dropped)
        return DropConnectionsResponse(ended=dropped.ended, users=len(dropped.keys), unsupported=dropped.unsupported)

    def _wanted(self, request: DropConnectionsRequest) -> Wanted:
        self._runner.current()
        if not (request.name or request.address or request.inbound):
            raise InvalidRequest("name a user, an address or an inbound whose connections end")
        address = _address_of(request.address) if request.address else b""
        if request.name:
            self._require_user(request.name)
        if request.inbound and not any(request.inbound in run.accounts for run in self._runner.generations.serving):
            raise UnknownName(f"there is no inbound {shown(request.inbound)} with users of the node")
        return Wanted(key_of(request.name), address, request.inbound)

    async def _drop(self, run: Generation, wanted: Wanted, dropped: Dropped) -> None:
        users = wanted.users_of(run)
        going_on = {**run.mixed, **run.unseen} if isinstance(run, SeesConnections) else dict.fromkeys(users, BLIND)
        if isinstance(run, KeepsOut):
            going_on = {**await self._fronted(run, users, wanted), **going_on}
        dropped.unsupported |= {tag: why for tag, why in going_on.items() if tag in users}
        if not isinstance(run, SeesConnections):
            return
        keys = {key for some in users.values() for key in some}
        async for part in slices(self._reactor, keys, TURN):
            if carrying := {key for key in part if run.may_carry(key)}:
                found = [live for live in await run.look(carrying) if live.key in carrying and wanted.has(live)]
                if found and (ended := await run.end(found)):
                    dropped.ended += ended
                    dropped.keys.update(live.key for live in found)

    async def _fronted(self, run: KeepsOut, users: Mapping[str, Collection[str]], wanted: Wanted) -> Mapping[str, str]:
        """The inbounds where such a connection may have come through a reverse proxy, and so cannot be ended."""
        fronted = dict.fromkeys(run.fronted.keys() & users.keys(), FRONTED)
        try:
            found = await run.forwarded({key for tag in fronted for key in users[tag]}) if fronted else {}
        except Unsupported:
            return fronted
        return fronted if any(wanted.address in some if wanted.address else some for some in found.values()) else {}

    def _tell(self, wanted: Wanted, dropped: Dropped) -> None:
        """Report it, without addresses."""
        count, names = len(dropped.keys), [self._name_of(key)[:LONGEST_NAME] for key in sorted(dropped.keys)[:NAMED]]
        asked = {"user": wanted.key, "address": wanted.address, "inbound": wanted.tag}
        by = ", ".join(word for word, given in asked.items() if given)
        self._journal.tell(
            Kind.USERS_DROPPED,
            f"a controller had connections of {listing(names, count)} ended: {dropped.ended}",
            connections=dropped.ended,
            count=count,
            names=", ".join(names),
            by=by,
        )

    async def _known(self, name: str) -> dict[str, int]:
        """By address, when the user was last seen there. Raises as `addresses`."""
        self._require_user(name)
        found = await self._addresses(key_of(name))
        if not found:
            self._require_listed(key_of(name))
        return found

    async def _addresses(self, key: str) -> dict[str, int]:
        addresses: dict[str, int] = {}
        for found in await self._runner.ask_all(lambda run: run.online(key)):
            for address, seen in found.items():
                addresses[address] = max(seen, addresses.get(address, 0))
        return addresses

    async def _forwarded(self, keys: Collection[str]) -> dict[str, set[Address]]:
        """Those of these users' addresses that reverse proxies reported."""

        async def ask(run: Generation) -> Mapping[str, Collection[Address]]:
            return await run.forwarded(keys) if isinstance(run, SeesForwarded) else {}

        found: dict[str, set[Address]] = {}
        for each in await self._runner.ask_all(ask):
            for key, addresses in each.items():
                found.setdefault(key, set()).update(addresses)
        return found

    async def _first(self, keys: Collection[str], count: int) -> Sequence[str]:
        """The first ones of these keys, sorted."""
        if len(keys) <= BUILD_INLINE:
            return nsmallest(count, keys)
        return await in_pool(self._reactor, nsmallest, count, keys)

    def _require_user(self, name: str) -> None:
        self._runner.current()
        if not self._runner.desired.is_user(name):
            raise UnknownName(f"there is no user {shown(name)}")

    def _require_listed(self, key: str) -> None:
        """Raises `Unsupported` if the user may be connected to an inbound whose users a core does not list."""
        for run in self._runner.generations.serving:
            for tag, why in run.unlisted.items() if isinstance(run, ListsOnline) else ():
                if key in run.accounts.get(tag, ()):
                    raise Unsupported(f"whether the user is online in inbound {tag!r} is not known: {why}")

    def _name_of(self, key: str) -> str:
        packed = self._packed(key)
        return key if packed is None else User.FromString(packed).email

    def _packed(self, key: str) -> bytes | None:
        """The user's message; None for one who is not wanted, or only in the configuration."""
        desired = self._runner.desired
        return desired.roster.users.get(key) or desired.serving_roster.users.get(key)


async def _listed(run: Generation) -> tuple[set[str], Mapping[str, str]]:
    if not isinstance(run, ListsOnline):
        raise Unsupported(NO_LIST)
    return set(await run.online_keys()), run.unlisted


def _address_of(text: str) -> Address:
    """An address in network order; raises `InvalidRequest`."""
    try:
        return _packed(text)
    except ValueError:
        raise InvalidRequest(f"{shown(text)} is not an IP address") from None


def _row(name: str, addresses: Mapping[str, int], forwarded: Collection[Address]) -> StatsOnlineIpListResponse:
    marked = sorted(text for text in addresses if _reported(text) in forwarded)
    return StatsOnlineIpListResponse(name=name, ips=addresses, forwarded=marked)


def _reported(text: str) -> Address:
    """An address that a core lists, without its zone, which a client behind a proxy chooses; empty for other texts."""
    try:
        return _packed(text.partition("%")[0])
    except ValueError:
        return b""


def _packed(text: str) -> Address:
    """Raises `ValueError`."""
    address = ipaddress.ip_address(text)
    return (getattr(address, "ipv4_mapped", None) or address).packed
