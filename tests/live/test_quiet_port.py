"""A port that turns strangers away: clients that know its name get in over both protocols, others see no node."""

from __future__ import annotations

import http.client
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Literal

import grpc
import pytest
from cryptography import x509

from node.api.auth import Dialect
from node.certificate import ensure, names_of
from node.client import Client, DeadlineExceeded, Target, Unreachable
from node.keys.keyfile import door_name
from protos.service_pb2 import BaseInfoResponse
from scripts.attack import scanner
from scripts.staging import certs
from scripts.staging.node import NodeProcess
from tests.harness.strangers import blind
from tests.live.test_client import ask
from tests.live.test_transport import der, served

INFO = "/service.NodeService/GetBaseInfo"

each_way = pytest.mark.parametrize("strangers", ["close", "decoy"])
each_transport = pytest.mark.parametrize("transport", ["rest", "grpc"])


class Page(BaseHTTPRequestHandler):
    """A site with one page."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        body = b"Welcome" if self.path == "/" else b"nothing here"
        self.send_response(200 if self.path == "/" else 404)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Log nothing."""


class Website(ThreadingHTTPServer):
    """A web server with TLS; it shakes hands in the thread of each connection."""

    def __init__(self, directory: Path) -> None:
        super().__init__(("127.0.0.1", 0), Page)
        self.certificate = certs.make(directory, ["www.example"])
        self._tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._tls.load_cert_chain(self.certificate.certificate, self.certificate.key)
        self._tls.set_alpn_protocols(["http/1.1"])

    def finish_request(self, request: socket.socket, client_address: tuple[str, int]) -> None:  # type: ignore[override]
        with self._tls.wrap_socket(request.dup(), server_side=True) as link:
            Page(link, client_address, self)

    def handle_error(self, *_: object) -> None:
        """Strangers' errors are not of interest."""


@pytest.fixture(scope="module")
def website(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Website]:
    with Website(tmp_path_factory.mktemp("website")) as site:
        threading.Thread(target=site.serve_forever, daemon=True).start()
        yield site
        site.shutdown()


@contextmanager
def quiet(directory: Path, website: Website, strangers: str, name: str = "auto") -> Iterator[NodeProcess]:
    """A node whose certificate is also for the name that is made of its key."""
    decoy = f"127.0.0.1:{website.server_port}" if strangers == "decoy" else ""
    node = NodeProcess(directory, STRANGERS=strangers, DOOR_NAME=name, DECOY=decoy)
    node.certificate = certs.make(directory, ["localhost", "127.0.0.1", door_name(node.key)])
    with node:
        yield node


def target(node: NodeProcess, transport: Literal["rest", "grpc"], name: str = "auto") -> Target:
    port = node.rest_port if transport == "rest" else node.grpc_port
    return Target(transport, node.host, port, node.key, node.pem, certificate_name=name)


async def info(client: Client) -> str:
    return (await client.info()).version


def refused(link: Callable[[], object]) -> bool:
    """Whether the server ends the connection during the handshake, without a byte."""
    with pytest.raises((ssl.SSLEOFError, ConnectionResetError)):
        link()
    return True


@each_way
@each_transport
def test_our_client(strangers: str, transport: Literal["rest", "grpc"], tmp_path: Path, website: Website) -> None:
    """It makes the name of the key, asks by it, and checks the certificate; with another name it does not get in."""
    with quiet(tmp_path, website, strangers) as node:
        own = target(node, transport)
        for dialect in Dialect:
            assert ask(replace(own, dialect=dialect), info)
        (tmp_path / "other").mkdir()
        other = certs.make(tmp_path / "other", ["other", door_name(node.key)]).certificate
        for bad in (target(node, transport, "localhost"), replace(own, trust=other)):
            with pytest.raises((Unreachable, DeadlineExceeded)):
                ask(bad, info, 3)


@each_way
def test_on_the_machine(strangers: str, tmp_path: Path, website: Website) -> None:
    """The check of readiness and nodectl find the name in the node's settings; the certificate that it makes has it."""
    with quiet(tmp_path, website, strangers) as node:
        for command in (
            ["node.ready"],
            ["node.nodectl", "info"],
            ["node.nodectl", "certificate", "make", "--dir", "new"],
        ):
            argv = [sys.executable, "-m", *command]
            done = subprocess.run(argv, env=node.environment, cwd=tmp_path, check=False, capture_output=True, text=True)
            assert done.returncode == 0, (command, done.stdout, done.stderr)
        made = (tmp_path / "new" / "certificate.pem").read_bytes()
        assert door_name(node.key) in names_of(x509.load_pem_x509_certificate(made))


@each_way
def test_other_clients(strangers: str, tmp_path: Path, website: Website, monkeypatch: pytest.MonkeyPatch) -> None:
    """A panel that knows the node by the secret host name gets in with the usual libraries, over each protocol."""
    # A machine may know no name. gRPC resolves this one itself.
    connect = socket.create_connection
    monkeypatch.setattr(socket, "create_connection", lambda to, *more, **by: connect(("127.0.0.1", to[1]), *more, **by))
    with quiet(tmp_path, website, strangers, "localhost") as node:
        context = ssl.create_default_context(cadata=node.pem)
        for port in (node.rest_port, node.grpc_port):
            with closing(http.client.HTTPSConnection("LocalHost", port, timeout=10, context=context)) as link:
                link.request("GET", "/info", headers={"x-api-key": node.key})
                assert link.getresponse().status == 200
            with grpc.secure_channel(f"localhost:{port}", grpc.ssl_channel_credentials(node.pem.encode())) as channel:
                call = channel.unary_unary(INFO, response_deserializer=BaseInfoResponse.FromString)
                assert call(b"", metadata=(("x-api-key", node.key),), timeout=10).version


@each_way
def test_strangers(strangers: str, tmp_path: Path, website: Website) -> None:
    """Without the name they get nothing, or the certificate and the pages of the website; the log has one line."""
    with quiet(tmp_path, website, strangers) as node:
        for port in (node.rest_port, node.grpc_port):
            if strangers == "close":
                assert refused(lambda port=port: served(port))  # type: ignore[misc]
                continue
            assert served(port) == der(website.certificate.certificate)
            with closing(http.client.HTTPSConnection("127.0.0.1", port, timeout=10, context=blind())) as link:
                for path, text in (("/", b"Welcome"), ("/info", b"nothing here")):
                    link.request("GET", path, headers={"x-api-key": node.key})
                    assert link.getresponse().read() == text
        assert ask(target(node, "grpc"), info)
        said = [line for line in node.lines if "DOOR_NAME" in line]
        assert len(said) == 1
        assert door_name(node.key) not in "".join(node.lines)


def test_a_scanner_of_a_port_that_answers(tmp_path: Path) -> None:
    """No probe shows the program's name or a text of its own, on either port."""
    node = NodeProcess(tmp_path)
    made = ensure(tmp_path / "made", ["localhost", "127.0.0.1"])
    made.certificate.replace(node.certificate.certificate)
    made.key.replace(node.certificate.key)
    with node:
        scanner.scan(node)
        seen = scanner.requests(scanner.Port(node.host, node.rest_port))
        assert all(reply.startswith(b"HTTP/1.1 404 Not Found\r\n") and reply.endswith(b"\r\n\r\n") for reply in seen)


def test_a_scanner_of_a_closed_port(tmp_path: Path, website: Website) -> None:
    """No probe gets a byte, on either port."""
    with quiet(tmp_path, website, "close") as node:
        for port in (node.rest_port, node.grpc_port):
            for name, sight in scanner.sights(scanner.Port(node.host, port)).items():
                assert set(sight) == {scanner.CLOSED}, name


@pytest.mark.slow
def test_a_scanner_of_a_decoy(tmp_path: Path, website: Website) -> None:
    """No probe tells either port from the website behind it."""
    with quiet(tmp_path, website, "decoy") as node:
        ports = node.rest_port, node.grpc_port, website.server_port
        with ThreadPoolExecutor(3) as pool:
            seen = list(pool.map(lambda port: scanner.sights(scanner.Port(node.host, port)), ports))
        assert len(scanner.PROBES) == 10
        for name in scanner.PROBES:
            assert seen[0][name] == seen[1][name] == seen[2][name], name
