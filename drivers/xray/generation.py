"""A generation: one run of Xray, with its process, its API and the users that it confirmed."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from twisted.internet.defer import DeferredLock

from drivers.channel import COUNTERS, FIGURES, LATENCY, ONLINE, ROUTING, USERS, ApiFailed, asking
from drivers.process.child import CoreProcess
from drivers.process.executable import Files
from drivers.process.kept import left
from drivers.process.paced import Paced, PacedRun
from drivers.process.shared import SharedRun
from drivers.sockets.connections import endpoint
from drivers.sockets.sharing import Sharing
from drivers.xray import route, rules, wireguard
from drivers.xray.accounts import email_of
from drivers.xray.api import Api
from drivers.xray.compat import UntrustedProxy
from drivers.xray.config import Endpoint, Plan
from drivers.xray.connections import Connections
from drivers.xray.handshakes import Busy, Handshakes
from drivers.xray.ingress import unseen
from drivers.xray.latency import NOT_MEASURED, latencies
from drivers.xray.ownership.unlogged import by_address
from drivers.xray.selectors import OURS
from drivers.xray.users import Users
from node.base.errors import CoreFailed, InvalidConfig, UnknownName, Unsupported, shown
from node.base.waiting import together
from node.contract.accounts import Accounts, Change, key_of
from node.contract.connections import Address, Arrived, Live
from node.contract.counters import DIRECTIONS, Reading, Scope, counter_name
from node.contract.driver import Applied, Host
from node.contract.driver import Plan as AnyPlan
from protos.handover_pb2 import Accounts as Packed
from protos.handover_pb2 import XrayRun
from protos.service_pb2 import (
    BackendStatsResponse,
    BalancerInfoResponse,
    Latency,
    RouteResult,
    RoutingRule,
    TestRouteRequest,
)
from protos.xray_pb2 import OutboundHandlerConfig

_NOT_LISTED = "this core cannot list its rules; Xray 26.1.23 and later can"
_NOT_TOLD = "this core cannot list the addresses of users; Xray 25.3.6 and later can"

# Users whose addresses are requested in parallel.
SLICE = 64


class XrayGeneration(SharedRun[Api], PacedRun):
    """Satisfies `Generation`, `Shares`, `CountsOnline`, `MeasuresLatency`, `Routes` and `Paces`."""

    def __init__(
        self,
        host: Host,
        sharing: Sharing,
        plan: Plan,
        process: CoreProcess,
        api: Api,
        endpoint: Endpoint,
        connections: Connections,
        started: dict[str, Accounts],
        files: Files,
        untrusted_proxy: UntrustedProxy,
    ) -> None:
        super().__init__(host, process, api, sharing=sharing, listening=plan, own_paths=[endpoint.socket])
        self.plan = plan
        self.unseen: Mapping[str, str] = unseen(plan.inbounds, plan.ingress)
        # Inbounds where connections may have no owner, since they cannot be attributed or carry several users.
        self._unsure = self.unseen.keys() | {tag for tag, entry in plan.ingress.items() if entry.shared}
        self._endpoint = endpoint
        self._own = own_counters(endpoint, plan.base.outbound)
        self._files = files
        self._untrusted_proxy = untrusted_proxy
        self._connections = connections
        self.accounts = started
        self._router = api.router(rules.rules_of(plan.base))
        self._handshakes = Handshakes(host.reactor, plan.pausable)
        self._handshakes.begin(process.pid or 0, connections.knows)
        self._users = Users(host, plan, api, connections, self._handshakes, started, self)
        # Held while inbounds are swapped, which closes listeners, or while listeners are shared with another core.
        self._listeners = DeferredLock()
        connections.begin(process.pid, self._users.is_in, self._online)
        self._paced = Paced(
            *(host.reactor, connections.descriptors),
            ports={tag: entry.ports for tag, entry in plan.ingress.items() if entry.ports},
            shared={tag for tag, entry in plan.ingress.items() if entry.shared or entry.forwards},
            inodes=connections.inodes,
        )
        process.when_exited().addCallback(lambda _: connections.stop())

    @property
    def uncounted(self) -> frozenset[Scope]:
        return self.plan.uncounted

    @property
    def cut(self) -> int:
        return self._connections.cut

    @property
    def arrived(self) -> Arrived:
        return self._connections.arrived

    @arrived.setter
    def arrived(self, arrived: Arrived) -> None:
        self._connections.arrived = arrived

    def may_carry(self, key: str) -> bool:
        return self._connections.has(key) or any(key in self.accounts.get(tag, ()) for tag in self._unsure)

    async def look(self, keys: Collection[str]) -> list[Live]:
        try:
            return await self._connections.look(keys)
        except OSError as error:
            raise CoreFailed(f"the kernel does not list connections: {error}") from error

    async def end(self, connections: Iterable[Live]) -> int:
        return await self._connections.reset(live.handle for live in connections)

    @property
    def outdated(self) -> bool:
        return bool(self._files.warnings)

    @property
    def warnings(self) -> Sequence[str]:
        crowded = wireguard.crowded(self.accounts, self._tunnels)
        return [*self._files.warnings, *self._untrusted_proxy.warnings, *crowded]

    @property
    def _tunnels(self) -> list[str]:
        return [tag for tag, inbound in self.plan.inbounds.items() if inbound.protocol == "wireguard"]

    async def counters(self) -> Reading:
        with asking(COUNTERS):
            counters = await self._api.counters()
        for name in self._own:
            counters.pop(name, None)
        return counters

    async def some_counters(self, names: Iterable[tuple[Scope, str]]) -> Reading:
        """Read these counters; all, if a user was removed: only the core knows how it spells their name."""
        wanted = set[str]()
        for scope, name in names:
            spellings = self._counted_as(scope, name)
            if not spellings:
                return await self.counters()
            wanted |= {counter_name(scope, spelling, way) for spelling in spellings for way in DIRECTIONS}
        with asking(COUNTERS):
            return await self._api.some_counters(wanted.difference(self._own))

    async def online(self, key: str) -> Mapping[str, int]:
        with asking(ONLINE, _NOT_TOLD):
            for email in self._spellings(key):
                return await self._api.online_ips(email)
        return {}

    async def _online(self) -> Mapping[Address, Collection[str]]:
        """The keys of the users online, by address. Raises `ApiFailed`."""
        emails = await self._api.all_online()
        found: list[tuple[Address, str]] = []
        for begin in range(0, len(emails), SLICE):
            part = emails[begin : begin + SLICE]
            for email, addresses in zip(part, await together(map(self._api.online_ips, part)), strict=True):
                found += [(endpoint(address, 0)[:-2], key_of(email)) for address in addresses]
        return by_address(found)

    async def online_count(self, key: str) -> int:
        with asking(ONLINE, _NOT_TOLD):
            for email in self._spellings(key):
                return await self._api.online_count(email)
        return 0

    async def backend_stats(self) -> BackendStatsResponse:
        with asking(FIGURES):
            figures = await self._api.sys_stats()
        return BackendStatsResponse.FromString(figures.SerializeToString())

    async def latency(self) -> Sequence[Latency]:
        if not self.plan.measures:
            raise Unsupported(NOT_MEASURED)
        with asking(LATENCY):
            return latencies(await self._api.outbounds())

    async def reroute(self, plan: AnyPlan) -> None:
        made = getattr(plan, "made", None)
        assert isinstance(made, Plan)
        wanted, targets = rules.rules_of(made.base), made.routing.targets
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
        asked = route.asked(request)
        with asking(ROUTING):
            reply = await self._router.test(asked)
        if reply is None:
            return route.by_default(asked.routing_context, self.plan.base.outbound[0].tag)
        return route.answered(reply)

    async def audit(self) -> int:
        with asking(USERS):
            return await self._users.audit()

    async def apply(self, changes: Sequence[Change]) -> Applied:
        async with self._listeners:
            try:
                return await self._users.apply(changes)
            finally:
                # A swapped inbound has a new listener.
                await self.keep_closed()
                await self._paced.listeners_changed()

    async def join(self) -> None:
        async with self._listeners:
            await super().join()

    async def leave(self) -> None:
        await self._connections.flush()
        self._process.leave()

    counts_in_node = False

    def packed(self, exact: bool) -> bytes:
        """Without `exact` the core will list its users, but for those of WireGuard, whose list lacks their e-mails."""
        some = self.accounts if exact else {tag: self.accounts[tag] for tag in self._tunnels if tag in self.accounts}
        run = XrayRun(
            process=left(self._process),
            socket=self._endpoint.socket,
            token=self._endpoint.token,
            direct=self._endpoint.direct,
            accounts={tag: Packed(by_key=accounts) for tag, accounts in some.items()},
            files=self._files.packed,
        )
        self._connections.leave(run)
        return run.SerializeToString()

    async def take_stock(self) -> None:
        """Read users and connections from a core about which little is known. Raises `CoreFailed`."""
        try:
            await self._handshakes.resume()
        except Busy as error:
            text = "Shadowsocks-2022 inbounds may drop new connections, as the previous node left them: {fault}"
            self.log.warn(text, fault=error)
        with asking(USERS):
            await self._users.take_stock()
            await self._connections.take_stock(await self._online())

    def stay(self) -> None:
        self._process.stay()

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

    def _counted_as(self, scope: Scope, name: str) -> list[str]:
        return self._spellings(key_of(name)) if scope is Scope.USER else [name]

    def _spellings(self, key: str) -> list[str]:
        found = (accounts[key] for accounts in self.accounts.values() if key in accounts)
        return list(dict.fromkeys(map(email_of, found)))


def own_counters(endpoint: Endpoint, outbounds: Iterable[OutboundHandlerConfig] = ()) -> tuple[str, ...]:
    """The counters of the node's own API inbound and outbound, and of outbounds that the node named."""
    ours = [(Scope.INBOUND, endpoint.inbound), (Scope.OUTBOUND, endpoint.outbound)]
    ours += [(Scope.OUTBOUND, outbound.tag) for outbound in outbounds if outbound.tag.startswith(OURS)]
    return tuple(counter_name(scope, name, direction) for scope, name in ours for direction in DIRECTIONS)
