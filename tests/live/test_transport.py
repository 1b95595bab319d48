"""Below the calls, on both transports: TLS, certificates and their replacement, ALPN, limits."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import os
import signal
import socket
import ssl
import stat
import warnings
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import psutil
import pytest
from grpclib.client import Channel, StreamUnaryMethod, UnaryStreamMethod, UnaryUnaryMethod
from grpclib.const import Status
from grpclib.exceptions import GRPCError

from node.api.methods import SERVICE
from node.certificate import ensure
from node.door.connections import Limits
from protos.service_pb2 import Backend, BaseInfoResponse, Empty, Log, StatType, User, UsersChunk
from scripts.staging import certs
from scripts.staging.backend import backend, chunks, user
from scripts.staging.controller import ControllerError, LogReader, RestController, RpcController, refused
from scripts.staging.inbounds import Kind
from scripts.staging.node import NodeProcess
from scripts.staging.ports import free_port
from scripts.staging.protocols import vless
from scripts.staging.rpc import Rpc
from scripts.staging.transports import raw
from scripts.staging.users import TestUser
from scripts.staging.wait import until
from tests.conftest import TRANSPORTS, control
from tests.harness.open_files import room_for

VLESS = Kind("vless-raw", vless(), raw())
BACKEND = backend([VLESS.inbound(free_port(), "in")])
NAMES = ("localhost", "127.0.0.1")

each_port = pytest.mark.parametrize("transport", ["rest", "grpc"])


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    with NodeProcess(tmp_path_factory.mktemp("transport")) as node:
        yield node


def port_of(node: NodeProcess, transport: str) -> int:
    return {"rest": node.rest_port, "grpc": node.grpc_port}[transport]


def trusting(node: NodeProcess, *alpn: str) -> ssl.SSLContext:
    context = ssl.create_default_context(cadata=node.pem)
    if alpn:
        context.set_alpn_protocols(list(alpn))
    return context


@contextmanager
def connected(port: int, context: ssl.SSLContext, name: str = "localhost") -> Iterator[ssl.SSLSocket]:
    with (
        socket.create_connection(("127.0.0.1", port), timeout=5) as link,
        context.wrap_socket(link, server_hostname=name) as secure,
    ):
        yield secure


def served(port: int) -> bytes | None:
    """The certificate that a new connection gets, trusted or not."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2", "http/1.1"])
    with connected(port, context) as secure:
        return secure.getpeercert(binary_form=True)


def both_serve(node: NodeProcess, certificate: bytes) -> bool:
    return all(served(port) == certificate for port in (node.rest_port, node.grpc_port))


def der(pem: Path) -> bytes:
    return ssl.PEM_cert_to_DER_cert(pem.read_text())


# TLS


@each_port
@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1, ssl.TLSVersion.TLSv1_1], ids=["1.0", "1.1"])
def test_old_versions(node: NodeProcess, transport: str, version: ssl.TLSVersion) -> None:
    """The node refuses a client with at most TLS 1.1, with the reason."""
    context = trusting(node, "h2", "http/1.1")
    context.set_ciphers("ALL:@SECLEVEL=0")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        context.minimum_version = context.maximum_version = version
    with pytest.raises(ssl.SSLError) as refused, connected(port_of(node, transport), context):
        pass
    # Any other reason would come from the client.
    assert refused.value.reason == "TLSV1_ALERT_PROTOCOL_VERSION"


@each_port
@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3], ids=["1.2", "1.3"])
def test_good_versions(node: NodeProcess, transport: str, version: ssl.TLSVersion) -> None:
    """TLS 1.2 and 1.3 work, 1.2 only with forward secrecy and authenticated ciphers."""
    context = trusting(node, "h2", "http/1.1")
    context.minimum_version = context.maximum_version = version
    with connected(port_of(node, transport), context) as secure:
        cipher = secure.cipher()
        assert secure.version() == f"TLSv1.{version.name[-1]}"
        assert cipher is not None
        assert "GCM" in cipher[0] or "CHACHA20" in cipher[0]
    if version is ssl.TLSVersion.TLSv1_2:
        context.set_ciphers("AES128-GCM-SHA256:ECDHE-ECDSA-AES128-SHA:ECDHE-RSA-AES128-SHA")
        with pytest.raises(ssl.SSLError), connected(port_of(node, transport), context):
            pass


@each_port
def test_newest_version_is_preferred(node: NodeProcess, transport: str) -> None:
    """A client that supports TLS 1.3 gets it."""
    with connected(port_of(node, transport), trusting(node, "h2", "http/1.1")) as secure:
        assert secure.version() == "TLSv1.3"


def test_same_certificate(node: NodeProcess) -> None:
    """Both transports serve the certificate of the settings."""
    assert both_serve(node, der(node.certificate.certificate))


@each_port
def test_no_plain_text(node: NodeProcess, transport: str) -> None:
    """Bytes that are not TLS get no reply, and do no harm."""
    with socket.create_connection(("127.0.0.1", port_of(node, transport)), timeout=5) as link:
        link.sendall(b"GET /info HTTP/1.1\r\nHost: node\r\n\r\n")
        assert b"HTTP/1.1" not in all_of(link)
    assert RestController(node).info().version


def all_of(link: socket.socket) -> bytes:
    """All bytes until the other side closes."""
    received = b""
    try:
        while data := link.recv(65_536):
            received += data
    except ConnectionResetError:
        return received
    return received


# ALPN


@pytest.mark.parametrize(
    ("offered", "chosen"),
    [
        ((), None),
        (("http/1.1",), "http/1.1"),
        (("h2", "http/1.1"), "http/1.1"),
        (("h2",), "h2"),
        (("spdy/3", "h3"), None),
    ],
    ids=["none", "http", "both", "h2", "others"],
)
def test_rest_is_http_1(node: NodeProcess, offered: tuple[str, ...], chosen: str | None) -> None:
    """If HTTP/1.1 is offered it is chosen; a client that offers others but sends it gets a reply as well."""
    with connected(node.rest_port, trusting(node, *offered)) as secure:
        assert secure.selected_alpn_protocol() == chosen
        secure.sendall(b"GET /info HTTP/1.1\r\nHost: node\r\nx-api-key: %s\r\n\r\n" % node.key.encode())
        response = http.client.HTTPResponse(secure)
        response.begin()
        assert (response.status, response.version) == (200, 11)
        assert BaseInfoResponse.FromString(response.read()).version


def test_grpc_is_http_2(node: NodeProcess) -> None:
    """gRPC chooses HTTP/2."""
    with connected(node.grpc_port, trusting(node, "h2", "http/1.1")) as secure:
        assert secure.selected_alpn_protocol() == "h2"


def test_both_protocols_on_each_port(node: NodeProcess) -> None:
    """One open port is enough: the other one serves this protocol as well, and both kinds of streams."""
    swapped = Pinned(node.host, node.grpc_port, node.rest_port, node.key, node.pem)
    for transport in TRANSPORTS.values():
        controller: RestController | RpcController = transport(swapped)  # type: ignore[arg-type]
        with contextlib.closing(controller), controller.logs() as reader:
            assert controller.info().version
            until(lambda: reader.lines, what="the stream is open")


def test_the_server_behind_is_nobody_elses(node: NodeProcess) -> None:
    """gRPC listens on a unix socket that only the node's user can access, and on no port."""
    assert stat.S_IMODE(behind(node).stat().st_mode) == 0o600
    links = psutil.Process(node.node_pid).net_connections("inet")
    assert {link.laddr.port for link in links if link.status == "LISTEN"} == {node.rest_port, node.grpc_port}


def behind(node: NodeProcess) -> Path:
    """The socket of gRPC's server."""
    links = psutil.Process(node.node_pid).net_connections("unix")
    (path,) = {path for link in links if (path := Path(str(link.laddr))).name.startswith("grpc.")}
    return path


def test_a_socket_that_was_left(tmp_path: Path) -> None:
    """A killed node leaves its socket, which does not disturb the next one."""
    node = NodeProcess(tmp_path)
    with node:
        left = behind(node)
        other = left.with_name("grpc.77")
        left.rename(other)
        node.kill()
        assert other.exists()
        node.start()
        assert RpcController(node).info().version
        assert not other.exists()


# The certificate that the node makes, pinned


@dataclass
class Pinned:
    """A node as its controller knows it: by one name and one PEM."""

    host: str
    rest_port: int
    grpc_port: int
    key: str
    pem: str


def test_own_certificate_is_pinned(tmp_path: Path) -> None:
    """Controllers pin the node's self-made certificate by its PEM and check the host name."""
    made = ensure(tmp_path / "pair", ["node.test"])
    pem = made.certificate.read_text()
    assert len(pem) <= 2048, "what panels take"
    with NodeProcess(tmp_path, SSL_CERT_FILE=str(made.certificate), SSL_KEY_FILE=str(made.key)) as node:
        address = Pinned("127.0.0.1", node.rest_port, node.grpc_port, node.key, pem)
        assert RestController(address).info().version
        with Rpc(address) as rpc:
            assert rpc.GetBaseInfo(Empty()).version
        for name, fine in (("node.test", True), ("localhost", True), ("other.test", False)):
            assert rest_accepts(node.rest_port, pem, name) is fine
            assert grpc_accepts(node, pem, name) is fine
        other = node.pem
        assert other != pem
        assert not rest_accepts(node.rest_port, other, "localhost")
        assert not grpc_accepts(node, other, "localhost")


def rest_accepts(port: int, pem: str, name: str) -> bool:
    try:
        with connected(port, ssl.create_default_context(cadata=pem), name):
            return True
    except ssl.SSLCertVerificationError:
        return False


def grpc_accepts(node: NodeProcess, pem: str, name: str) -> bool:
    options = [("grpc.ssl_target_name_override", name), ("grpc.use_local_subchannel_pool", 1)]
    trusted = grpc.ssl_channel_credentials(pem.encode())
    with grpc.secure_channel(f"127.0.0.1:{node.grpc_port}", trusted, options) as channel:
        call = channel.unary_unary(f"/{SERVICE.full_name}/GetBaseInfo")
        try:
            return bool(call(b"", metadata=[("x-api-key", node.key)], timeout=10))
        except grpc.RpcError as error:
            assert error.code() is grpc.StatusCode.UNAVAILABLE
            assert "verif" in error.details().lower(), error.details()
            return False


# Replacement


@contextmanager
def open_streams(node: NodeProcess) -> Iterator[list[LogReader]]:
    """Log streams of both transports that must survive on the same connection."""
    controllers = (RestController(node), RpcController(node))
    with ExitStack() as stack:
        readers = [stack.enter_context(controller.logs()) for controller in controllers]
        until(lambda: all(reader.lines for reader in readers), what="the streams are open")
        yield readers
        RestController(node).start(BACKEND)
        for reader in readers:
            reader.find("backend running")
            assert not reader.ended
    controllers[1].close()


def test_replaced_at_sighup(tmp_path: Path) -> None:
    """After SIGHUP new connections get the new pair on both transports, and open ones stay."""
    with NodeProcess(tmp_path) as node, open_streams(node):
        old, others = der(node.certificate.certificate), tmp_path / "new"
        others.mkdir()
        new = certs.make(others, NAMES)
        with Rpc(node) as before:
            assert before.GetBaseInfo(Empty()).version
            new.certificate.replace(node.certificate.certificate)
            new.key.replace(node.certificate.key)
            os.kill(node.pid, signal.SIGHUP)
            until(lambda: both_serve(node, der(node.certificate.certificate)), 15, "the new certificate is served")
            assert der(node.certificate.certificate) != old
            assert before.GetBaseInfo(Empty()).version, "a connection of before"
        assert RestController(node).info().version
        with Rpc(node) as after:
            assert after.GetBaseInfo(Empty()).version


def test_bad_pair_keeps_the_old(tmp_path: Path) -> None:
    """An invalid pair leaves the old one in use, is logged with the reason, and is replaced once it is valid."""
    with NodeProcess(tmp_path) as node, open_streams(node):
        old, right = der(node.certificate.certificate), node.certificate.key.read_bytes()
        for bad in (certs.make(_made(tmp_path / "other"), NAMES).key.read_bytes(), b"nonsense", b""):
            said = len(node.lines)
            node.certificate.key.write_bytes(bad)
            os.kill(node.pid, signal.SIGHUP)
            until(lambda said=said: complaints(node, said), 15, "the log says so")  # type: ignore[misc]
            assert both_serve(node, old)
        node.certificate.key.write_bytes(right)
        os.kill(node.pid, signal.SIGHUP)
        assert RestController(node).info().version
        assert not any("Traceback" in line for line in node.lines)
        assert not any("PRIVATE KEY" in line for line in node.lines)


def complaints(node: NodeProcess, since: int) -> list[str]:
    return [line for line in node.lines[since:] if "stays in use" in line and str(node.certificate.key) in line]


def _made(directory: Path) -> Path:
    directory.mkdir()
    return directory


@pytest.mark.slow
def test_replaced_without_a_signal(tmp_path: Path) -> None:
    """A replaced pair is served after some seconds without a signal, as after a renewal that does not know the node."""
    with NodeProcess(tmp_path) as node, open_streams(node):
        new = certs.make(_made(tmp_path / "new"), NAMES)
        expected = der(new.certificate)
        new.key.replace(node.certificate.key)
        new.certificate.replace(node.certificate.certificate)
        until(lambda: both_serve(node, expected), 20, "the new certificate is served")


# Limits


@pytest.mark.slow
def test_strangers_lock_nobody_out(tmp_path: Path) -> None:
    """With all places of REST taken by strangers, then by idle connections, a controller is served."""
    limit = Limits().max_connections
    with NodeProcess(tmp_path) as node, room_for(2 * limit), ExitStack() as stack:
        for _ in range(limit):
            stack.enter_context(socket.create_connection((node.host, node.rest_port), timeout=5))
        assert RestController(node).info().version
        context = trusting(node)
        for _ in range(limit):
            secure = stack.enter_context(connected(node.rest_port, context))
            secure.sendall(b"GET /info HTTP/1.1\r\nHost: node\r\nx-api-key: %s\r\n\r\n" % node.key.encode())
            assert secure.recv(65_536).startswith(b"HTTP/1.1 200")
        assert RestController(node).info().version
        assert sum("#warn" in line and f"connection limit ({limit})" in line for line in node.lines) == 1


@pytest.mark.parametrize("line", [b"X-Filler: " + b"x" * 1000 + b"\r\n", b"X-" + b"x" * 1000], ids=["many", "long"])
def test_headers_are_limited(node: NodeProcess, line: bytes) -> None:
    """Endless headers, by number or by length, are a bad request, after which nothing more is read."""
    with connected(node.rest_port, trusting(node)) as secure:
        secure.sendall(b"GET /info HTTP/1.1\r\n" + line * 200)
        response = http.client.HTTPResponse(secure)
        response.begin()
        assert response.status == 400
        response.read()
        with contextlib.suppress(OSError):
            secure.sendall(b"\r\nGET /info HTTP/1.1\r\nx-api-key: %s\r\n\r\n" % node.key.encode())
        assert all_of(secure) == b""
    assert RestController(node).info().version


@each_port
def test_errors_arrive(node: NodeProcess, transport: str) -> None:
    """With any number and names of refused users, and any length of a name, the caller gets the error."""
    with control(node, transport) as controller:
        controller.start(BACKEND)
        nameless = [User(email=f"{'ж' * 300}{number}", inbounds=["in"]) for number in range(60)]
        for nobody in nameless:
            nobody.proxies.vless.id = "none"
        with refused(500, "INTERNAL", "more"):
            controller.sync_users(nameless)
        with pytest.raises(ControllerError) as unknown:
            controller.stats(StatType.UserStat, "ж" * 1_000_000)
        assert unknown.value.status in ("404", "NOT_FOUND")
        assert len(unknown.value.text) < 1000
        controller.stop()


def test_many_idle_streams(node: NodeProcess) -> None:
    """A hundred open log streams on each transport do not delay other calls."""
    controllers = (RestController(node), RpcController(node))
    with ExitStack() as stack:
        readers = [stack.enter_context(controller.logs()) for controller in controllers for _ in range(100)]
        until(lambda: all(reader.lines for reader in readers), 20, "all streams are open")
        for controller in controllers:
            assert controller.info().version
    controllers[1].close()
    assert RestController(node).info().version


# The client library of deployed controllers


@asynccontextmanager
async def grpclib_channel(node: NodeProcess) -> AsyncIterator[Channel]:
    channel = Channel(node.host, node.grpc_port, ssl=trusting(node, "h2"))
    try:
        yield channel
    finally:
        channel.close()


def _path(method: str) -> str:
    return f"/{SERVICE.full_name}/{method}"


async def _calls(node: NodeProcess) -> None:
    people = [user(TestUser.new(str(number)), {"in": VLESS}) for number in range(250)]
    key = {"x-api-key": node.key}
    async with grpclib_channel(node) as channel:
        logs = UnaryStreamMethod(channel, _path("GetLogs"), Empty, Log)
        async with logs.open(metadata=key) as stream:
            await stream.send_message(Empty(), end=True)
            start = UnaryUnaryMethod(channel, _path("Start"), Backend, BaseInfoResponse)
            assert (await start(BACKEND, metadata=key)).running
            while (log := await stream.recv_message()) is not None and "backend running" not in log.detail:
                pass
            assert log is not None
            await stream.cancel()
        chunked = StreamUnaryMethod(channel, _path("SyncUsersChunked"), UsersChunk, Empty)
        assert await chunked(chunks(people), metadata=key) == Empty()
        single = StreamUnaryMethod(channel, _path("SyncUser"), User, Empty)
        async with single.open(metadata=key) as users:
            for who in people[:20]:
                await users.send_message(who)
            await users.send_message(people[20], end=True)
            assert await users.recv_message() == Empty()
        async with single.open(metadata=key) as users:
            await users.send_message(people[0])
            await users.cancel()
        info = UnaryUnaryMethod(channel, _path("GetBaseInfo"), Empty, BaseInfoResponse)
        with pytest.raises(GRPCError) as refused:
            await info(Empty(), metadata={"x-api-key": "wrong"})
        assert refused.value.status is Status.UNAUTHENTICATED
        assert (await info(Empty(), metadata={"authorization": f"Bearer {node.key}"})).running


def test_grpclib(node: NodeProcess) -> None:
    """The library of deployed controllers works for every kind of call, on one connection."""
    asyncio.run(asyncio.wait_for(_calls(node), 30))
    assert RestController(node).online("249").value == 0
