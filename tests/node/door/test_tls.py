"""TLS over loopback: a Twisted listener with a Site, and the pair of files that it serves."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NoReturn

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import NameOID
from twisted.internet.endpoints import SSL4ServerEndpoint
from twisted.internet.task import Clock
from twisted.internet.threads import deferToThread
from twisted.logger import capturedLogs, formatEvent
from twisted.trial.unittest import TestCase
from twisted.web.resource import Resource
from twisted.web.server import Site

from node.base.file_watch import FileWatch
from node.certificate import ensure
from node.door import tls
from node.door.tls import REST_FIRST, BadPair, Certificates, ContextFactory, read_pair
from scripts.staging.ports import free_port

pytestmark = pytest.mark.filterwarnings("ignore:ssl.TLSVersion.TLSv1_1 is deprecated")

Key = ec.EllipticCurvePrivateKey
TIMEOUT = 10


class Files:
    """The two files of a node, and other pairs to replace them with."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.cert = directory / "cert.pem"
        self.key = directory / "key.pem"
        self.put(*self.fresh("first"))

    def fresh(self, name: str) -> tuple[bytes, bytes]:
        made = ensure(self.directory / name, (), lambda: ["localhost", "127.0.0.1"])
        return made.certificate.read_bytes(), made.key.read_bytes()

    def put(self, cert: bytes, key: bytes) -> None:
        for path, data in ((self.cert, cert), (self.key, key)):
            new = path.with_suffix(".new")
            new.write_bytes(data)
            new.replace(path)

    def certificates(self) -> Certificates:
        certificates = Certificates(self.cert, self.key)
        certificates.load()
        return certificates


def key_pem(key: Key, password: bytes | None = None) -> bytes:
    encryption = BestAvailableEncryption(password) if password else NoEncryption()
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, encryption)


def issue(name: str, key: Key, issuer: str, issuer_key: Key, ca: bool) -> bytes:
    """A certificate of `name`, signed by `issuer`."""

    def called(text: str) -> x509.Name:
        return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])

    now = datetime.now(UTC)
    builder = x509.CertificateBuilder(called(issuer), called(name), key.public_key(), x509.random_serial_number())
    builder = builder.not_valid_before(now - timedelta(days=1)).not_valid_after(now + timedelta(days=1))
    builder = builder.add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
    builder = builder.add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
    return builder.sign(issuer_key, hashes.SHA256()).public_bytes(Encoding.PEM)


def chain_of_three() -> tuple[bytes, bytes, bytes, bytes]:
    """Root, intermediate and the server's own certificate, and its key."""
    root, middle, own = (ec.generate_private_key(ec.SECP256R1()) for _ in range(3))
    return (
        issue("root", root, "root", root, ca=True),
        issue("middle", middle, "root", root, ca=True),
        issue("localhost", own, "middle", middle, ca=False),
        key_pem(own),
    )


def client(pem: bytes, alpn: list[str] | None = None) -> ssl.SSLContext:
    """Trusts `pem` alone, with host-name checking."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(cadata=pem.decode())
    if alpn is not None:
        context.set_alpn_protocols(alpn)
    return context


def only(context: ssl.SSLContext, version: ssl.TLSVersion) -> ssl.SSLContext:
    # Allow old versions, which distributions forbid their clients: the server has to refuse them.
    context.set_ciphers("ALL:@SECLEVEL=0")
    context.minimum_version = context.maximum_version = version
    return context


def connect(port: int, context: ssl.SSLContext) -> ssl.SSLSocket:
    raw = socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT)
    try:
        return context.wrap_socket(raw, server_hostname="localhost")
    except BaseException:
        raw.close()
        raise


def seen(link: ssl.SSLSocket) -> bytes:
    return ssl.DER_cert_to_PEM_cert(link.getpeercert(binary_form=True) or b"").encode()


def get(link: ssl.SSLSocket) -> bytes:
    """One HTTP/1.1 exchange on a connection that stays open."""
    link.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
    answer = b""
    while not answer.endswith(b"hello"):
        data = link.recv(65536)
        assert data, answer
        answer += data
    return answer.splitlines()[0]


def refuse_1_1(port: int, pem: bytes, alpn: list[str], reason: str) -> None:
    with pytest.raises(ssl.SSLError, match=reason):
        connect(port, only(client(pem, alpn), ssl.TLSVersion.TLSv1_1))


def accept(port: int, pem: bytes, alpn: list[str], version: ssl.TLSVersion, name: str) -> None:
    with connect(port, only(client(pem, alpn), version)) as link:
        assert link.version() == name


class Hello(Resource):
    isLeaf = True  # noqa: N815 - Twisted's name

    def render_GET(self, request: Any) -> bytes:
        return b"hello"


class EagerSite(Site):
    """What twisted.web's own Site is once `h2` and `priority` are installed."""

    def acceptableProtocols(self) -> list[bytes]:
        return [b"h2", b"http/1.1"]


class TwistedTests(TestCase):
    """A listening endpoint with a Site that would choose h2 if it could."""

    timeout = 60

    def setUp(self) -> None:
        directory = TemporaryDirectory()
        self.addCleanup(directory.cleanup)
        self.files = Files(Path(directory.name))

    async def listen(self, certificates: Certificates) -> int:
        from twisted.internet import reactor

        port = free_port()
        endpoint = SSL4ServerEndpoint(reactor, port, ContextFactory(certificates, REST_FIRST), interface="127.0.0.1")
        listening = await endpoint.listen(EagerSite(Hello()))
        self.addCleanup(listening.stopListening)
        return port

    async def off(self, function: Callable[..., Any], *args: Any) -> Any:
        """Run a blocking client beside the reactor."""
        return await deferToThread(function, *args)

    async def test_versions(self) -> None:
        """TLS 1.1 is refused, with the error for its version; 1.2 and 1.3 are served."""
        port = await self.listen(self.files.certificates())
        pem = self.files.cert.read_bytes()
        await self.off(refuse_1_1, port, pem, ["http/1.1"], "TLSV1_ALERT_PROTOCOL_VERSION")
        await self.off(accept, port, pem, ["http/1.1"], ssl.TLSVersion.TLSv1_2, "TLSv1.2")
        await self.off(accept, port, pem, ["http/1.1"], ssl.TLSVersion.TLSv1_3, "TLSv1.3")

    async def test_alpn(self) -> None:
        """The first protocol of the port's that is offered is chosen; a connection needs none."""
        port = await self.listen(self.files.certificates())
        pem = self.files.cert.read_bytes()

        def talk(alpn: list[str] | None) -> tuple[str | None, bytes]:
            with connect(port, client(pem, alpn)) as link:
                chosen = link.selected_alpn_protocol()
                return chosen, b"" if chosen == "h2" else get(link)

        offers: list[tuple[list[str] | None, str | None]] = [
            (None, None),
            (["http/1.1"], "http/1.1"),
            (["h2", "http/1.1"], "http/1.1"),
            (["h2"], "h2"),
            (["spdy/3"], None),
        ]
        for offered, chosen in offers:
            answer = b"" if chosen == "h2" else b"HTTP/1.1 200 OK"
            self.assertEqual(await self.off(talk, offered), (chosen, answer), offered)

    async def test_the_whole_chain(self) -> None:
        """A client that knows only the root verifies: the intermediate is sent. Without it in the file, that fails."""
        root, middle, own, key = chain_of_three()
        self.files.put(own + middle, key)
        certificates = self.files.certificates()
        port = await self.listen(certificates)
        await self.off(accept, port, root, [], ssl.TLSVersion.TLSv1_3, "TLSv1.3")
        self.files.put(own, key)
        certificates.reload()
        with self.assertRaises(ssl.SSLCertVerificationError):
            await self.off(connect, port, client(root))

    async def test_reload(self) -> None:
        """After a reload an open connection goes on and a new one gets the new certificate."""
        certificates = self.files.certificates()
        port = await self.listen(certificates)
        old, new = self.files.cert.read_bytes(), self.files.fresh("second")
        link = await self.off(connect, port, client(old))
        self.addCleanup(link.close)
        await self.off(get, link)
        self.files.put(*new)
        self.assertTrue(certificates.reload())
        self.assertEqual(await self.off(get, link), b"HTTP/1.1 200 OK")
        other = await self.off(connect, port, client(new[0]))
        self.addCleanup(other.close)
        self.assertEqual((seen(link), seen(other)), (old, new[0]))

    async def test_a_bad_pair(self) -> None:
        """After a reload of a bad pair new connections get the old certificate."""
        certificates = self.files.certificates()
        port = await self.listen(certificates)
        old = self.files.cert.read_bytes()
        self.files.cert.write_bytes(b"half a")
        self.assertFalse(certificates.reload())
        with await self.off(connect, port, client(old)) as link:
            self.assertEqual(await self.off(get, link), b"HTTP/1.1 200 OK")


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


def test_the_client_of_these_tests_speaks_1_1(files: Files) -> None:
    """The refusals above are the servers': the same client connects to one that allows TLS 1.1."""
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(files.cert, files.key)
    only(server, ssl.TLSVersion.TLSv1_1)
    with socket.create_server(("127.0.0.1", free_port())) as listening, ThreadPoolExecutor(1) as pool:
        listening.settimeout(TIMEOUT)
        served = pool.submit(lambda: server.wrap_socket(listening.accept()[0], server_side=True).close())
        accept(listening.getsockname()[1], files.cert.read_bytes(), [], ssl.TLSVersion.TLSv1_1, "TLSv1.1")
        served.result(TIMEOUT)


def not_pem(files: Files) -> None:
    files.cert.write_bytes(b"\x30\x82")


def empty_key(files: Files) -> None:
    files.key.write_bytes(b"")


def anothers_key(files: Files) -> None:
    files.key.write_bytes(files.fresh("other")[1])


def encrypted(files: Files) -> None:
    key = load_pem_private_key(files.key.read_bytes(), None)
    assert isinstance(key, Key)
    files.key.write_bytes(key_pem(key, b"secret"))


def gone(files: Files) -> None:
    files.key.unlink()


def upside_down(files: Files) -> None:
    _, middle, own, key = chain_of_three()
    files.put(middle + own, key)


def odd_curve(files: Files) -> None:
    key = ec.generate_private_key(ec.SECP256K1())
    files.put(issue("x", key, "x", key, ca=True), key_pem(key))


BAD: list[tuple[Callable[[Files], None], str]] = [
    (not_pem, r"cert\.pem is not a PEM certificate chain.*convert it"),
    (empty_key, r"key\.pem is not a PEM private key.*convert it"),
    (anothers_key, r"key\.pem is not the key of the certificate in .*cert\.pem: give the two"),
    (encrypted, r"key\.pem is encrypted: decrypt it"),
    (gone, r"SSL_KEY_FILE: cannot read .*key\.pem: No such file.*correct the path"),
    (upside_down, r"cert\.pem does not begin with the server's own certificate: put that first"),
    (odd_curve, r"key\.pem has a type of key .*: use EC"),
]


@pytest.mark.parametrize(("spoil", "text"), BAD, ids=[spoil.__name__ for spoil, _ in BAD])
def test_a_bad_pair_is_explained_and_not_served(files: Files, spoil: Callable[[Files], None], text: str) -> None:
    """The error names the file and the remedy; a reload logs it once, returns False and keeps the old pair."""
    certificates = files.certificates()
    before = certificates.current
    spoil(files)
    with pytest.raises(BadPair, match=text):
        read_pair(files.cert, files.key)
    with capturedLogs() as logged:
        assert not certificates.reload()
    assert [event["log_level"].name for event in logged] == ["error"]
    assert certificates.current is before


def test_nothing_is_served_before_it_is_loaded(files: Files) -> None:
    """Before the first load, there is no certificate."""
    with pytest.raises(RuntimeError, match=r"call load\(\) first"):
        print(Certificates(files.cert, files.key).current)


def test_a_key_is_not_shown(files: Files) -> None:
    """Neither the key nor its file's text is in the representation of a pair, for logs and tracebacks."""
    pair = read_pair(files.cert, files.key)
    assert repr(pair) == "<Pair>"


def test_an_expired_certificate_is_served_with_a_warning(files: Files) -> None:
    """An expired certificate is loaded, with a warning: a node must stay reachable for clients that ignore it."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "x")])
    past = datetime.now(UTC) - timedelta(days=9)
    builder = x509.CertificateBuilder(name, name, key.public_key(), 7, past, past + timedelta(days=1))
    files.put(builder.sign(key, hashes.SHA256()).public_bytes(Encoding.PEM), key_pem(key))
    with capturedLogs() as logged:
        files.certificates()
    assert [event["log_level"].name for event in logged] == ["warn"]


def test_a_certificate_that_names_the_product(files: Files) -> None:
    """Earlier versions made such ones, and controllers may have pinned them: they are served, and the log says more."""
    key = ec.generate_private_key(ec.SECP256R1())
    name, now = x509.Name.from_rfc4514_string("CN=txnode 0123456789ab"), datetime.now(UTC)
    builder = x509.CertificateBuilder(name, name, key.public_key(), 7, now, now + timedelta(days=1))
    files.put(builder.sign(key, hashes.SHA256()).public_bytes(Encoding.PEM), key_pem(key))
    with capturedLogs() as logged:
        files.certificates()
    assert "nodectl certificate make --force" in formatEvent(logged[-1])


def of_version(pem: bytes, version: int) -> bytes:
    """Return the certificate with another version of X.509; its signature is not valid then."""
    der = ssl.PEM_cert_to_DER_cert(pem.decode())
    third = bytes((0xA0, 3, 2, 1, 2))
    assert der.count(third) == 1
    return ssl.DER_cert_to_PEM_cert(der.replace(third, third[:-1] + bytes((version - 1,)))).encode()


class WatchTests(TestCase):
    """Periodic checks of the files."""

    def setUp(self) -> None:
        directory = TemporaryDirectory()
        self.addCleanup(directory.cleanup)
        self.files = Files(Path(directory.name))
        self.certificates = self.files.certificates()
        self.clock = Clock()
        self.watch = FileWatch("a new certificate", self.certificates, self.clock)
        self.watch.start()
        self.addCleanup(self.watch.stop)

    def test_files_that_stay(self) -> None:
        """Unchanged files are not loaded."""
        before = self.certificates.current
        self.clock.pump([10, 10])
        self.assertIs(self.certificates.current, before)

    def test_files_that_are_the_same(self) -> None:
        """Files that were rewritten with the same content are loaded, and change nothing for new connections."""
        before = self.certificates.current
        self.files.put(self.files.cert.read_bytes(), self.files.key.read_bytes())
        self.assertTrue(self.certificates.changed())
        self.clock.advance(10)
        self.assertFalse(self.certificates.changed())
        self.assertIs(self.certificates.current, before)

    def test_a_renewal(self) -> None:
        """New files are served after the next check."""
        new = self.files.fresh("second")
        self.files.put(*new)
        self.assertTrue(self.certificates.changed())
        self.clock.advance(10)
        self.assertEqual(self.certificates.current.pair.chain, new[0])
        self.assertFalse(self.certificates.changed())

    def test_a_certificate_of_an_unknown_version(self) -> None:
        """It is refused like any other bad one: once in the log, and in `info` until there is a good one."""
        cert, key = self.files.fresh("second")
        self.files.put(of_version(cert, 8), key)
        with capturedLogs() as logged:
            self.clock.pump([10, 10, 10])
        self.assertEqual([event["log_level"].name for event in logged], ["error"])
        [warning] = self.watch.warnings
        self.assertIn("X509 version", warning)
        self.files.put(cert, key)
        self.clock.advance(10)
        self.assertEqual(self.watch.warnings, [])
        self.assertEqual(self.certificates.current.pair.chain, cert)

    def test_a_check_with_an_unforeseen_error(self) -> None:
        """`info` reports it, and the next check takes place."""
        new = self.files.fresh("second")
        self.files.put(*new)
        read = tls.read_pair

        def fail(cert_file: Path, key_file: Path) -> NoReturn:
            raise KeyError("odd")

        self.patch(tls, "read_pair", fail)
        self.clock.pump([10, 10])
        self.assertEqual(len(self.watch.warnings), 1)
        self.assertEqual(len(self.flushLoggedErrors(KeyError)), 1)
        self.patch(tls, "read_pair", read)
        self.clock.advance(10)
        self.assertEqual(self.watch.warnings, [])
        self.assertEqual(self.certificates.current.pair.chain, new[0])

    def test_a_renewal_caught_half_way(self) -> None:
        """A certificate that came before its key is one error, not one at every check, and is served with its key."""
        cert, key = self.files.fresh("second")
        self.files.cert.write_bytes(cert)
        with capturedLogs() as logged:
            self.clock.pump([10, 10, 10])
        self.assertEqual(len(logged), 1)
        self.files.key.write_bytes(key)
        self.clock.advance(10)
        self.assertEqual(self.certificates.current.pair.chain, cert)
