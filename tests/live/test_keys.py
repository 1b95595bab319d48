"""Keys and certificates of controllers on the real node, made by its own program and used by other clients."""

from __future__ import annotations

import datetime
import os
import signal
import socket
import ssl
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from node.api.methods import SERVICE
from scripts.staging.controller import ControllerError, RestController, RpcController
from scripts.staging.node import NodeProcess
from scripts.staging.wait import until

ROOT = Path(__file__).parents[2]
TRANSPORTS: dict[str, type[RestController | RpcController]] = {"rest": RestController, "grpc": RpcController}


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    with NodeProcess(tmp_path_factory.mktemp("keys")) as node:
        yield node


def program(node: NodeProcess, *words: str) -> str:
    """The output of `python -m node.keys`."""
    argv = [sys.executable, "-m", "node.keys", *words]
    environment = {"PATH": os.defpath, "PYTHONPATH": str(ROOT), "STATE_DIR": str(node.state)}
    return subprocess.run(argv, env=environment, cwd=node.directory, check=True, capture_output=True, text=True).stdout


def reload(node: NodeProcess) -> None:
    os.kill(node.pid, signal.SIGHUP)


def status(node: NodeProcess, transport: str, key: str) -> str:
    """The status of an info call with this key."""
    controller = TRANSPORTS[transport](node, key=key)
    try:
        controller.info()
    except ControllerError as error:
        return error.status
    finally:
        controller.close()
    return "OK"


REFUSED = {"rest": "401", "grpc": "UNAUTHENTICATED"}
LESSER = {"rest": "403", "grpc": "PERMISSION_DENIED"}


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_rotation(node: NodeProcess, transport: str) -> None:
    """A key is made, used and revoked while the node runs; its open streams end, and the other key works throughout."""
    name = f"panel-{transport}"
    key = program(node, "new", name).strip()
    assert status(node, transport, key) == REFUSED[transport]
    reload(node)
    until(lambda: status(node, transport, key) == "OK", 10, "the key opens")
    controller = TRANSPORTS[transport](node, key=key)
    with controller.logs() as reader:
        controller.stop()
        reader.find(f"[node] Stop by key {name} from 127.0.0.1")
        program(node, "revoke", name)
        reload(node)
        until(lambda: reader.ended, 10, "the stream ends")
        assert reader.error is not None
    controller.close()
    assert status(node, transport, key) == REFUSED[transport]
    assert status(node, transport, node.key) == "OK"
    assert any(f"Stop by key {name} from 127.0.0.1" in line for line in node.lines)
    assert not any(key in line for line in node.lines)


@pytest.mark.slow
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_lesser_keys(node: NodeProcess, transport: str) -> None:
    """A key to read can read, one for metrics cannot; the node rereads the file without a signal."""
    reading = program(node, "new", f"read-{transport}", "--scope", "read").strip()
    metrics = program(node, "new", f"metrics-{transport}", "--scope", "metrics").strip()
    until(lambda: any(f"metrics-{transport} (metrics)" in line for line in node.lines), 20, "the file is read")
    assert status(node, transport, reading) == "OK"
    assert status(node, transport, metrics) == LESSER[transport]
    controller = TRANSPORTS[transport](node, key=reading)
    with pytest.raises(ControllerError) as refused:
        controller.stop()
    assert refused.value.status == LESSER[transport]
    controller.close()


def test_a_broken_file(node: NodeProcess) -> None:
    """The previous keys stay valid; `info` reports that, and other users' access to the file."""
    key = program(node, "new", "broken").strip()
    reload(node)
    until(lambda: status(node, "rest", key) == "OK", 10, "the key opens")
    file = node.state / "api_keys"
    good = file.read_text()
    controller = RestController(node)
    file.write_text("nonsense\n")
    file.chmod(0o644)
    reload(node)
    until(lambda: any("line 1" in warning for warning in controller.info().warnings), 10, "a warning")
    assert any("chmod 600" in warning for warning in controller.info().warnings)
    assert status(node, "rest", key) == "OK"
    file.write_text(good)
    file.chmod(0o600)
    reload(node)
    until(lambda: not any("API_KEYS_FILE" in warning for warning in controller.info().warnings), 10, "no warning")
    controller.close()


@dataclass(frozen=True)
class Holder:
    """A certificate and its key, PEM."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey

    @property
    def pem(self) -> bytes:
        return self.certificate.public_bytes(serialization.Encoding.PEM)

    @property
    def key_pem(self) -> bytes:
        form, plain = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        return self.key.private_bytes(serialization.Encoding.PEM, form, plain)

    def file(self, directory: Path) -> Path:
        path = directory / f"{self.certificate.serial_number}.pem"
        path.write_bytes(self.key_pem + self.pem)
        return path


def holder(name: str, issuer: Holder | None = None) -> Holder:
    """An authority, or a client's certificate from one."""
    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.datetime.now(datetime.UTC)
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    builder = (
        x509.CertificateBuilder(subject_name=subject, issuer_name=issuer.certificate.subject if issuer else subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.BasicConstraints(ca=issuer is None, path_length=None), critical=True)
    )
    return Holder(builder.sign(issuer.key if issuer else key, hashes.SHA256()), key)


def rest(node: NodeProcess, shown: Path | None, key: str | None) -> str:
    """The result of an info call over REST with Python's client, this certificate and this key."""
    context = ssl.create_default_context(cadata=node.pem)
    if shown is not None:
        context.load_cert_chain(shown)
    headers = {"x-api-key": key} if key is not None else {}
    request = urllib.request.Request(f"https://127.0.0.1:{node.rest_port}/info", headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=10, context=context) as response:
            return str(response.status)
    except urllib.error.HTTPError as error:
        return str(error.code)
    except OSError:
        return "no connection"


def rpc(node: NodeProcess, shown: Holder | None, key: str | None) -> str:
    """The same over gRPC."""
    pair = (shown.key_pem, shown.pem) if shown else (None, None)
    credentials = grpc.ssl_channel_credentials(node.pem.encode(), *pair)
    options = [("grpc.use_local_subchannel_pool", 1)]
    with grpc.secure_channel(f"127.0.0.1:{node.grpc_port}", credentials, options) as channel:
        call = channel.unary_unary(f"/{SERVICE.full_name}/GetBaseInfo")
        try:
            call(b"", metadata=[("x-api-key", key)] if key is not None else [], timeout=10)
        except grpc.RpcError as error:
            return {"UNAVAILABLE": "no connection"}.get(error.code().name, str(error.code().name))
    return "OK"


@pytest.mark.parametrize("mode", ["beside", "instead"])
def test_certificates(tmp_path: Path, mode: str) -> None:
    """No client without a certificate of the authority is served, over either protocol; with one it needs a key, too.

    Another authority in the file applies from the next connection on.
    """
    old, new = holder("old"), holder("new")
    known, other = holder("panel", old), holder("panel", new)
    authorities = tmp_path / "ca.pem"
    authorities.write_bytes(old.pem)
    keyless = mode == "instead"
    settings = {"CLIENT_CA": str(authorities), "CLIENT_CERTIFICATE": mode}
    with NodeProcess(tmp_path, **settings, **({"API_KEY": ""} if keyless else {})) as node:
        key = None if keyless else node.key
        files = {one: one.file(tmp_path) for one in (known, other)}

        def served(shown: Holder | None, with_key: str | None) -> tuple[str, str]:
            return rest(node, None if shown is None else files[shown], with_key), rpc(node, shown, with_key)

        assert served(known, key) == ("200", "OK")
        assert served(known, "wrong") == ("401", "UNAUTHENTICATED")
        assert served(known, None) == (("200", "OK") if keyless else ("401", "UNAUTHENTICATED"))
        for stranger in (None, other):
            assert served(stranger, key) == ("no connection", "no connection")
        authorities.write_bytes(new.pem)
        reload(node)
        until(lambda: served(other, key) == ("200", "OK"), 10, "the new authority counts")
        assert served(known, key) == ("no connection", "no connection")


def test_no_session_is_resumed(tmp_path: Path) -> None:
    """Each handshake presents the certificate again, in both versions of TLS."""
    authority = holder("authority")
    authorities = tmp_path / "ca.pem"
    authorities.write_bytes(authority.pem)
    shown = holder("panel", authority).file(tmp_path)
    with NodeProcess(tmp_path, CLIENT_CA=str(authorities)) as node:
        for version in (ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3):
            context = ssl.create_default_context(cadata=node.pem)
            context.load_cert_chain(shown)
            context.maximum_version = version
            session = None
            for _ in range(2):
                with (
                    socket.create_connection(("127.0.0.1", node.rest_port), timeout=5) as link,
                    context.wrap_socket(link, server_hostname="localhost", session=session) as secure,
                ):
                    secure.sendall(f"GET /info HTTP/1.1\r\nHost: x\r\nx-api-key: {node.key}\r\n\r\n".encode())
                    assert secure.recv(12) == b"HTTP/1.1 200"
                    assert not secure.session_reused
                    session = secure.session


def test_the_newest_tls_alone(tmp_path: Path) -> None:
    """On both ports the node refuses TLS 1.2, and serves 1.3."""
    with NodeProcess(tmp_path, TLS_MIN="1.3") as node:
        for port in (node.rest_port, node.grpc_port):
            context = ssl.create_default_context(cadata=node.pem)
            context.set_alpn_protocols(["h2", "http/1.1"])
            with socket.create_connection(("127.0.0.1", port), timeout=5) as link:
                assert context.wrap_socket(link, server_hostname="localhost").version() == "TLSv1.3"
            context.maximum_version = ssl.TLSVersion.TLSv1_2
            with (
                socket.create_connection(("127.0.0.1", port), timeout=5) as link,
                pytest.raises(ssl.SSLError, match="PROTOCOL_VERSION"),
            ):
                context.wrap_socket(link, server_hostname="localhost")
