"""Convert route tests between the interface and the core's API. Pure."""

from __future__ import annotations

from ipaddress import ip_address

from drivers.xray.selectors import OURS
from node.base.errors import InvalidRequest, shown
from protos import xray_pb2
from protos.service_pb2 import RouteResult, TestRouteRequest

# common/net/network.proto
_NETWORKS = {"": 0, "tcp": 2, "udp": 3, "unix": 4}
_NAMES = {2: "tcp", 3: "udp", 4: "unix"}
_MOST_PORTS = 65535


def asked(request: TestRouteRequest) -> xray_pb2.TestRouteRequest:
    """The core's request. Raises `InvalidRequest` for invalid networks, ports and addresses."""
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


def answered(reply: xray_pb2.RoutingContext) -> RouteResult:
    return RouteResult(
        outbound_tag=_shown(reply.outbound_tag),
        outbound_group_tags=reply.outbound_group_tags,
        inbound_tag=reply.inbound_tag,
        network=_NAMES.get(reply.network, "unknown"),
        target_domain=reply.target_domain,
    )


def by_default(context: xray_pb2.RoutingContext, first: str) -> RouteResult:
    """The result where no rule matches: the first outbound."""
    return RouteResult(
        outbound_tag=_shown(first),
        inbound_tag=context.inbound_tag,
        network=_NAMES.get(context.network, "unknown"),
        target_domain=context.target_domain,
    )


def _packed(address: str) -> list[bytes]:
    try:
        return [ip_address(address).packed] if address else []
    except ValueError as error:
        raise InvalidRequest(f"{shown(address)} is not an IP address") from error


def _shown(outbound: str) -> str:
    """An outbound's tag; empty if the node chose it."""
    return "" if outbound.startswith(OURS) else outbound
