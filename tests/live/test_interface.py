"""The interface from outside, row by row of METHODS, over both transports, on the real node with real cores."""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import itertools
import json
import queue
import secrets
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import grpc
import psutil
import pytest
from packaging.version import Version

from node.api.framing import arrived
from node.api.framing import delimited as cut
from node.api.methods import MAX_BODY, METHODS, SERVICE, Kind, Method
from node.base.errors import (
    KINDS,
    InvalidConfig,
    InvalidRequest,
    NodeError,
    NotInitialized,
    UnknownName,
    UnknownPath,
    Unsupported,
    WrongMediaType,
    WrongVerb,
)
from protos import service_pb2
from protos.service_pb2 import StatRequest, StatResponse, UsersChunk
from scripts.staging.backend import chunks, user
from scripts.staging.controller import Controller, ControllerError, RestController, RpcController, refused
from scripts.staging.inbounds import Kind as Inbound
from scripts.staging.node import NodeProcess
from scripts.staging.ports import free_port
from scripts.staging.protocols import vless
from scripts.staging.rpc import Rpc
from scripts.staging.target import Dialect, credentials
from scripts.staging.transports import raw
from scripts.staging.users import TestUser
from scripts.staging.wait import until
from tests.harness.grounds import GROUNDS, XRAY, Ground
from tests.harness.rest import Rest, delimited
from tests.live.test_core_faults import as_is

MEBIBYTE = 1024 * 1024
VLESS = Inbound("vless-raw", vless(), raw())
ALICE = user(TestUser.new("42"), {"in": VLESS})
# Gives each method something to return; a missing outbound is not measured.
EXTRA = {
    "xray": {
        "observatory": {"subjectSelector": ["nothing"]},
        "routing": {"balancers": [{"tag": "both", "selector": ["direct"]}]},
    }
}
BACKENDS = {
    ground.name: ground.backend(
        [ground.inbound(VLESS, free_port(), "in")],
        [ALICE],
        **EXTRA.get(ground.name, {}),  # type: ignore[arg-type]
    )
    for ground in GROUNDS
}
BACKEND = BACKENDS[XRAY.name]
GARBAGE = b"\xff"
PROTOBUF = ("Content-Type", "application/x-protobuf")

SAMPLES = {
    "Start": BACKEND,
    "GetUserOnlineStats": StatRequest(name=ALICE.email),
    "GetUserOnlineIpListStats": StatRequest(name=ALICE.email),
    "SyncUser": ALICE,
    "SyncUsers": service_pb2.Users(users=[ALICE]),
    "SyncUsersChunked": UsersChunk(users=[ALICE], last=True),
    "DropConnections": service_pb2.DropConnectionsRequest(name=ALICE.email),
    "GetBalancerInfo": service_pb2.BalancerInfoRequest(tag="both"),
    "TestRoute": service_pb2.TestRouteRequest(target_domain="a.test"),
    "AddRoutingRule": service_pb2.AddRoutingRuleRequest(rule='{"domain": ["b.test"], "outboundTag": "block"}'),
    "RemoveRoutingRule": service_pb2.RemoveRoutingRuleRequest(rule_tag="x"),
    "OverrideBalancerTarget": service_pb2.OverrideBalancerTargetRequest(balancer_tag="both", target="block"),
    "UpdateCore": service_pb2.UpdateCoreRequest(version="0.0"),
    "UpdateNode": service_pb2.UpdateNodeRequest(version="0.0"),
}
"""A request that succeeds, where the empty message does not."""

OF_XRAY = {method.name for method in METHODS if "/routing/" in method.path or method.path == "/stats/latency"}
"""What not every core can do."""

START = next(method for method in METHODS if method.name == "Start")
FEEDS = [method for method in METHODS if method.kind is Kind.FEED]
SYNC_USER = f"/{SERVICE.full_name}/SyncUser"

Pairs = Sequence[tuple[str, str]]

each_method = pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
each_transport = pytest.mark.parametrize("transport", ["rest", "grpc"])
each_dialect = pytest.mark.parametrize("dialect", ["bearer", "x-api-key"])


@dataclass(frozen=True)
class Reply:
    """The result of a call. `status` is HTTP's as digits or gRPC's name; `code` is REST's error code."""

    status: str
    text: str = ""
    code: str = ""
    body: bytes = b""

    @property
    def fine(self) -> bool:
        return self.status in ("200", "OK")

    def is_error(self, kind: type[NodeError]) -> bool:
        return self.status in (str(kind.http), kind.grpc) and self.code in ("", kind.code)


class Wire(Protocol):
    """One transport at the level of bytes. Credentials are those given, with no default."""

    def call(self, method: Method, body: bytes, credentials: Pairs) -> Reply: ...


class RestWire:
    """REST without the harness's client: any header, any number of times."""

    def __init__(self, node: NodeProcess) -> None:
        self._rest = Rest(node)

    def call(self, method: Method, body: bytes, credentials: Pairs) -> Reply:
        return self.send(method.verbs[0], method.path, framed(method, body), [*credentials, PROTOBUF])

    def send(self, verb: str, path: str, body: bytes | None, headers: Pairs) -> Reply:
        return reply_of(*self.exchange(verb, path, body, headers))

    def exchange(
        self, verb: str, path: str, body: bytes | None, headers: Pairs
    ) -> tuple[http.client.HTTPResponse, bytes]:
        """The response and its body; the body of a stream is not read. `None` sends no Content-Length."""
        connection = self._rest.connection()
        try:
            connection.putrequest(verb, path)
            length = [] if body is None else [("Content-Length", str(len(body)))]
            for name, value in [*headers, *length]:
                connection.putheader(name, value)
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # It may reply before it has read all.
                connection.endheaders(body)
            response = connection.getresponse()
            stream = response.getheader("Content-Type", "").startswith("text/event-stream")
            return response, b"" if stream else response.read()
        finally:
            connection.close()


def first(method: Method, wire: Wire, body: bytes) -> bytes:
    """The message, or the first of a stream; over REST an empty one stands for the begin of a stream."""
    return arrived(body)[0][0] if method.kind is Kind.EVENTS and isinstance(wire, RestWire) else body


class RpcWire:
    """gRPC with raw bytes as messages, any metadata, and no size limit on this side."""

    def __init__(self, node: NodeProcess) -> None:
        trusted = grpc.ssl_channel_credentials(node.pem.encode())
        limits = [(f"grpc.max_{way}_message_length", -1) for way in ("send", "receive")]
        options = [*limits, ("grpc.use_local_subchannel_pool", 1)]
        self.channel = grpc.secure_channel(f"{node.host}:{node.grpc_port}", trusted, options)

    def call(self, method: Method, body: bytes, credentials: Pairs) -> Reply:
        path = f"/{SERVICE.full_name}/{method.name}"
        try:
            return Reply("OK", body=self._invoke(path, method.kind, body, tuple(credentials)))
        except grpc.RpcError as error:
            assert error.code().name in {kind.grpc for kind in KINDS}
            return Reply(error.code().name, error.details())

    def _invoke(self, path: str, kind: Kind, body: bytes, metadata: tuple[tuple[str, str], ...]) -> bytes:
        options: dict[str, Any] = {"metadata": metadata, "timeout": 30}
        if kind is Kind.FEED:
            answer: bytes = self.channel.stream_unary(path)(iter([body]), **options)
            return answer
        if kind is Kind.UNARY:
            reply: bytes = self.channel.unary_unary(path)(body, **options)
            return reply
        stream = self.channel.unary_stream(path)(body, **options)
        try:
            line: bytes = next(stream)
            return line
        finally:
            stream.cancel()


def reply_of(response: http.client.HTTPResponse, body: bytes) -> Reply:
    """Check the form of an error: JSON with exactly two keys, of a known kind; or plain text."""
    status, media_type = str(response.status), response.getheader("Content-Type", "")
    if status == "200":
        return Reply(status, body=body)
    if media_type.startswith("text/plain"):
        return Reply(status, body.decode())
    assert media_type == "application/json", (status, media_type, body)
    if not body:
        return Reply(status)  # to a HEAD
    error = json.loads(body)
    assert set(error) == {"error", "code"}
    assert (error["code"], response.status) in {(kind.code, kind.http) for kind in KINDS}
    return Reply(status, error["error"], error["code"])


def framed(method: Method, body: bytes) -> bytes:
    """The REST body that carries one message."""
    return varint(len(body)) + body if method.cut is cut else body


def varint(value: int) -> bytes:
    low, more = value & 0x7F, value >> 7
    return bytes([low | 0x80]) + varint(more) if more else bytes([low])


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    with NodeProcess(tmp_path_factory.mktemp("interface"), UPDATES="on") as node:
        yield node


@pytest.fixture(scope="module")
def controllers(node: NodeProcess) -> Iterator[dict[str, Controller]]:
    rest, rpc = RestController(node), RpcController(node)
    yield {"rest": rest, "grpc": rpc}
    rpc.close()


@pytest.fixture(scope="module")
def wires(node: NodeProcess) -> Iterator[dict[str, Wire]]:
    rpc = RpcWire(node)
    yield {"rest": RestWire(node), "grpc": rpc}
    rpc.channel.close()


@pytest.fixture
def wire(wires: dict[str, Wire], transport: str) -> Wire:
    return wires[transport]


@pytest.fixture
def controller(controllers: dict[str, Controller], transport: str) -> Controller:
    return controllers[transport]


@pytest.fixture
def rest(node: NodeProcess) -> RestWire:
    return RestWire(node)


@pytest.fixture
def key(node: NodeProcess) -> Pairs:
    return bearer(node)


@pytest.fixture
def idle(node: NodeProcess) -> NodeProcess:
    """A node without a backend."""
    RestController(node).stop()
    return node


@pytest.fixture
def running(node: NodeProcess) -> NodeProcess:
    """A node with one VLESS inbound and ALICE."""
    return running_on(XRAY, node)


@pytest.fixture
def running_each(node: NodeProcess, ground: Ground) -> NodeProcess:
    """The same on each core."""
    return running_on(ground, node)


def running_on(ground: Ground, node: NodeProcess) -> NodeProcess:
    controller = RestController(node)
    info = controller.info()
    if (info.running, info.core_type) != (True, ground.name):
        controller.start(BACKENDS[ground.name])
    return node


def bearer(node: NodeProcess, dialect: Dialect = "bearer") -> Pairs:
    return list(credentials(node.key, dialect).items())


def sample(method: Method, ground: Ground = XRAY) -> bytes:
    request = BACKENDS[ground.name] if method.name == "Start" else SAMPLES.get(method.name)
    return request.SerializeToString() if request else b""


# Who may call


def strangers(key: str) -> dict[str, Pairs]:
    right, wrong = f"Bearer {key}", f"Bearer {'0' * 8}{key[8:]}"
    return {
        "nothing": [],
        "wrong key": [("authorization", wrong)],
        "wrong x-api-key": [("x-api-key", wrong.removeprefix("Bearer "))],
        "wrong scheme": [("authorization", f"Basic {key}")],
        "no scheme": [("authorization", key)],
        "no key": [("authorization", "Bearer ")],
        "empty x-api-key": [("x-api-key", "")],
        "scheme in x-api-key": [("x-api-key", right)],
        "nil": [("x-api-key", "00000000-0000-0000-0000-000000000000")],
        "only the second is right": [("authorization", wrong), ("x-api-key", key)],
        "only the first is right": [("authorization", right), ("x-api-key", key[:-1])],
        "two bearers": [("authorization", right), ("authorization", wrong)],
    }


@each_transport
@each_method
def test_strangers(node: NodeProcess, wire: Wire, method: Method) -> None:
    """No method does or reveals anything without the key."""
    _refused(node, wire, method, [("authorization", "Bearer wrong")])


@pytest.mark.slow
@each_transport
def test_every_kind_of_stranger(node: NodeProcess, wire: Wire) -> None:
    """All kinds of wrong credentials are refused in the same way."""
    # All methods share one check; and many wrong keys of an address are answered late.
    for name, given in strangers(node.key).items():
        _refused(node, wire, START, given, name)


def _refused(node: NodeProcess, wire: Wire, method: Method, given: Pairs, name: str = "") -> None:
    reply = wire.call(method, sample(method), given)
    assert reply.status in ("401", "UNAUTHENTICATED"), f"{name}: {reply}"
    assert node.key not in reply.text


@each_transport
def test_spellings_of_the_key(node: NodeProcess, wire: Wire) -> None:
    """A UUID is the same key in every spelling, the scheme in any case; both headers together are fine."""
    bare, upper = node.key.replace("-", ""), node.key.upper()
    (info,) = (method for method in METHODS if method.name == "GetBaseInfo")
    for given in (
        [("authorization", f"bearer {node.key}")],
        [("authorization", f"Bearer {bare}")],
        [("x-api-key", upper)],
        [("authorization", f"Bearer {upper}"), ("x-api-key", bare)],
    ):
        assert wire.call(info, b"", given).fine, given


# Every row: without a backend, with one, with nonsense


@each_transport
@each_method
def test_without_backend(idle: NodeProcess, wire: Wire, key: Pairs, method: Method) -> None:
    """Methods that need a backend are refused with the text that controllers know; the rest works."""
    if method.name == "Start":
        return
    reply = wire.call(method, sample(method), key)
    if method.needs_backend:
        assert reply.is_error(NotInitialized)
        assert reply.text == "backend not initialized"
    else:
        assert reply.fine, reply
        method.response.FromString(first(method, wire, reply.body))


@each_transport
@each_method
def test_with_backend(running_each: NodeProcess, ground: Ground, wire: Wire, key: Pairs, method: Method) -> None:
    """Every method succeeds on a running backend with the contract's message, or is refused as unsupported."""
    reply = wire.call(method, sample(method, ground), key)
    if ground is not XRAY and method.name in OF_XRAY:
        assert reply.is_error(Unsupported)
    else:
        assert reply.fine, reply
        method.response.FromString(first(method, wire, reply.body))


@each_transport
@each_method
def test_nonsense(idle: NodeProcess, wire: Wire, key: Pairs, method: Method) -> None:
    """Invalid messages are distinguished from a missing backend; the log stream, which takes no message, opens."""
    reply = wire.call(method, GARBAGE, key)
    if method.kind is Kind.LOGS:
        assert reply.fine
    else:
        assert reply.is_error(InvalidRequest)
        assert method.request.DESCRIPTOR.name in reply.text


@each_transport
@pytest.mark.parametrize("number", [service_pb2.WIREGUARD, 2, 99])
def test_backends_without_a_driver(running: NodeProcess, wire: Wire, key: Pairs, number: int) -> None:
    """A type of backend without a driver is unsupported, and the running one stays."""
    other = service_pb2.Backend(config="{}")
    other.type = number  # type: ignore[assignment]
    reply = wire.call(START, other.SerializeToString(), key)
    assert reply.is_error(Unsupported)
    assert RestController(running).info().running


def test_unknown_method(wires: dict[str, Wire], key: Pairs) -> None:
    """An unknown method is UNIMPLEMENTED over gRPC."""
    stranger = dataclasses.replace(START, name="Reboot")
    assert wires["grpc"].call(stranger, b"", key).status == "UNIMPLEMENTED"


# What is REST's alone


@each_dialect
@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_verbs_and_slashes(running: NodeProcess, rest: RestWire, dialect: Dialect, method: Method) -> None:
    """Every verb of a method works, in both dialects, also with a trailing slash."""
    for verb in method.verbs:
        for path in (method.path, f"{method.path}/"):
            reply = rest.send(verb, path, framed(method, sample(method)), [PROTOBUF, *bearer(running, dialect)])
            assert reply.fine, f"{verb} {path}: {reply}"


# A path of METHODS that is also a button of a deployed panel: see `node.updates.buttons`.
BUTTON = "/node/update"


@each_dialect
@pytest.mark.parametrize("path", sorted({method.path for method in METHODS}))
def test_wrong_verbs(node: NodeProcess, rest: RestWire, dialect: Dialect, path: str) -> None:
    """Every other verb is refused with 405 and the list of allowed ones."""
    taken = {verb for method in METHODS if method.path == path for verb in method.verbs}
    if path == BUTTON:
        taken.add("POST")
    for verb in {"GET", "POST", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS"} - taken:
        response, body = rest.exchange(verb, path, None, bearer(node, dialect))
        assert response.status == 405, verb
        assert set((response.getheader("Allow") or "").replace(" ", "").split(",")) == taken
        assert verb == "HEAD" or reply_of(response, body).is_error(WrongVerb)


@each_dialect
@pytest.mark.parametrize("path", ["/nothing", "/start/now", "/STATS", "/%ff", "/..%2finfo", "/stats/"])
def test_unknown_paths(node: NodeProcess, rest: RestWire, dialect: Dialect, path: str) -> None:
    """An unknown path is 404 in the caller's dialect, never a redirect; `/stats/` is known."""
    reply = rest.send("GET", path, None, bearer(node, dialect))
    assert reply.fine if path == "/stats/" else reply.is_error(UnknownPath), reply


def triggers() -> dict[type[NodeError], tuple[str, str, bytes]]:
    """A request for each kind of error that a request alone can cause."""
    return {
        InvalidRequest: ("PUT", "/users/sync", GARBAGE),
        InvalidConfig: ("POST", "/start", service_pb2.Backend(config="{").SerializeToString()),
        UnknownPath: ("GET", "/nothing", b""),
        UnknownName: ("GET", "/stats/user/online", StatRequest(name="nobody").SerializeToString()),
        WrongVerb: ("GET", "/start", b""),
        Unsupported: ("POST", "/start", service_pb2.Backend(type=service_pb2.WIREGUARD).SerializeToString()),
    }


@each_dialect
@pytest.mark.parametrize("kind", triggers(), ids=lambda kind: kind.code)
def test_dialects(running: NodeProcess, rest: RestWire, dialect: Dialect, kind: type[NodeError]) -> None:
    """A Bearer client gets errors as JSON with the code; an `x-api-key` client gets plain text."""
    response, body = rest.exchange(*triggers()[kind], [PROTOBUF, *bearer(running, dialect)])
    media_type = response.getheader("Content-Type", "")
    assert response.status == kind.http
    assert response.getheader("Content-Length") == str(len(body))
    if dialect == "bearer":
        assert media_type == "application/json"
        assert json.loads(body)["code"] == kind.code
    else:
        assert media_type.startswith("text/plain")
        assert body
        assert not body.startswith(b"{")


def test_dialects_say_the_same(running: NodeProcess, rest: RestWire) -> None:
    """The texts are the same in both dialects."""
    for request in triggers().values():
        texts = {rest.send(*request, [PROTOBUF, *bearer(running, kind)]).text for kind in ("bearer", "x-api-key")}
        assert len(texts) == 1, texts


def test_dialect_of_strangers(node: NodeProcess, rest: RestWire) -> None:
    """Callers with an `x-api-key`, even a wrong one, get plain text; callers without get JSON."""
    for given, media_type in (
        ([], "application/json"),
        ([("Authorization", "Bearer wrong")], "application/json"),
        ([("X-API-Key", "wrong")], "text/plain; charset=utf-8"),
        ([*bearer(node), ("X-API-Key", "wrong")], "text/plain; charset=utf-8"),
    ):
        response, body = rest.exchange("GET", "/info", None, given)
        assert (response.status, response.getheader("Content-Type")) == (401, media_type)
        assert "key" in reply_of(response, body).text


@pytest.mark.parametrize(
    ("media_type", "fine"),
    [
        ("application/x-protobuf", True),
        ("Application/X-Protobuf; charset=utf-8", True),
        ("application/json", False),
        ("", False),
    ],
)
def test_media_types(running: NodeProcess, rest: RestWire, media_type: str, fine: bool) -> None:
    """A Bearer client must declare a body as protobuf; one with `x-api-key` need not."""
    body = StatRequest(name=ALICE.email).SerializeToString()
    given = [("Content-Type", media_type)] if media_type else []
    reply = rest.send("GET", "/stats/user/online", body, [*bearer(running), *given])
    assert reply.fine if fine else reply.is_error(WrongMediaType)
    assert rest.send("GET", "/stats/user/online", body, [*bearer(running, "x-api-key"), *given]).fine
    assert rest.send("GET", "/stats", b"", [*bearer(running), *given]).fine


@each_dialect
def test_bodies_of_gets(running: NodeProcess, rest: RestWire, dialect: Dialect) -> None:
    """A GET takes its request from the body; without a body, with or without a length, it is for all outbounds."""
    headers = [PROTOBUF, *bearer(running, dialect)]
    one = rest.send("GET", "/stats", StatRequest(type=service_pb2.UserStat, name="42").SerializeToString(), headers)
    assert {row.name for row in StatResponse.FromString(one.body).stats} == {"42"}
    for body in (None, b""):
        every = rest.send("GET", "/stats", body, bearer(running, dialect))
        rows = {(row.name, row.type) for row in StatResponse.FromString(every.body).stats}
        assert rows == {(name, way) for name in ("direct", "block") for way in ("uplink", "downlink")}


def test_connection_is_kept(node: NodeProcess) -> None:
    """Requests follow each other on one connection, with refused ones in between."""
    connection, given = Rest(node).connection(), dict(bearer(node))
    try:
        for path, status in (("/info", 200), ("/nothing", 404), ("/info", 200), ("/start", 405)) * 5:
            connection.request("GET", path, headers=given)
            port = connection.sock.getsockname()
            response = connection.getresponse()
            response.read()
            assert response.status == status
            assert connection.sock is not None
            assert connection.sock.getsockname() == port
    finally:
        connection.close()


# What the answers say


@each_transport
@pytest.mark.both
def test_start_and_info(idle: NodeProcess, ground: Ground, controller: Controller) -> None:
    """Start returns the same as info: running, with the versions that controllers check; stopped, it is as before."""
    before = controller.info()
    assert (before.running, before.state, before.core_type) == (False, "stopped", "xray")
    started = controller.start(BACKENDS[ground.name])
    assert (started.running, started.state, started.core_type) == (True, "running", ground.name)
    assert Version(started.version) >= Version("0.2.0")
    assert tuple(map(int, started.core_version.split("."))) >= (1, 8, 0)
    assert started.version == before.version
    assert controller.info() == started
    controller.stop()
    after = controller.info()
    assert after.reason
    after.reason = before.reason
    assert after == before


@each_transport
@pytest.mark.both
def test_refused_start(idle: NodeProcess, ground: Ground, controller: Controller) -> None:
    """A configuration that the core refuses is refused with the core's message, and changes nothing."""
    for _ in range(2):
        for config, why in ground.refusals.values():
            with refused(400, "INVALID_ARGUMENT", why):
                controller.start(as_is(ground, config))
        running = controller.info().running
        controller.start(BACKENDS[ground.name])
    assert (running, controller.info().running) == (True, True)


@each_transport
def test_system_stats(idle: NodeProcess, controller: Controller) -> None:
    """The machine's figures are available before a Start and after it, and plausible."""
    for _ in range(2):
        stats = controller.system_stats()
        assert 0 < stats.mem_used <= stats.mem_total <= psutil.virtual_memory().total
        assert 0 < stats.cpu_cores <= (psutil.cpu_count() or 1)
        assert 0 <= stats.cpu_usage <= 100
        assert max(stats.incoming_bandwidth_speed, stats.outgoing_bandwidth_speed) < 10**12
        assert stats.uptime > 0
        controller.start(BACKEND)


@each_transport
def test_backend_stats(running_each: NodeProcess, controller: Controller) -> None:
    """The core's figures are available, plausible, and advance."""
    first = controller.backend_stats()
    assert first.num_goroutine > 0
    assert 0 < first.alloc <= first.total_alloc
    assert first.alloc < first.sys < 2**32
    assert first.mallocs - first.frees == first.live_objects > 0
    assert first.uptime < 3600
    assert controller.backend_stats().mallocs > first.mallocs


@each_transport
def test_unknown_names(running_each: NodeProcess, controller: Controller) -> None:
    """An unknown name is distinguished from one without traffic."""
    for ask in (
        lambda: controller.stats(service_pb2.UserStat, "nobody"),
        lambda: controller.stats(service_pb2.Inbound, "nothing"),
        lambda: controller.stats(service_pb2.Outbound, "nothing"),
        lambda: controller.online("nobody"),
        lambda: controller.online_ips("nobody"),
    ):
        with refused(404, "NOT_FOUND"):
            ask()
    assert {row.value for row in controller.stats(service_pb2.UserStat, ALICE.email).stats} == {0}
    assert controller.online(ALICE.email).value == 0
    assert not controller.online_ips(ALICE.email).ips


# Users in chunks


def somebody(name: str = "") -> service_pb2.User:
    return user(TestUser.new(name or secrets.token_hex(4)), {"in": VLESS})


def known(controller: Controller, *users: service_pb2.User) -> list[bool]:
    """The subset of users that the node has."""

    def has(email: str) -> bool:
        try:
            controller.online(email)
        except ControllerError as error:
            assert error.status in ("404", "NOT_FOUND")
            return False
        return True

    return [has(user.email) for user in users]


@each_transport
@pytest.mark.parametrize(
    "order",
    [
        [(1, True)],
        [(0, False), (2, True)],
        [(0, False), (0, True)],
        [(0, False)],
        [],
        [(0, True), (1, True)],
        [(0, True), (1, False)],
        [(1, False), (0, True)],
    ],
    ids=["begins at 1", "gap", "twice", "no last", "nothing", "after the last", "more after the last", "backwards"],
)
def test_chunks_out_of_order(running: NodeProcess, controller: Controller, order: list[tuple[int, bool]]) -> None:
    """Chunks other than 0, 1, … last are refused, and none of their users is applied."""
    people = [somebody() for _ in order]
    with refused(400, "INVALID_ARGUMENT", "chunk"):
        controller.sync_chunked(
            UsersChunk(users=[who], index=index, last=last) for who, (index, last) in zip(people, order, strict=True)
        )
    assert not any(known(controller, *people))


@each_transport
def test_chunks_in_order(running: NodeProcess, controller: Controller) -> None:
    """All chunks together are one partial update: users in none of them stay."""
    people = [somebody() for _ in range(5)]
    controller.sync_chunked(chunks(people, 2))
    assert all(known(controller, ALICE, *people))
    controller.sync_chunked(chunks([service_pb2.User(email=who.email) for who in people], 2))
    assert known(controller, ALICE, *people) == [True] + [False] * 5


@each_transport
def test_empty_last_chunk(running: NodeProcess, controller: Controller) -> None:
    """An empty last chunk succeeds, alone and at the end, and removes no user."""
    controller.sync_chunked(chunks([]))
    last = somebody()
    controller.sync_chunked([UsersChunk(users=[last]), UsersChunk(index=1, last=True)])
    assert all(known(controller, ALICE, last))


@pytest.mark.parametrize("length", [2**31, 2**31 - 1, 2**35 - 1, 2**63, 5], ids=hex)
def test_length_that_lies(running: NodeProcess, rest: RestWire, key: Pairs, length: int) -> None:
    """A length beyond the body is refused without allocating it, and nothing before it is applied."""
    before, first = high_water(running), somebody()
    body = b"".join(delimited([UsersChunk(users=[first])])) + varint(length) + b"few"
    reply = rest.send("PUT", "/users/sync/chunked", body, [PROTOBUF, *key])
    assert reply.is_error(InvalidRequest)
    assert high_water(running) - before < 20 * MEBIBYTE
    assert known(RestController(running), first) == [False]


def test_chunked_encoding(running: NodeProcess) -> None:
    """REST accepts a body of unknown length, whose chunks are cut anywhere."""
    people = [somebody() for _ in range(50)]
    body = b"".join(delimited(chunks(people, 7)))
    pieces = (body[start : start + 11] for start in range(0, len(body), 11))
    assert Rest(running).call("PUT", "/users/sync/chunked", pieces).status == 200
    assert all(known(RestController(running), *people))


# Streams of users


class Outbox:
    """Users for a stream, sent on request; `end` half-closes the stream."""

    def __init__(self) -> None:
        self._queue: queue.Queue[service_pb2.User | None] = queue.Queue()
        self.send, self.end = self._queue.put, lambda: self._queue.put(None)

    def __iter__(self) -> Iterator[service_pb2.User]:
        return iter(self._queue.get, None)


@contextlib.contextmanager
def user_stream(node: NodeProcess, outbox: Outbox) -> Iterator[Any]:
    """An open SyncUser call over gRPC, which the test ends."""
    with Rpc(node) as rpc:
        method = rpc.channel.stream_unary(SYNC_USER, request_serializer=service_pb2.User.SerializeToString)
        yield method.future(iter(outbox), metadata=bearer(node))
        outbox.end()


def test_user_stream_is_applied_as_it_comes(running: NodeProcess) -> None:
    """A stream's users take effect while it is open, despite bad ones; its cancellation is no error."""
    controller, outbox = RestController(running), Outbox()
    with user_stream(running, outbox) as call:
        for who in (somebody(), service_pb2.User(), user(TestUser("43", "no uuid", ""), {"in": VLESS}), somebody()):
            outbox.send(who)
        last = somebody()
        outbox.send(last)
        until(lambda: known(controller, last)[0], what="the last user is there")
        assert not call.done()
        call.cancel()
    assert known(controller, last) == [True]
    assert not faults(running), "\n".join(faults(running))


def test_user_stream_outlives_the_backend(idle: NodeProcess) -> None:
    """A stream stays open without a backend, whatever users it sends, and works once there is one."""
    controller, outbox = RestController(idle), Outbox()
    with user_stream(idle, outbox) as call:
        outbox.send(somebody())
        for _ in range(2):
            controller.start(BACKEND)
            who = somebody()
            outbox.send(who)
            until(lambda: all(known(controller, who)), what="the user is there")  # noqa: B023 - asked here and now
            controller.stop()
            outbox.send(somebody())
        controller.start(BACKEND)
        assert not call.done()


def test_many_short_user_streams(running: NodeProcess) -> None:
    """Streams that are cancelled right after opening do not affect later calls."""
    for _ in range(20):
        outbox = Outbox()
        with user_stream(running, outbox) as call:
            outbox.send(somebody())
            call.cancel()
    assert RestController(running).info().running
    assert not faults(running), "\n".join(faults(running))


def faults(node: NodeProcess) -> list[str]:
    """Lines of the node's log that an operator would have to look into."""
    return [line for line in node.lines if "#error" in line or "#critical" in line or "Traceback" in line]


# Sizes


def padded(size: int) -> bytes:
    """A Start of this many bytes: most of them are in unknown fields."""
    known = BACKEND.SerializeToString()
    # Field 1000, of bytes, whose length takes four bytes up to 256 MiB (protobuf's encoding).
    tag = b"\xc2\x3e"
    left = size - len(known) - len(tag) - 4
    length = bytes(left >> shift & 0x7F | (0x80 if shift < 21 else 0) for shift in (0, 7, 14, 21))
    return known + tag + length + bytes(left)


@each_transport
def test_large_messages(idle: NodeProcess, wire: Wire, key: Pairs) -> None:
    """Messages of 60 MiB and of exactly 64 MiB are accepted; one byte more is refused with the limit in the text."""
    for size in (60 * MEBIBYTE, MAX_BODY):
        reply = wire.call(START, padded(size), key)
        assert reply.fine, reply.text[:1000]
    reply = wire.call(START, padded(MAX_BODY + 1), key)
    assert reply.status in ("413", "RESOURCE_EXHAUSTED")
    assert reply.code in ("", "too_large")
    assert str(MAX_BODY) in reply.text


def test_large_body_of_unknown_length(running: NodeProcess) -> None:
    """REST ends a body without a length at the limit, and keeps nothing after it."""
    before = high_water(running)
    block = bytes(MEBIBYTE)
    response = Rest(running).call("POST", "/start", itertools.repeat(block, 200))
    assert response.status == 413
    assert high_water(running) - before < 2 * MAX_BODY


@pytest.mark.slow
def test_strangers_cost_no_memory(tmp_path: Path) -> None:
    """Many concurrent callers without the key who send 60 MiB cost the node less than 40 MiB on either transport."""
    body = bytes(60 * MEBIBYTE)
    with NodeProcess(tmp_path) as node:
        rest, rpc = RestWire(node), RpcWire(node)
        for wire in (rest, rpc):
            wire.call(START, b"", [])
        before = psutil.Process(node.node_pid).memory_info().rss
        for wire in (rest, rpc):
            with ThreadPoolExecutor(4) as pool:
                replies = list(pool.map(lambda method, wire=wire: wire.call(method, body, []), [START, *FEEDS] * 2))
            assert {reply.status for reply in replies} <= {"401", "UNAUTHENTICATED"}
        rpc.channel.close()
        assert high_water(node) - before < 40 * MEBIBYTE
        assert RestController(node).info().version


def high_water(node: NodeProcess) -> int:
    """The node's peak memory in bytes (VmHWM of proc(5))."""
    (line,) = (
        line for line in Path(f"/proc/{node.node_pid}/status").read_text().splitlines() if line.startswith("VmHWM:")
    )
    return int(line.split()[1]) * 1024


# At once


def test_info_never_waits(idle: NodeProcess) -> None:
    """A hundred concurrent GetBaseInfo during a Start, half over each transport, all succeed."""
    rest, rpc = RestController(idle), RpcController(idle)
    with ThreadPoolExecutor(100) as pool:
        start = pool.submit(rest.start, BACKEND)
        infos = [pool.submit(controller.info) for controller in (rest, rpc) for _ in range(50)]
        states = {info.result(timeout=20).state for info in infos}
        assert start.result(timeout=20).running
    rpc.close()
    assert states <= {"stopped", "starting", "running"}


@each_transport
def test_parallel_starts(idle: NodeProcess, controller: Controller) -> None:
    """Concurrent Starts and Stops all get replies, a Start that a Stop overtook as such, and leave one core."""
    with ThreadPoolExecutor(8) as pool:
        starts = [pool.submit(controller.start, BACKEND) for _ in range(4)]
        stops = [pool.submit(controller.stop) for _ in range(2)]
        for start in starts:
            fault = start.exception(timeout=30)
            assert fault is None or "aborted" in str(fault)
        for stop in stops:
            stop.result(timeout=30)
    assert controller.start(BACKEND).running
    assert len(idle.core_pids()) == 1
    controller.stop()
    until(lambda: not idle.core_pids(), what="the core is gone")
