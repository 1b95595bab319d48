"""Change and query the routing of one run of Xray through its API."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from ipaddress import ip_address

from google.protobuf.message import Message
from twisted.internet.defer import DeferredLock

from drivers.process.channel import ApiFailed, Channel
from drivers.xray.messages import OURS, ROUTER, M
from drivers.xray.rules import is_own, steps
from node.base.errors import InvalidRequest, shown
from protos import xray_pb2
from protos.service_pb2 import RouteResult, TestRouteRequest
from protos.xray_pb2 import Nothing, RoutingContext, RoutingRule, TypedMessage

_SERVICE = "/xray.app.router.command.RoutingService/"
# The core's error where no rule matches.
_NO_RULE = "not enough information for making a decision"
# common/net/network.proto
_NETWORKS = {"": 0, "tcp": 2, "udp": 3, "unix": 4}
_NAMES = {2: "tcp", 3: "udp", 4: "unix"}
_MOST_PORTS = 65535


class Router:
    """The rules that the core confirmed. It never replaces all at once: meanwhile there would be none."""

    def __init__(self, channel: Channel, rules: Iterable[RoutingRule]) -> None:
        self._channel = channel
        self._tags = [rule.rule_tag for rule in rules]
        self._targets: dict[str, str] = {}
        # Rules and balancers with an unanswered change: the core may have applied it, or still may.
        self._doubtful: set[str] = set()
        self._unsure: set[str] = set()
        self._lock = DeferredLock()

    async def become(self, rules: Sequence[RoutingRule], targets: Mapping[str, str]) -> None:
        """Apply these rules and balancer targets. Raises `ApiFailed`; changes made until then stay."""
        async with self._lock:
            for tag in self._doubtful.difference(self._tags):
                await self._remove(tag)
            todo = steps(self._tags, rules)
            for rule in todo.appended:
                await self._append(rule)
            for tag in todo.removed:
                self._tags.remove(tag)
                await self._remove(tag)
            await self._lead(targets)

    async def rules(self) -> list[xray_pb2.ListedRule]:
        """The core's rules without the node's own. Raises `ApiFailed`."""
        reply = await self._call("ListRule", Nothing(), xray_pb2.ListRuleResponse)
        return [rule for rule in reply.rules if not is_own(rule.rule_tag)]

    async def balancer(self, tag: str) -> xray_pb2.BalancerMsg:
        """Raises `ApiFailed`."""
        request = xray_pb2.GetBalancerInfoRequest(tag=tag)
        return (await self._call("GetBalancerInfo", request, xray_pb2.GetBalancerInfoResponse)).balancer

    async def test(self, request: xray_pb2.TestRouteRequest) -> RoutingContext | None:
        """The route of a connection; None if no rule matches. Raises `ApiFailed`."""
        try:
            return await self._call("TestRoute", request, RoutingContext)
        except ApiFailed as error:
            if _NO_RULE in str(error):
                return None
            raise

    async def _append(self, rule: RoutingRule) -> None:
        value = xray_pb2.RouterConfig(rule=[rule]).SerializeToString()
        request = xray_pb2.AddRuleRequest(config=TypedMessage(type=ROUTER, value=value), should_append=True)
        await self._change("AddRule", request, self._doubtful, rule.rule_tag)
        self._tags.append(rule.rule_tag)

    async def _remove(self, tag: str) -> None:
        """Remove a rule; the core accepts an unknown tag."""
        await self._change("RemoveRule", xray_pb2.RemoveRuleRequest(rule_tag=tag), self._doubtful, tag)

    async def _lead(self, targets: Mapping[str, str]) -> None:
        for balancer in {**self._targets, **dict.fromkeys(self._unsure, ""), **targets}:
            target = targets.get(balancer, "")
            if target != self._targets.get(balancer, "") or balancer in self._unsure:
                request = xray_pb2.OverrideBalancerTargetRequest(balancer_tag=balancer, target=target)
                await self._change("OverrideBalancerTarget", request, self._unsure, balancer)
                self._targets[balancer] = target

    async def _change(self, name: str, request: Message, in_doubt: set[str], what: str) -> None:
        """Call the core; without an answer the item stays in doubt, as the core may still apply the change later."""
        known = what not in in_doubt
        in_doubt.add(what)
        try:
            await self._call(name, request, Nothing)
        except ApiFailed as error:
            if known and not error.silent:
                in_doubt.remove(what)
            raise
        if known:
            in_doubt.remove(what)

    async def _call(self, name: str, request: Message, reply: type[M]) -> M:
        return await self._channel.call(_SERVICE + name, request, reply)


def asked_route(request: TestRouteRequest) -> xray_pb2.TestRouteRequest:
    """The core's request for a route test. Raises `InvalidRequest` for invalid networks, ports and addresses."""
    network = _NETWORKS.get(request.network.lower())
    if network is None:
        raise InvalidRequest(f"unknown network {shown(request.network)}: use tcp, udp or unix")
    if request.target_port > _MOST_PORTS:
        raise InvalidRequest(f"port {request.target_port} is out of range: at most {_MOST_PORTS}")
    context = xray_pb2.RoutingContext(
        inbound_tag=request.inbound_tag,
        network=network,
        target_ips=_packed(request.target_ip),
        target_port=request.target_port,
        target_domain=request.target_domain,
        protocol=request.protocol,
        user=request.user,
        attributes=request.attributes,
    )
    return xray_pb2.TestRouteRequest(
        routing_context=context, field_selectors=request.field_selectors, publish_result=request.publish_result
    )


def route_of(context: RoutingContext, outbound: str) -> RouteResult:
    """The result of a route test; the tag of an outbound that the node named is left out."""
    return RouteResult(
        outbound_tag="" if outbound.startswith(OURS) else outbound,
        outbound_group_tags=context.outbound_group_tags,
        inbound_tag=context.inbound_tag,
        network=_NAMES.get(context.network, "unknown"),
        target_domain=context.target_domain,
    )


def _packed(address: str) -> list[bytes]:
    try:
        return [ip_address(address).packed] if address else []
    except ValueError as error:
        raise InvalidRequest(f"{shown(address)} is not an IP address") from error
