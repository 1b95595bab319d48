"""METHODS: the one table of all operations of the interface. Both REST and gRPC are made from it.

Message types come from the descriptor of `protos/service.proto`, so that a row cannot disagree with the contract.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum

from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from node.api.framing import delimited, single
from node.keys.keyfile import Scope
from protos import service_pb2

SERVICE = service_pb2.DESCRIPTOR.services_by_name["NodeService"]

# Bytes of one request, on both transports. Deployed controllers send and accept as much.
MAX_BODY = 64 * 1024 * 1024
# Users of one request, all chunks together: more than fit into `MAX_BODY` as panels send them.
MAX_USERS = 250_000


class Kind(Enum):
    """Which messages of a method are streams."""

    UNARY = "one request, one reply"
    LOGS = "one request, a stream of log lines"
    EVENTS = "one request, a stream of events"
    FEED = "a stream of requests, one reply"


@dataclass(frozen=True)
class Method:
    """One operation.

    `call` names the coroutine of `Backend` (for `Kind.FEED`, the method that opens a feed). `needs_backend`: it fails
    while no backend runs. `cut` splits the REST body of a feed. `scope` is the least that a key must have.
    """

    name: str
    call: str
    verbs: tuple[str, ...]
    path: str
    needs_backend: bool = False
    kind: Kind = Kind.UNARY
    cut: Callable[[bytes], Iterator[bytes]] = single
    scope: Scope = Scope.ALL

    @property
    def request(self) -> type[Message]:
        return GetMessageClass(SERVICE.methods_by_name[self.name].input_type)

    @property
    def response(self) -> type[Message]:
        return GetMessageClass(SERVICE.methods_by_name[self.name].output_type)


METHODS: tuple[Method, ...] = (
    Method("Start", "start", ("POST",), "/start"),
    Method("Stop", "stop", ("PUT",), "/stop"),
    Method("GetBaseInfo", "info", ("GET",), "/info", scope=Scope.READ),
    Method("GetLogs", "logs", ("GET",), "/logs", kind=Kind.LOGS, scope=Scope.READ),
    Method("GetSystemStats", "system_stats", ("GET",), "/stats/system", scope=Scope.METRICS),
    Method("GetBackendStats", "backend_stats", ("GET",), "/stats/backend", needs_backend=True, scope=Scope.METRICS),
    Method("GetStats", "stats", ("GET",), "/stats", scope=Scope.READ),
    Method("GetUserOnlineStats", "online", ("GET",), "/stats/user/online", needs_backend=True, scope=Scope.READ),
    Method(
        "GetUserOnlineIpListStats",
        "online_ips",
        ("GET",),
        "/stats/user/online_ip",
        needs_backend=True,
        scope=Scope.READ,
    ),
    Method("GetOutboundsLatency", "latency", ("GET",), "/stats/latency", needs_backend=True, scope=Scope.METRICS),
    Method("GetBill", "bill", ("GET",), "/stats/bill", scope=Scope.METRICS),
    Method("SyncUser", "sync_user", ("PUT",), "/user/sync", needs_backend=True, kind=Kind.FEED),
    # POST, too: the older of the deployed clients sends it.
    Method("SyncUsers", "sync_users", ("PUT", "POST"), "/users/sync", needs_backend=True),
    Method(
        "SyncUsersChunked",
        "sync_chunked",
        ("PUT",),
        "/users/sync/chunked",
        needs_backend=True,
        kind=Kind.FEED,
        cut=delimited,
    ),
    Method("ListUsers", "list_users", ("GET",), "/users", scope=Scope.READ),
    Method("SetLimits", "set_limits", ("PUT",), "/users/limits"),
    Method("GetLimits", "get_limits", ("GET",), "/users/limits", scope=Scope.READ),
    Method("DropConnections", "drop_connections", ("PUT",), "/users/drop", needs_backend=True),
    Method("ListOnline", "list_online", ("GET",), "/users/online", needs_backend=True, scope=Scope.READ),
    Method("ListRoutingRules", "routing_rules", ("GET",), "/routing/rules", needs_backend=True, scope=Scope.READ),
    Method("GetBalancerInfo", "balancer_info", ("POST",), "/routing/balancer", needs_backend=True, scope=Scope.READ),
    Method("TestRoute", "test_route", ("POST",), "/routing/test", needs_backend=True, scope=Scope.READ),
    Method("AddRoutingRule", "add_routing_rule", ("PUT",), "/routing/rules", needs_backend=True),
    Method("RemoveRoutingRule", "remove_routing_rule", ("DELETE",), "/routing/rules", needs_backend=True),
    Method("OverrideBalancerTarget", "override_balancer", ("PUT",), "/routing/balancer/override", needs_backend=True),
    Method("StreamEvents", "events", ("GET",), "/events", kind=Kind.EVENTS, scope=Scope.READ),
    Method("UpdateCore", "update_core", ("PUT",), "/core/update"),
    Method("UpdateGeoFiles", "update_geo_files", ("PUT",), "/geo/update"),
    Method("UpdateNode", "update_node", ("PUT",), "/node/update"),
    Method("GetJob", "jobs", ("GET",), "/jobs", scope=Scope.READ),
)

_SCOPES = {(verb, method.path): method.scope for method in METHODS for verb in method.verbs}


def is_operation(path: str) -> bool:
    """Return whether a path of REST is in METHODS, with any verb."""
    return any(method.path == path.rstrip("/") for method in METHODS)


def scope_of(verb: str, path: str) -> Scope:
    """Return the scope that a REST request needs; for a path that is not in METHODS any key is enough."""
    return _SCOPES.get((verb, path.rstrip("/")), Scope.METRICS)
