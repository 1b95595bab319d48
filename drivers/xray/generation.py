"""A generation: one run of Xray, with its process, its API and the users that it confirmed."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from ipaddress import ip_address

from twisted.internet.defer import DeferredLock, ensureDeferred

from drivers.process.aliases import unaliased
from drivers.process.channel import COUNTERS, LATENCY, ONLINE, ROUTING, USERS, ApiFailed, asking
from drivers.process.generation import CoreGeneration, Started
from drivers.process.kept import left
from drivers.sockets.pacing import Paced
from drivers.xray import abuse, rules, wireguard
from drivers.xray.access import Shown
from drivers.xray.accounts import email_of, spellings
from drivers.xray.api import Api, addresses_in, asked_route, route_of
from drivers.xray.bars import Bars
from drivers.xray.closed import BARE
from drivers.xray.compat import UNTRUSTED, UNTRUSTED_SEEN
from drivers.xray.config import ApiAddress, Plan, measures
from drivers.xray.connections import LOCAL, Connections
from drivers.xray.ingress import transport_of, unseen
from drivers.xray.messages import OURS
from drivers.xray.overrides import BLACKHOLE
from drivers.xray.users import Users
from node.base.errors import CoreFailed, InvalidConfig, UnknownName, Unsupported, shown
from node.base.slices import slices
from node.base.waiting import together
from node.contract.abilities import NotShared
from node.contract.abuse import Request
from node.contract.accounts import Accounts, Change, key_of
from node.contract.connections import Address
from node.contract.counters import DIRECTIONS, Reading, Scope, Seen, counter_name
from node.contract.driver import Applied
from node.contract.driver import Plan as AnyPlan
from protos.handover_pb2 import Accounts as Packed
from protos.handover_pb2 import XrayRun
from protos.service_pb2 import (
    BalancerInfoResponse,
    Latency,
    RouteResult,
    RoutingRule,
    TestRouteRequest,
)
from protos.xray_pb2 import OutboundHandlerConfig, OutboundStatus

_NOT_LISTED = "this core cannot list its rules; Xray 26.1.23 and later can"
_NOT_TOLD = "this core cannot list the addresses of users; Xray 25.3.6 and later can"
_NO_LIST = "this core cannot list the users who are online; Xray 26.1.23 and later can"
_MIXED = "a connection carries requests of several users, as from a reverse proxy"
_HIDDEN = "some of its users come by UDP, or through a proxy, from this machine, whose addresses the core does not list"
NOT_MEASURED = (
    "the configuration measures no outbound: add an `observatory` or a `burstObservatory` whose `subjectSelector` "
    "names outbounds"
)
# Users whose addresses are requested in parallel.
SLICE = 64


class Output:
    """Reads the lines of one run, and filters them for the log: as the controller asked, without the node's own."""

    def __init__(self, endpoint: ApiAddress, shown: Shown, connections: Connections) -> None:
        self._token = endpoint.token
        self._shown = shown
        self.connections = connections
        self.warnings: tuple[str, ...] = ()

    def sift(self, lines: list[str]) -> list[str]:
        kept = []
        for line in lines:
            if self._token in line:
                continue
            # Before the core's warning is looked for: an access line whose target has that in it must count, too.
            line = unaliased(line)
            self.connections.take(line)
            if UNTRUSTED in line:
                # The core logs it for each connection.
                if self.warnings:
                    continue
                self.warnings = (UNTRUSTED_SEEN,)
            if (text := self._shown.line(line)) is not None:
                kept.append(text)
        return kept


class XrayGeneration(CoreGeneration[Api]):
    """Satisfies `Generation` and `Shares`, what is in `abilities`, and `NamesTransports`, `SeesRequests`, `Paces` and
    `KeepsOut`.
    """

    _api: Api
    _connections: Connections
    counts_in_node = False
    lingering = False

    def __init__(
        self,
        started: Started[Api],
        plan: Plan,
        endpoint: ApiAddress,
        output: Output,
        accounts: dict[str, Accounts],
        bars: Bars,
    ) -> None:
        host, process, api = started.host, started.process, started.api
        self.plan = plan
        self.uncounted = plan.uncounted
        self.unseen: Mapping[str, str] = unseen(plan.inbounds, plan.ingress)
        self.fronted: Mapping[str, str] = dict.fromkeys(plan.fronted, bars.note)
        # Inbounds where connections may have no owner, since they cannot be attributed or carry several users.
        shared = {tag for tag, entry in plan.ingress.items() if entry.shared}
        self._unsure = self.unseen.keys() | self.fronted.keys() | shared
        self._endpoint = endpoint
        self._own = own_counters(endpoint, plan.base.outbound)
        self._output, connections = output, output.connections
        self.accounts = accounts
        self._router = api.router(rules.rules_of(plan.base))
        self._bars = bars
        # Users who are kept out from some networks since it began, or as the previous node process left it.
        self.barred: Mapping[str, Sequence[str]] = {}
        self._users = Users(host, plan, api, connections, accounts, self)
        # Held while inbounds are swapped, which closes listeners, or while it begins to share them with another core.
        self._listeners = DeferredLock()
        connections.begin(process.pid, self._users.is_in, self._online)
        paced = Paced(
            host.reactor,
            connections,
            ports={tag: entry.ports for tag, entry in plan.ingress.items() if entry.ports},
            shared={tag for tag, entry in plan.ingress.items() if entry.shared or entry.forwards},
        )
        super().__init__(started, plan, connections, paced, [endpoint.socket])
        process.when_exited().addCallback(lambda _: connections.stop())

    @property
    def transports(self) -> Collection[str]:
        return {*map(transport_of, self.plan.base.inbound)}

    @property
    def cut(self) -> int:
        return self._connections.cut

    @property
    def mixed(self) -> Mapping[str, str]:
        return dict.fromkeys(self._connections.mixed, _MIXED)

    def requests(self, exempt: Collection[str]) -> Sequence[Request]:
        return self._connections.requests.collect(exempt)

    def may_carry(self, key: str) -> bool:
        return self._connections.has(key) or any(key in self.accounts.get(tag, ()) for tag in self._unsure)

    @property
    def warnings(self) -> Sequence[str]:
        crowded = wireguard.crowded(self.accounts, self._tunnels)
        return [*self._files.warnings, *self._output.warnings, *crowded]

    @property
    def _tunnels(self) -> list[str]:
        return [tag for tag, inbound in self.plan.inbounds.items() if inbound.protocol == "wireguard"]

    async def counters(self, seen: Seen | None = None) -> Reading:
        with asking(COUNTERS):
            return self._without_own(await self._api.counters(seen=seen))

    def _counted_as(self, scope: Scope, name: str) -> Collection[str]:
        if scope is not Scope.USER:
            return [name]
        spelled = spellings(self.accounts, (key_of(name),)).values()
        return [alias for some in spelled for each in some for alias in self._aliases.all(each)]

    def _names(self, key: str) -> list[str]:
        """The names that the core has for a user now."""
        some = [email_of(users[key]) + self._aliases.end(tag) for tag, users in self.accounts.items() if key in users]
        return [*dict.fromkeys(some)]

    async def _some_counters(self, scopes: Collection[Scope], names: Collection[tuple[Scope, str]]) -> Reading:
        found = await self._api.some_counters(counter_name(*each, way) for each in names for way in DIRECTIONS)
        for scope in scopes:
            found |= await self._api.counters(f"{scope.value}>>>")
        return self._without_own(found)

    def _without_own(self, counters: dict[str, int]) -> Reading:
        for name in self._own:
            counters.pop(name, None)
        return self._aliases.read(counters)

    async def online(self, key: str) -> Mapping[str, int]:
        found: dict[str, int] = {}
        with asking(ONLINE, _NOT_TOLD):
            for name in self._names(key):
                for address, seen in (await self._api.online_ips(name)).items():
                    found[address] = max(seen, found.get(address, 0))
        if not LOCAL.isdisjoint(self._connections.addresses(key)):
            now = int(time.time())
            local = [live.address for live in await self.look({key}) if live.address in LOCAL]
            found |= {str(ip_address(address)): now for address in local}
        return found

    async def online_count(self, key: str) -> int:
        with asking(ONLINE, _NOT_TOLD):
            if self._aliases:
                return len({address for name in self._names(key) for address in await self._api.online_ips(name)})
            return sum([await self._api.online_count(name) for name in self._names(key)])

    @property
    def unlisted(self) -> Mapping[str, str]:
        hidden = dict.fromkeys(self._connections.hidden, _HIDDEN)
        return hidden | dict.fromkeys(self._connections.mixed_at(LOCAL), _MIXED)

    async def online_keys(self) -> Collection[str]:
        with asking(ONLINE, _NO_LIST):
            listed = {*(await self._api.all_online()).values()}
        return listed | {live.key for live in await self.look(self._connections.owners(LOCAL))}

    async def latency(self) -> Sequence[Latency]:
        if not measures(self.plan.base):
            raise Unsupported(NOT_MEASURED)
        with asking(LATENCY):
            return latencies(await self._api.outbounds())

    async def _online(self) -> Mapping[Address, Collection[str]]:
        """The keys of the users online, by address. Raises `ApiFailed`."""
        keys = await self._api.all_online()
        names = [*keys]
        found: dict[Address, set[str]] = {}
        for begin in range(0, len(names), SLICE):
            part = names[begin : begin + SLICE]
            for name, addresses in zip(part, await together(map(self._api.online_ips, part)), strict=True):
                for address in addresses_in(addresses):
                    found.setdefault(address, set()).add(keys[name])
        return found

    async def forwarded(self, keys: Collection[str]) -> Mapping[str, Collection[Address]]:
        some = {key for key in keys if any(key in self.accounts.get(tag, ()) for tag in self.fronted)}
        found: dict[str, set[Address]] = {}
        with asking(ONLINE, _NO_LIST):
            if len(some) > SLICE:
                some.intersection_update((await self._api.all_online()).values())
            async for part in slices(self._host.reactor, some, SLICE):
                for key, online in zip(part, await together(map(self.online, part)), strict=True):
                    found[key] = addresses_in(online) - self._connections.addresses(key)
        return found

    async def keep_out(self, barred: Mapping[str, Sequence[str]]) -> None:
        self._bars.barred.clear()
        self._bars.barred.update(barred)
        await self._bar({})

    async def _bar(self, coming: Accounts) -> None:
        """Have the rules for those who are kept out, also as they are spelled in accounts that come next."""
        with asking(ROUTING, _NOT_LISTED):
            if self._bars.nesting:
                spelled = spellings({**self.accounts, "": coming}, self._bars.barred)
                await self._router.bar(self._bars.rules(spelled), self._bars.is_bar)

    async def find_barred(self) -> None:
        """Find out which users the previous node process kept out. Raises `CoreFailed`."""
        if self._bars.nesting:
            # A core that cannot list its rules keeps no user out.
            with suppress(Unsupported), asking(ROUTING, _NOT_LISTED):
                self.barred = self._bars.read(await self._router.go_on())

    async def reroute(self, plan: AnyPlan) -> None:
        made = getattr(plan, "made", None)
        assert isinstance(made, Plan)
        wanted, targets = rules.rules_of(made.base), made.routing.targets
        if "ABUSE" in self._files.changed_settings:
            # The core lacks the outbounds that these lead to.
            wanted = [rule for rule in wanted if not rule.tag.startswith(abuse.TORRENT)]
        try:
            await self._router.become(wanted, targets)
        except ApiFailed as error:
            if error.silent:
                raise CoreFailed(f"{ROUTING}: {error}") from error
            raise InvalidConfig(f"the core refuses these rules: {error}") from error

    async def rules(self) -> Sequence[RoutingRule]:
        with asking(ROUTING, _NOT_LISTED):
            listed = await self._router.rules()
        return [RoutingRule(outbound_tag=rule.tag, rule_tag=rules.public(rule.rule_tag)) for rule in listed]

    async def balancer(self, tag: str) -> BalancerInfoResponse:
        if tag not in rules.balancers_of(self.plan.base):
            raise UnknownName(f"there is no balancer {shown(tag)}")
        with asking(ROUTING):
            reply = await self._router.balancer(tag)
        return BalancerInfoResponse(override_target=reply.override.target, principle_target=reply.principle_target.tag)

    async def test_route(self, request: TestRouteRequest) -> RouteResult:
        asked = asked_route(request)
        with asking(ROUTING):
            reply = await self._router.test(asked)
        if reply is None:
            return route_of(asked.routing_context, self.plan.base.outbound[0].tag)
        return route_of(reply, self.plan.abuse.outbound(reply.outbound_tag) or reply.outbound_tag)

    async def audit(self) -> int:
        with asking(USERS):
            return await self._users.audit()

    async def apply(self, changes: Sequence[Change]) -> Applied:
        coming = {key: packed for _, key, packed in changes if packed is not None and key in self._bars.barred}
        async with self._listeners:
            try:
                if coming:
                    with suppress(CoreFailed, Unsupported):
                        await self._bar(coming)
                return await self._apply(changes)
            finally:
                await self._swapped()

    async def _apply(self, changes: Sequence[Change]) -> Applied:
        try:
            return await self._users.apply(changes)
        finally:
            if self._users.kept_out:
                if self.drains:
                    self._sharing.call_heir(self._number, self._led_again)
                else:  # the core that got new connections has exited meanwhile
                    self._led_again()

    async def _swapped(self) -> None:
        """A swapped inbound has a new listener."""
        await self.keep_closed()
        await self._paced.listeners_changed()

    async def join(self) -> None:
        async with self._listeners:
            await super().join()

    async def lead(self) -> None:
        await self._put_out()
        await super().lead()

    async def _put_out(self) -> None:
        if self._users.kept_out:
            async with self._listeners:
                try:
                    await self._users.put_out()
                finally:
                    await self._swapped()

    def _led_again(self) -> None:
        """It gets new connections, as the core that got them has exited."""
        text = "a core that gets new connections again may let in removed users"
        ensureDeferred(self._lead_again()).addErrback(lambda failure: self.log.failed(text, failure))

    async def _lead_again(self) -> None:
        try:
            await self._put_out()
        except NotShared as error:
            self.log.error(
                "a core gets new connections again: {reason}; the next audit removes them", reason=str(error)
            )
            self._users.readmit()

    async def leave(self) -> None:
        await self._connections.flush()
        await super().leave()

    def packed(self, exact: bool) -> bytes:
        """Without `exact` the core will list its users, but for those of WireGuard, whose list lacks their e-mails.

        Those who are kept out count as users: the next node keeps them out, too.
        """
        kept_out = self._users.kept_out
        tags = self.accounts if exact else [tag for tag in self._tunnels if tag in self.accounts]
        some = {tag: {**self.accounts[tag], **kept_out[tag]} if tag in kept_out else self.accounts[tag] for tag in tags}
        run = XrayRun(
            process=left(self._process),
            socket=self._endpoint.socket,
            token=self._endpoint.token,
            direct=self._endpoint.direct,
            accounts={tag: Packed(by_key=accounts) for tag, accounts in some.items()},
            files=self._files.packed,
            nesting=self._bars.nesting,
            aliased=self._aliases.tags,
        )
        self._connections.leave(run)
        return run.SerializeToString()

    async def take_stock(self) -> None:
        """Read users and connections from a core about which little is known. Raises `CoreFailed`."""
        with asking(USERS):
            await self._users.take_stock()
            await self._connections.take_stock(await self._online())

    async def wind_down(self) -> None:
        if not await self.quieten():
            async with self._listeners:
                await self._remove_inbounds()
        await self._connections.close_all(self.plan.ports)

    async def _remove_inbounds(self) -> None:
        for handler in self.plan.base.inbound:
            try:
                await self._api.remove_inbound(handler.tag)
            except ApiFailed as error:
                text = "inbound {tag!r} of a core that stops could not be closed; it still accepts connections: {fault}"
                self.log.warn(text, tag=handler.tag, fault=error)

    async def stop(self) -> None:
        self._connections.stop()
        await super().stop()


def own_counters(endpoint: ApiAddress, outbounds: Collection[OutboundHandlerConfig] = ()) -> tuple[str, ...]:
    """The counters of the node's own API inbound and outbound, and of outbounds that the node named.

    Also of those that a node with other settings would have added, which may have started the core.
    """
    added = [*abuse.outbounds(len(outbounds)), BARE, BLACKHOLE]
    tags = dict.fromkeys([*added, *(outbound.tag for outbound in outbounds if outbound.tag.startswith(OURS))])
    ours = [(Scope.INBOUND, endpoint.inbound), (Scope.OUTBOUND, endpoint.outbound)]
    ours += [(Scope.OUTBOUND, tag) for tag in tags]
    return tuple(counter_name(scope, name, direction) for scope, name in ours for direction in DIRECTIONS)


def latencies(statuses: Iterable[OutboundStatus]) -> list[Latency]:
    """Convert the core's figures (ms); some observatories give an outbound that does not answer a delay of 99999999."""
    return [
        Latency(
            name=status.outbound_tag,
            alive=status.alive,
            # 0 means no answer, so less than a millisecond counts as one.
            delay=max(status.delay, int(status.alive)),
            link=status.outbound_tag,
            last_seen_time=status.last_seen_time,
            last_try_time=status.last_try_time,
            # The source that deployed controllers expect.
            source="xray-observatory",
        )
        for status in statuses
        if not status.outbound_tag.startswith(OURS)
    ]
