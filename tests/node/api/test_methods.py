"""METHODS and the messages: the whole interface, with the field numbers of deployed controllers."""

from __future__ import annotations

import inspect

import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.descriptor_pb2 import DescriptorProto

from node.api.framing import delimited, single
from node.api.methods import MAX_BODY, METHODS, SERVICE, Kind, Method
from node.api.operations import Operations
from protos import service_pb2

# Fields and their numbers, types where they are not strings; "*" is repeated, "{}" a map to int64 or string.
MESSAGES = {
    "Empty": "",
    "BaseInfoResponse": "running=1:bool core_version=2 version=3 core_type=4 state=16 reason=17 warnings=18:*string"
    " limits=19:LimitsSummary traffic_interval=20:double notes=21:*string",
    "Backend": "type=1:BackendType config=2 users=3:*User keep_alive=4:uint64 exclude_inbounds=5:*string",
    "Log": "detail=1 id=16",
    "Stat": "name=1 type=2 link=3 value=4:int64",
    "StatResponse": "stats=1:*Stat",
    "StatRequest": "name=1 reset=2:bool type=3:StatType",
    "OnlineStatResponse": "name=1 value=2:int64",
    "StatsOnlineIpListResponse": "name=1 ips=2:{string,int64} forwarded=16:*string",
    "Latency": "name=1 alive=2:bool delay=3:int64 link=4 last_seen_time=5:int64 last_try_time=6:int64 source=7",
    "LatencyRequest": "name=1",
    "LatencyResponse": "latencies=1:*Latency",
    "BackendStatsResponse": (
        "num_goroutine=1:uint32 num_gc=2:uint32 alloc=3:uint64 total_alloc=4:uint64 sys=5:uint64 mallocs=6:uint64 "
        "frees=7:uint64 live_objects=8:uint64 pause_total_ns=9:uint64 uptime=10:uint32"
    ),
    "SystemStatsResponse": (
        "mem_total=1:uint64 mem_used=2:uint64 cpu_cores=3:uint64 cpu_usage=4:double incoming_bandwidth_speed=5:uint64 "
        "outgoing_bandwidth_speed=6:uint64 uptime=7:uint64"
    ),
    "Vmess": "id=1",
    "Vless": "id=1 flow=2",
    "Trojan": "password=1",
    "Shadowsocks": "password=1 method=2",
    "Wireguard": "public_key=1 peer_ips=2:*string",
    "Hysteria": "auth=1",
    "Masque": "pass=1",
    "Proxy": (
        "vmess=1:Vmess vless=2:Vless trojan=3:Trojan shadowsocks=4:Shadowsocks wireguard=5:Wireguard "
        "hysteria=6:Hysteria masque=7:Masque"
    ),
    "User": "email=1 proxies=2:Proxy inbounds=3:*string limits=16:Limits",
    "Limits": (
        "bytes=1:Quota expires_at=2:int64 expires_action=3:LimitAction addresses=4:uint32 "
        "addresses_action=5:LimitAction speed=6:Speed abuse_action=7:LimitAction"
    ),
    "Quota": (
        "bytes=1:uint64 way=2:Way since=3:int64 used=4:uint64 period=5:Period reset_day=6:uint32 action=7:LimitAction"
    ),
    "Speed": "down=1:uint64 up=2:uint64",
    "UserLimits": "name=1 limits=2:Limits",
    "SetLimitsRequest": "users=1:*UserLimits",
    "SetLimitsResponse": "notes=1:*Note",
    "GetLimitsRequest": "after=1 limit=2:uint32 names=3:*string off=4:bool",
    "LimitState": (
        "name=1 limits=2:Limits used_up=3:uint64 used_down=4:uint64 left=5:uint64 counted_since=6:double "
        "resets_at=7:int64 addresses=8:*string off_since=9:double off_for=10:*string notes=11:*string "
        "cut_until=12:int64 slow_until=13:int64 weighted_up=16:uint64 weighted_down=17:uint64"
    ),
    "GetLimitsResponse": "users=1:*LimitState next=2 total=3:uint64",
    "LimitsSummary": (
        "limited=1:uint64 off_quota=2:uint64 off_expired=3:uint64 near=4:uint64 too_many_addresses=5:uint64 "
        "node=6:NodeQuota off_abuse=7:uint64 abuse=8:{string,AbuseCount}"
    ),
    "AbuseCount": "requests=1:uint64 cases=2:uint64",
    "NodeQuota": "bytes=1:uint64 used=2:uint64 resets_at=3:int64 closed=4:bool",
    "BillRequest": "since=1",
    "BilledBytes": "received=1:uint64 sent=2:uint64",
    "Bill": (
        "since=1:int64 until=2:int64 timezone=3 users=4:BilledBytes inbounds=5:BilledBytes outbounds=6:BilledBytes "
        "interfaces=7:BilledBytes names=8:*string controllers=9:BilledBytes core=10:uint64 headers=11:uint64 "
        "others=12:uint64 missing=13:uint64 ratio=14:double least=15:double most=16:double transports=17:*string "
        "warnings=18:*string"
    ),
    "Users": "users=1:*User",
    "UsersChunk": "users=1:*User index=2:uint64 last=3:bool",
    "ListUsersRequest": "after=1 limit=2:uint32 names=3:*string credentials=4:bool traffic=5:bool",
    "ListedUser": (
        "name=1 inbounds=2:*string unknown=3:*string confirmed=4:*string leaving=5:*string pending=6:bool "
        "refused=7:*string proxies=8:Proxy shortened=9:bool limits=10:Limits traffic=11:*InboundBytes "
        "used_up=16:uint64 used_down=17:uint64 weighted_up=18:uint64 weighted_down=19:uint64"
    ),
    "InboundBytes": "tag=1 uplink=2:uint64 downlink=3:uint64",
    "ListUsersResponse": "users=1:*ListedUser next=2 total=3:uint64 revision=4:uint64 state=5 credentials=6:bool",
    "DropConnectionsRequest": "name=1 address=2 inbound=3",
    "DropConnectionsResponse": "ended=1:uint64 users=2:uint64 unsupported=3:{string,string}",
    "ListOnlineRequest": "after=1 limit=2:uint32",
    "ListOnlineResponse": "users=1:*StatsOnlineIpListResponse next=2 total=3:uint64 unsupported=4:{string,string}",
    "RoutingRule": "outbound_tag=1 rule_tag=2",
    "RoutingRulesResponse": "rules=1:*RoutingRule",
    "BalancerInfoRequest": "tag=1",
    "BalancerInfoResponse": "override_target=1 principle_target=2:*string",
    "TestRouteRequest": (
        "inbound_tag=1 network=2 target_ip=3 target_domain=4 target_port=5:uint32 protocol=6 user=7 "
        "attributes=8:{string,string} field_selectors=9:*string publish_result=10:bool"
    ),
    "RouteResult": "outbound_tag=1 outbound_group_tags=2:*string inbound_tag=3 network=4 target_domain=5",
    "AddRoutingRuleRequest": "rule=1 should_reset=2:bool",
    "RemoveRoutingRuleRequest": "rule_tag=1",
    "OverrideBalancerTargetRequest": "balancer_tag=1 target=2",
    "EventsRequest": "since=1:uint64 epoch=2 kinds=3:*string follow=4:bool",
    "Event": "sequence=1:uint64 epoch=2 time=3:double kind=4 severity=5 text=6 fields=7:{string,string}",
    "UpdateCoreRequest": "type=1:BackendType version=2 sha256=3 back=4:bool",
    "GeoFile": "name=1 sha256=2",
    "UpdateGeoFilesRequest": "files=1:*GeoFile back=2:bool",
    "UpdateNodeRequest": "version=1 sha256=2",
    "JobRequest": "id=1",
    "Jobs": "jobs=1:*Job",
    "Job": "id=1 kind=2 subject=3 state=4 text=5 fetched=6:uint64 total=7:uint64 began=8:double ended=9:double "
    "before=10 after=11",
}
ENUMS = {
    "BackendType": {"XRAY": 0, "WIREGUARD": 1, "SING_BOX": 3},
    "LimitAction": {"CUT": 0, "TELL": 1},
    "StatType": {"Outbounds": 0, "Outbound": 1, "Inbounds": 2, "Inbound": 3, "UsersStat": 4, "UserStat": 5},
}
# Numbers that a coming contract uses.
RESERVED = {"BaseInfoResponse": 5, "Backend": 6, "User": 4, "Users": 2, "UsersChunk": 4}
# The last number below 16 that controllers have given a meaning.
LAST = (
    "Empty=0 BaseInfoResponse=4 Backend=5 Log=1 Stat=4 StatResponse=1 StatRequest=3 OnlineStatResponse=2 "
    "StatsOnlineIpListResponse=2 BackendStatsResponse=10 SystemStatsResponse=7 Latency=7 LatencyRequest=1 "
    "LatencyResponse=1 Vmess=1 Vless=2 Trojan=1 Shadowsocks=2 Wireguard=2 Hysteria=1 Masque=1 Proxy=7 User=3 Users=1 "
    "UsersChunk=3 RoutingRule=2 RoutingRulesResponse=1 BalancerInfoRequest=1 BalancerInfoResponse=2 "
    "TestRouteRequest=10 RouteResult=5 AddRoutingRuleRequest=2 RemoveRoutingRuleRequest=1 "
    "OverrideBalancerTargetRequest=2"
)
# Request and reply, REST's verbs and path; "stream" where messages come one by one.
OPERATIONS = {
    "Start": "Backend -> BaseInfoResponse POST /start",
    "Stop": "Empty -> Empty PUT /stop",
    "GetBaseInfo": "Empty -> BaseInfoResponse GET /info",
    "GetLogs": "Empty -> stream Log GET /logs",
    "GetSystemStats": "Empty -> SystemStatsResponse GET /stats/system",
    "GetBackendStats": "Empty -> BackendStatsResponse GET /stats/backend",
    "GetStats": "StatRequest -> StatResponse GET /stats",
    "GetUserOnlineStats": "StatRequest -> OnlineStatResponse GET /stats/user/online",
    "GetUserOnlineIpListStats": "StatRequest -> StatsOnlineIpListResponse GET /stats/user/online_ip",
    "GetOutboundsLatency": "LatencyRequest -> LatencyResponse GET /stats/latency",
    "GetBill": "BillRequest -> Bill GET /stats/bill",
    "SyncUser": "stream User -> Empty PUT /user/sync",
    "SyncUsers": "Users -> Empty PUT,POST /users/sync",
    "SyncUsersChunked": "stream UsersChunk -> Empty PUT /users/sync/chunked",
    "ListUsers": "ListUsersRequest -> ListUsersResponse GET /users",
    "SetLimits": "SetLimitsRequest -> SetLimitsResponse PUT /users/limits",
    "GetLimits": "GetLimitsRequest -> GetLimitsResponse GET /users/limits",
    "DropConnections": "DropConnectionsRequest -> DropConnectionsResponse PUT /users/drop",
    "ListOnline": "ListOnlineRequest -> ListOnlineResponse GET /users/online",
    "ListRoutingRules": "Empty -> RoutingRulesResponse GET /routing/rules",
    "GetBalancerInfo": "BalancerInfoRequest -> BalancerInfoResponse POST /routing/balancer",
    "TestRoute": "TestRouteRequest -> RouteResult POST /routing/test",
    "AddRoutingRule": "AddRoutingRuleRequest -> Empty PUT /routing/rules",
    "RemoveRoutingRule": "RemoveRoutingRuleRequest -> Empty DELETE /routing/rules",
    "OverrideBalancerTarget": "OverrideBalancerTargetRequest -> Empty PUT /routing/balancer/override",
    "StreamEvents": "EventsRequest -> stream Event GET /events",
    "UpdateCore": "UpdateCoreRequest -> Job PUT /core/update",
    "UpdateGeoFiles": "UpdateGeoFilesRequest -> Job PUT /geo/update",
    "UpdateNode": "UpdateNodeRequest -> Job PUT /node/update",
    "GetJob": "JobRequest -> Jobs GET /jobs",
}
_TYPES = {
    getattr(FieldDescriptor, f"TYPE_{name.upper()}"): name
    for name in ("bool", "string", "int64", "uint32", "uint64", "double")
}


def type_of(field: FieldDescriptor) -> str:
    message = field.message_type
    if message is not None and message.GetOptions().map_entry:
        return f"{{{type_of(message.fields_by_name['key'])},{type_of(message.fields_by_name['value'])}}}"
    named = message or field.enum_type
    return ("*" if field.is_repeated else "") + (named.name if named is not None else _TYPES[field.type])


def described(name: str) -> str:
    """Format a message of the descriptor as in MESSAGES."""
    fields = service_pb2.DESCRIPTOR.message_types_by_name[name].fields
    words = [(f"{field.name}={field.number}", type_of(field)) for field in fields]
    return " ".join(word if kind == "string" else f"{word}:{kind}" for word, kind in words)


def operation(method: Method) -> str:
    """Format a row of METHODS over the descriptor as in OPERATIONS."""
    rpc = SERVICE.methods_by_name[method.name]
    request = ("stream " if rpc.client_streaming else "") + rpc.input_type.name
    response = ("stream " if rpc.server_streaming else "") + rpc.output_type.name
    return f"{request} -> {response} {','.join(method.verbs)} {method.path}"


def test_all_messages_are_written_down() -> None:
    """The interface has these messages and enumerations, and no others."""
    assert set(service_pb2.DESCRIPTOR.message_types_by_name) == set(MESSAGES)
    assert set(service_pb2.DESCRIPTOR.enum_types_by_name) == set(ENUMS)


@pytest.mark.parametrize("name", MESSAGES)
def test_fields_have_the_numbers_in_the_field(name: str) -> None:
    """Numbers and types are those of deployed controllers, which could not use others."""
    assert described(name) == MESSAGES[name]


@pytest.mark.parametrize("name", ENUMS)
def test_enumerations_have_the_numbers_in_the_field(name: str) -> None:
    """The values of enumerations are those of deployed controllers."""
    values = service_pb2.DESCRIPTOR.enum_types_by_name[name].values
    assert {value.name: value.number for value in values} == ENUMS[name]


@pytest.mark.parametrize("word", LAST.split())
def test_fields_of_our_own_are_out_of_the_way(word: str) -> None:
    """Controllers continue their numbering; fields that this node adds to their messages have numbers from 16 on."""
    name, _, last = word.partition("=")
    fields = service_pb2.DESCRIPTOR.message_types_by_name[name].fields
    assert all(field.number <= int(last) or field.number >= 16 for field in fields)


def test_numbers_of_a_coming_contract_are_reserved() -> None:
    """Numbers that a coming contract uses are reserved, so that this node does not use them by mistake."""
    for name, message in service_pb2.DESCRIPTOR.message_types_by_name.items():
        described = DescriptorProto()
        message.CopyToProto(described)
        reserved = [number for each in described.reserved_range for number in range(each.start, each.end)]
        assert reserved == [number for other, number in RESERVED.items() if other == name]


@pytest.mark.parametrize("name", RESERVED)
def test_fields_of_a_coming_contract_are_ignored(name: str) -> None:
    """Such fields cause no error, whatever their type, and do not change other fields."""
    message = getattr(service_pb2, name)
    for field in (bytes([RESERVED[name] << 3, 1]), bytes([RESERVED[name] << 3 | 2, 3]) + b"new"):
        read = message.FromString(field)
        assert not read.ListFields()
        read.DiscardUnknownFields()
        assert read == message()


def test_the_service_has_its_name() -> None:
    """gRPC paths are /service.NodeService/…, which clients call."""
    assert SERVICE.full_name == "service.NodeService"


def test_every_operation_is_a_method() -> None:
    """METHODS has each RPC of the service once, in its order, with messages, verbs and path as documented."""
    assert {method.name: operation(method) for method in METHODS} == OPERATIONS
    assert [method.name for method in METHODS] == [rpc.name for rpc in SERVICE.methods]


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_kinds_follow_the_descriptor(method: Method) -> None:
    """Which messages are streams is as in the descriptor, and so are their types."""
    rpc = SERVICE.methods_by_name[method.name]
    streams = Kind.EVENTS if rpc.output_type.name == "Event" else Kind.LOGS
    kinds = {(False, False): Kind.UNARY, (False, True): streams, (True, False): Kind.FEED}
    assert method.kind is kinds[rpc.client_streaming, rpc.server_streaming]
    assert method.request.DESCRIPTOR is rpc.input_type
    assert method.response.DESCRIPTOR is rpc.output_type


def test_verbs_and_paths_are_unambiguous() -> None:
    """A verb and a path identify one operation."""
    routes = [(verb, method.path) for method in METHODS for verb in method.verbs]
    assert len(routes) == len(set(routes))


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_each_is_there(method: Method) -> None:
    """The backend has the coroutine that a row names; logs come from the ring, events from the journal."""
    if method.kind in (Kind.LOGS, Kind.EVENTS):
        return
    call = getattr(Operations, method.call)
    assert inspect.iscoroutinefunction(call) is (method.kind is Kind.UNARY)


def test_feeds_over_rest_are_split_as_clients_send_them() -> None:
    """One user is the body; chunks come after their lengths."""
    cuts = {method.name: method.cut for method in METHODS if method.kind is Kind.FEED}
    assert cuts == {"SyncUser": single, "SyncUsersChunked": delimited}


def test_what_works_without_a_backend() -> None:
    """Info, logs, events, statistics, traffic, users, Start and Stop need no backend; the core's own answers do."""
    free = {method.name for method in METHODS if not method.needs_backend}
    assert free == {
        *("Start", "Stop", "GetBaseInfo", "GetLogs", "StreamEvents"),
        *("GetSystemStats", "GetStats", "GetBill", "ListUsers", "SetLimits", "GetLimits"),
        *("UpdateCore", "UpdateGeoFiles", "UpdateNode", "GetJob"),
    }


def test_bodies_of_64_mebibytes() -> None:
    """Deployed controllers send and accept messages of 64 MiB."""
    assert MAX_BODY == 67108864
