"""Xray's gRPC API over its unix socket.

The core trusts the callers of its API: only this module builds requests, and only from accounts that were built for
the inbound they go to.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from ipaddress import ip_address
from typing import NamedTuple

from google.protobuf.message import Message
from twisted.internet.defer import DeferredLock

from drivers.process.aliases import PLAIN, Aliases, unaliased
from drivers.process.channel import BULK_DEADLINE, ApiFailed, Call, Channel, StatsApi
from drivers.sockets.sock_diag import endpoint
from drivers.xray.accounts import named
from drivers.xray.messages import OURS, ROUTER, M, field
from drivers.xray.rules import is_own, other_tag, recalled, steps
from node.base.errors import InvalidRequest, shown
from node.base.reactor import Reactor
from node.contract.accounts import key_of
from node.contract.connections import Address
from protos import xray_pb2
from protos.service_pb2 import RouteResult, TestRouteRequest
from protos.xray_pb2 import Nothing, RoutingContext, RoutingRule, TypedMessage

HANDLER = "/xray.app.proxyman.command.HandlerService/"
STATS = "/xray.app.stats.command.StatsService/"
ROUTING = "/xray.app.router.command.RoutingService/"
OBSERVATORY = "/xray.core.app.observatory.command.ObservatoryService/"
# Calls in flight; more gain nothing (measured).
IN_FLIGHT = 64

# The two AlterInbound operations, as types of a TypedMessage.
_ADD = field(b"\x0a", b"xray.app.proxyman.command.AddUserOperation")
_REMOVE = field(b"\x0a", b"xray.app.proxyman.command.RemoveUserOperation")
# The core's error where no rule matches, and for an unknown inbound.
_UNDECIDED = "not enough information for making a decision"
# common/net/network.proto
_NETWORKS = {"": 0, "tcp": 2, "udp": 3, "unix": 4}
_NAMES = {2: "tcp", 3: "udp", 4: "unix"}
_MOST_PORTS = 65535
# The most rules in one call, and their bytes if there are several; the core takes requests of up to 4 MiB.
_BATCH, _BATCH_BYTES = 200, 1024**2


class Operation(NamedTuple):
    """One AlterInbound call: `packed` is a serialised protocol.User to add, or None to remove `email`."""

    tag: str
    email: str
    packed: bytes | None


class Api(StatsApi):
    """`aliases`: the core's names for users, which callers need only for `online_ips`, `online_count` and counters."""

    def __init__(self, reactor: Reactor, socket: str, aliases: Aliases = PLAIN) -> None:
        super().__init__(reactor, Channel(reactor, socket), STATS)
        self.aliases = aliases

    def router(self, rules: Iterable[xray_pb2.RoutingRule]) -> Router:
        """The routing API of a core that was started with these rules."""
        return Router(self._channel, rules, self.aliases)

    async def ready(self, seconds: float) -> bool:
        """Whether the core answers within so many seconds. Once it does, all inbounds are bound."""
        try:
            await self.figures(seconds)
        except ApiFailed:
            return False
        return True

    async def online_ips(self, email: str) -> dict[str, int]:
        """A user's addresses and when each was last seen (Unix seconds); empty for a user who is offline or unknown."""
        request = xray_pb2.GetStatsRequest(name=f"user>>>{email}>>>online")
        reply = await self._known("GetStatsOnlineIpList", request, xray_pb2.GetStatsOnlineIpListResponse)
        return {} if reply is None else dict(reply.ips)

    async def all_online(self) -> dict[str, str]:
        """The keys of all users online, by the core's names for them. Raises `ApiFailed`."""
        path, request = STATS + "GetAllOnlineUsers", xray_pb2.Nothing()
        reply = await self._channel.call(path, request, xray_pb2.GetAllOnlineUsersResponse, BULK_DEADLINE)
        names = [name.removeprefix("user>>>").removesuffix(">>>online") for name in reply.users]
        return {name: key_of(unaliased(name)) for name in names}

    async def online_count(self, email: str) -> int:
        """From how many addresses a user is connected; also for cores that cannot list them (before 25.3.6)."""
        request = xray_pb2.GetStatsRequest(name=f"user>>>{email}>>>online")
        reply = await self._known("GetStatsOnline", request, xray_pb2.GetStatsResponse)
        return 0 if reply is None else int(reply.stat.value)

    async def outbounds(self) -> list[xray_pb2.OutboundStatus]:
        """The observatory's measurements so far. Raises `ApiFailed`."""
        path, request = OBSERVATORY + "GetOutboundStatus", xray_pb2.Nothing()
        return list((await self._channel.call(path, request, xray_pb2.GetOutboundStatusResponse)).status.status)

    async def count_users(self, tag: str) -> int:
        path, request = HANDLER + "GetInboundUsersCount", xray_pb2.GetInboundUserRequest(tag=tag)
        return (await self._channel.call(path, request, xray_pb2.GetInboundUsersCountResponse)).count

    async def list_users(self, tag: str) -> list[xray_pb2.User]:
        path, request = HANDLER + "GetInboundUsers", xray_pb2.GetInboundUserRequest(tag=tag)
        users = (await self._channel.call(path, request, xray_pb2.GetInboundUserResponse, BULK_DEADLINE)).users
        for user in users if self.aliases else ():
            user.email = unaliased(user.email)
        return list(users)

    async def alter(self, operations: Sequence[Operation], in_flight: int = IN_FLIGHT) -> list[str | None]:
        """Run operations, `in_flight` in parallel. Returns for each None, or the reason of its failure.

        Adding a user who is there replaces them, removing an absent one succeeds. After a call without an answer the
        rest are not tried: thousands of timeouts would take hours.
        """
        results: list[str | None] = [None] * len(operations)
        # Places and calls, oldest first: a coroutine for each call would cost more than the call.
        under_way: deque[tuple[int, Call]] = deque()
        silence = ""

        async def finish() -> None:
            nonlocal silence
            place, call = under_way.popleft()
            try:
                results[place] = await self._altered(operations[place], call)
            except ApiFailed as error:
                results[place] = silence = str(error)

        try:
            for place, operation in enumerate(operations):
                if len(under_way) == in_flight:
                    await finish()
                try:
                    if not silence:
                        under_way.append((place, await self._begin(operation)))
                except ApiFailed as error:
                    silence = str(error)
                results[place] = silence or None
            self._channel.flush()
            while under_way:
                await finish()
        finally:
            for _, call in under_way:
                self._channel.give_up(call)
        return results

    async def add_inbound(self, handler: xray_pb2.InboundHandlerConfig) -> None:
        """Raises `ApiFailed`."""
        add = xray_pb2.AddInboundRequest(inbound=handler)
        await self._channel.call(HANDLER + "AddInbound", add, xray_pb2.Nothing, BULK_DEADLINE)

    async def remove_inbound(self, tag: str) -> None:
        """Remove an inbound, if it is there: it stops accepting connections. Raises `ApiFailed`."""
        remove = xray_pb2.RemoveInboundRequest(tag=tag)
        try:
            await self._channel.call(HANDLER + "RemoveInbound", remove, xray_pb2.Nothing, BULK_DEADLINE)
        except ApiFailed as error:
            if _UNDECIDED not in str(error):
                raise

    async def _altered(self, operation: Operation, call: Call) -> str | None:
        """Finish one operation. Returns None, or why the core refused it. Raises `ApiFailed` if it did not answer."""
        fault = await self._fault(call)
        if fault is not None and operation.packed is None and fault.endswith("not found."):
            return None
        if fault is not None and operation.packed is not None and fault.endswith("already exists."):
            # Replace a user of the same e-mail whom the core has and the node did not know of.
            removal = await self._begin(operation._replace(packed=None))
            return await self._fault(removal) or await self._fault(await self._begin(operation))
        return fault

    async def _begin(self, operation: Operation) -> Call:
        request = _request(operation, self.aliases.end(operation.tag))
        return await self._channel.begin(HANDLER + "AlterInbound", request)

    async def _fault(self, call: Call) -> str | None:
        try:
            await self._channel.result(call, xray_pb2.Nothing)
        except ApiFailed as error:
            if error.silent:
                raise
            return unaliased(str(error))
        return None


def _request(operation: Operation, end: str = "") -> bytes:
    if operation.packed is None:
        kind, value = _REMOVE, (operation.email + end).encode()
    else:
        kind, value = _ADD, named(operation.packed, end)
    return field(b"\x0a", operation.tag.encode()) + field(b"\x12", kind + field(b"\x12", field(b"\x0a", value)))


class Router:
    """The rules that the core confirmed. It never replaces all at once: meanwhile there would be none."""

    def __init__(self, channel: Channel, rules: Iterable[RoutingRule], aliases: Aliases = PLAIN) -> None:
        self._channel = channel
        self._aliases = aliases
        self._rules = {rule.rule_tag: rule for rule in rules}
        # By the tag of each rule, that under which the core has it.
        self._tags = {tag: tag for tag in self._rules}
        self._targets: dict[str, str] = {}
        # Rules and balancers with an unanswered change: the core may have applied it, or still may.
        self._doubtful: set[str] = set()
        self._unsure: set[str] = set()
        self._lock = DeferredLock()

    async def become(self, rules: Sequence[RoutingRule], targets: Mapping[str, str]) -> None:
        """Apply these rules and balancer targets. Raises `ApiFailed`; changes made until then stay."""
        async with self._lock:
            for tag in self._doubtful.difference(self._tags.values()):
                await self._remove(tag)
            todo = steps([*self._tags], rules)
            for rule in todo.appended:
                await self._append([rule], self._doubtful)
                self._rules[rule.rule_tag], self._tags[rule.rule_tag] = rule, rule.rule_tag
            for tag in todo.removed:
                del self._rules[tag]
                await self._remove(self._tags.pop(tag))
            await self._lead(targets)

    async def go_on(self) -> list[str]:
        """Find out under which tags the core has the rules. Returns all tags that it has. Raises `ApiFailed`."""
        async with self._lock:
            return (await self._recall())[0]

    async def bar(self, bars: Sequence[RoutingRule], is_bar: Callable[[str], bool]) -> None:
        """Have these rules before the others, and no further ones that are of their kind. Raises `ApiFailed`.

        The core only appends rules. So the others follow them, and are removed where they were.
        """
        async with self._lock:
            listed, left = await self._recall()
            before = {*filter(is_bar, listed)}
            fresh = [rule for rule in bars if rule.rule_tag not in before]
            for tag in reversed(left):
                await self._remove(tag)
            others = [listed.index(there) for there in self._tags.values()]
            if fresh or any(listed.index(tag) > min(others, default=len(listed)) for tag in before):
                await self._put_first(fresh)
            for tag in before.difference(rule.rule_tag for rule in bars):
                await self._remove(tag, set())

    async def _recall(self) -> tuple[list[str], list[str]]:
        """Returns the tags of all rules of the core, and those of second copies, to remove."""
        listed = [rule.rule_tag for rule in (await self._call("ListRule", Nothing(), xray_pb2.ListRuleResponse)).rules]
        self._tags, left = recalled(self._tags, listed)
        return listed, left

    async def _put_first(self, fresh: Sequence[RoutingRule]) -> None:
        former = self._tags
        tags = {tag: other_tag(there) for tag, there in former.items()}
        # In doubt until all is done: `become` removes those that are not in `_tags`.
        sure = {*former.values(), *tags.values()} - self._doubtful
        self._doubtful |= sure
        # Of each rule's users the core gets all names.
        times = 1 + len(self._aliases.tags)
        for rules in _batches(fresh, times):
            await self._append(rules, set())
        for rules in _batches((_copied(self._rules[tag], there) for tag, there in tags.items()), times):
            await self._append(rules, self._doubtful)
        self._tags = tags
        for there in reversed(former.values()):
            await self._remove(there)
        self._doubtful -= sure

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
            if _UNDECIDED in str(error):
                return None
            raise

    async def _append(self, rules: Sequence[RoutingRule], in_doubt: set[str]) -> None:
        if self._aliases:
            rules = [_copied(rule, rule.rule_tag, self._aliases) for rule in rules]
        value = xray_pb2.RouterConfig(rule=rules).SerializeToString()
        request = xray_pb2.AddRuleRequest(config=TypedMessage(type=ROUTER, value=value), should_append=True)
        await self._change("AddRule", request, in_doubt, *(rule.rule_tag for rule in rules))

    async def _remove(self, tag: str, in_doubt: set[str] | None = None) -> None:
        """Remove a rule; the core accepts an unknown tag."""
        in_doubt = self._doubtful if in_doubt is None else in_doubt
        await self._change("RemoveRule", xray_pb2.RemoveRuleRequest(rule_tag=tag), in_doubt, tag)

    async def _lead(self, targets: Mapping[str, str]) -> None:
        for balancer in {**self._targets, **dict.fromkeys(self._unsure, ""), **targets}:
            target = targets.get(balancer, "")
            if target != self._targets.get(balancer, "") or balancer in self._unsure:
                request = xray_pb2.OverrideBalancerTargetRequest(balancer_tag=balancer, target=target)
                await self._change("OverrideBalancerTarget", request, self._unsure, balancer)
                self._targets[balancer] = target

    async def _change(self, name: str, request: Message, in_doubt: set[str], *what: str) -> None:
        """Call the core; without an answer the items stay in doubt, as the core may still apply the change later."""
        known = {*what} - in_doubt
        in_doubt |= known
        try:
            await self._call(name, request, Nothing)
        except ApiFailed as error:
            if not error.silent:
                in_doubt -= known
            raise
        in_doubt -= known

    async def _call(self, name: str, request: Message, reply: type[M]) -> M:
        return await self._channel.call(ROUTING + name, request, reply)


def _batches(rules: Iterable[RoutingRule], times: int) -> Iterator[list[RoutingRule]]:
    batch, size = list[RoutingRule](), 0
    for rule in rules:
        size += rule.ByteSize() * times
        if batch and (size > _BATCH_BYTES or len(batch) == _BATCH):
            yield batch
            batch, size = [], rule.ByteSize() * times
        batch.append(rule)
    if batch:
        yield batch


def _copied(rule: RoutingRule, tag: str, aliases: Aliases = PLAIN) -> RoutingRule:
    copy = RoutingRule()
    copy.CopyFrom(rule)
    copy.rule_tag = tag
    copy.user_email[:] = aliases.fitting(copy.user_email)
    return copy


def addresses_in(listed: Iterable[str]) -> set[Address]:
    """The addresses of users that the core lists; it has another text for one who comes by a unix socket."""
    found = set()
    for text in listed:
        with suppress(OSError):
            found.add(endpoint(text, 0)[:-2])
    return found


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
