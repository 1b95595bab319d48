"""The certificate chain and key of the ports, read from two files and reloaded without a restart.

A new connection gets the pair that is current at that moment; open connections keep theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
)
from OpenSSL import SSL
from OpenSSL.crypto import X509
from twisted.internet.interfaces import IOpenSSLServerConnectionCreator
from zope.interface import implementer

from node.base.file_watch import Files

# The order of ALPN protocols on a port: the first one that a client offers is chosen.
REST_FIRST = (b"http/1.1", b"h2")
GRPC_FIRST = (b"h2", b"http/1.1")
# Begins the subject of certificates that earlier versions made.
_PRODUCT = "CN=txnode "
_CURVES = ("secp256r1", "secp384r1", "secp521r1")  # gRPC clients accept no others (tested)

PrivateKey = ec.EllipticCurvePrivateKey | ed25519.Ed25519PrivateKey | rsa.RSAPrivateKey
Protocols = tuple[bytes, ...]


class BadPair(Exception):
    """The certificate and key cannot be served. The text names the file and says what to do."""


@dataclass(frozen=True)
class Pair:
    """A certificate chain, the server's own first, and its key; both PEM."""

    chain: bytes
    key: bytes

    def __repr__(self) -> str:
        return "<Pair>"  # no key in logs and tracebacks


@dataclass(frozen=True)
class Demands:
    """Requirements for clients: a certificate of one of these authorities, and TLS 1.3."""

    authorities: Path | None = None
    newest: bool = False


@dataclass(frozen=True, repr=False)
class _Served:
    """The pair that new connections get, and its TLS contexts by order of protocols."""

    pair: Pair
    authorities: bytes
    # When the certificate expires, as a Unix time.
    expires: float
    contexts: dict[Protocols, SSL.Context]


def read_pair(cert_file: Path, key_file: Path) -> Pair:
    """Read and check the two files: PEM, unencrypted, a matching pair, the server's own certificate first.

    Raises BadPair.
    """
    chain, publics = _chain(cert_file)
    key = _key(key_file)
    public = _spki(key.public_key())
    if public not in publics:
        raise BadPair(f"{key_file} is not the key of the certificate in {cert_file}: give the two that belong together")
    if public != publics[0]:
        raise BadPair(
            f"{cert_file} does not begin with the server's own certificate: put that first, the intermediates after it"
        )
    return Pair(chain, key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))


def _read(file: Path, setting: str) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise BadPair(
            f"{setting}: cannot read {file}: {error.strerror}; correct the path or let the node's user read it"
        ) from error


def _chain(file: Path) -> tuple[bytes, list[bytes]]:
    """Return the certificates without other text around them, and the public key of each."""
    data = _read(file, "SSL_CERT_FILE")
    try:
        chain = x509.load_pem_x509_certificates(data)
        publics = [_spki(certificate.public_key()) for certificate in chain]
    except (ValueError, UnsupportedAlgorithm, x509.InvalidVersion) as error:
        raise BadPair(f"{file} is not a PEM certificate chain: {error}; convert it with `openssl x509`") from error
    return b"".join(certificate.public_bytes(Encoding.PEM) for certificate in chain), publics


def _key(file: Path) -> PrivateKey:
    data = _read(file, "SSL_KEY_FILE")
    try:
        key = load_pem_private_key(data, None)
    except TypeError as error:
        raise BadPair(f"{file} is encrypted: decrypt it with `openssl pkey`; the node takes no passphrase") from error
    except (ValueError, UnsupportedAlgorithm) as error:
        raise BadPair(f"{file} is not a PEM private key; convert it with `openssl pkey`") from error
    odd_curve = isinstance(key, ec.EllipticCurvePrivateKey) and key.curve.name not in _CURVES
    if odd_curve or not isinstance(key, PrivateKey):
        raise BadPair(f"{file} has a type of key that TLS clients do not accept: use EC (P-256), RSA or Ed25519")
    return key


def read_authorities(file: Path | None) -> bytes:
    """Read the authorities of clients' certificates, PEM; empty if clients need none. Raises BadPair."""
    if file is None:
        return b""
    data = _read(file, "CLIENT_CA")
    try:
        return b"".join(one.public_bytes(Encoding.PEM) for one in x509.load_pem_x509_certificates(data))
    except (ValueError, x509.InvalidVersion) as error:
        raise BadPair(f"CLIENT_CA: {file} has no PEM certificates: {error}") from error


def _spki(key: Any) -> bytes:
    spki: bytes = key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    return spki


def _chooser(protocols: Protocols) -> Callable[[SSL.Connection, Sequence[bytes]], Any]:
    """Return an ALPN callback that chooses the first of these that is offered; without one the connection goes on."""

    def choose(_: SSL.Connection, offered: Sequence[bytes]) -> Any:
        return next((name for name in protocols if name in offered), SSL.NO_OVERLAPPING_PROTOCOLS)

    return choose


class _Context(SSL.Context):
    """A context whose ALPN callback stays: some versions of Twisted set the factory's at every connection."""

    def set_alpn_select_callback(self, callback: Any) -> None:
        pass

    def set_alpn_protos(self, protos: Any) -> None:
        pass


def _demand_certificate(context: SSL.Context, authorities: bytes) -> None:
    """Require a client certificate in every handshake. Sessions are not resumed: those would skip the check."""
    store = context.get_cert_store()
    assert store is not None
    for authority in x509.load_pem_x509_certificates(authorities):
        store.add_cert(X509.from_cryptography(authority))
    context.set_verify(SSL.VERIFY_PEER | SSL.VERIFY_FAIL_IF_NO_PEER_CERT)
    context.set_session_cache_mode(SSL.SESS_CACHE_OFF)
    context.set_options(SSL.OP_NO_TICKET)
    context.set_session_id(b"node")


def _context(
    pair: Pair, cert_file: Path, protocols: Protocols, authorities: bytes = b"", newest: bool = False
) -> SSL.Context:
    context = _Context(SSL.TLS_SERVER_METHOD)
    context.set_min_proto_version(SSL.TLS1_3_VERSION if newest else SSL.TLS1_2_VERSION)
    if authorities:
        _demand_certificate(context, authorities)
    context.set_mode(SSL.MODE_RELEASE_BUFFERS)  # log streams are idle for hours
    SSL.Context.set_alpn_select_callback(context, _chooser(protocols))
    own, *intermediates = x509.load_pem_x509_certificates(pair.chain)
    key = load_pem_private_key(pair.key, None)
    assert isinstance(key, PrivateKey)
    try:
        context.use_certificate(own)
        for certificate in intermediates:
            context.add_extra_chain_cert(certificate)
        context.use_privatekey(key)
    except SSL.Error as error:
        raise BadPair(f"{cert_file} is refused by OpenSSL: {error}; get a stronger certificate") from error
    # For TLS 1.2; all ciphers of 1.3 are good. Last, because pyOpenSSL counts the context as used from here on.
    context.set_cipher_list(b"ECDHE+AESGCM:ECDHE+CHACHA20")
    return context


class Certificates(Files):
    """The pair that both ports serve, reloaded when its files change: TLS 1.2 and 1.3, the whole chain."""

    def __init__(
        self,
        cert_file: Path,
        key_file: Path,
        demands: Demands | None = None,
        reloaded: Callable[[str], None] = lambda _: None,
    ) -> None:
        files = (cert_file, key_file, demands.authorities if demands else None)
        super().__init__(filter(None, files), "the previous certificate stays in use", BadPair, reloaded)
        self._cert_file = cert_file
        self._key_file = key_file
        self._demands = demands or Demands()
        self._served: _Served | None = None

    def make(self) -> None:
        """Read the files and serve the pair to new connections. Raises BadPair."""
        pair = read_pair(self._cert_file, self._key_file)
        authorities = read_authorities(self._demands.authorities)
        if self._served is None or (pair, authorities) != (self._served.pair, self._served.authorities):
            self._served = self._made(pair, authorities)
        self._report(pair)

    @property
    def current(self) -> _Served:
        """The pair and the contexts for a new connection. Raises RuntimeError before the first `load`."""
        if self._served is None:
            raise RuntimeError("no certificate was loaded: call load() first")
        return self._served

    def _made(self, pair: Pair, authorities: bytes) -> _Served:
        newest, orders = self._demands.newest, (REST_FIRST, GRPC_FIRST)
        contexts: dict[Protocols, SSL.Context] = {
            order: _context(pair, self._cert_file, order, authorities, newest) for order in orders
        }
        return _Served(pair, authorities, _end_of(pair).timestamp(), contexts)

    def _report(self, pair: Pair) -> None:
        end = _end_of(pair)
        if end > datetime.now(UTC):
            self.log.info("serving {file}, valid until {end}", file=str(self._cert_file), end=str(end))
        else:
            text = "{file} expired at {end}: clients refuse it until it is renewed"
            self.log.warn(text, file=str(self._cert_file), end=str(end))
        if _own(pair).subject.rfc4514_string().startswith(_PRODUCT):
            text = "{file} names this program to strangers; `nodectl certificate make --force` makes one that does not"
            self.log.info(text + ", which controllers then need", file=str(self._cert_file))


def _own(pair: Pair) -> x509.Certificate:
    return x509.load_pem_x509_certificate(pair.chain)


def _end_of(pair: Pair) -> datetime:
    return _own(pair).not_valid_after_utc


@implementer(IOpenSSLServerConnectionCreator)
class ContextFactory:
    """Gives every new connection the current certificate; for `TLSMemoryBIOFactory`."""

    def __init__(self, certificates: Certificates, protocols: Protocols) -> None:
        self._certificates = certificates
        self._protocols = protocols

    def serverConnectionForTLS(self, tlsProtocol: object) -> SSL.Connection:  # noqa: N803 - the interface's name
        return SSL.Connection(self._certificates.current.contexts[self._protocols], None)
