"""The TLS endpoint of a node, for REST: with a pinned certificate, or one that an authority has signed."""

from __future__ import annotations

from typing import Any

from cryptography.x509 import load_pem_x509_certificates
from OpenSSL.crypto import X509, X509StoreFlags
from OpenSSL.SSL import Connection
from twisted.internet.endpoints import HostnameEndpoint, wrapClientTLS
from twisted.internet.interfaces import IOpenSSLClientConnectionCreator, IReactorTime, IStreamClientEndpoint
from twisted.internet.ssl import Certificate, optionsForClientTLS, platformTrust, trustRootFromCertificates
from twisted.web.client import URI
from twisted.web.iweb import IAgentEndpointFactory
from zope.interface import implementer


@implementer(IAgentEndpointFactory)
class TlsEndpointFactory:
    """Connects to this host, whatever the URL, and checks `name`. Without `pem` it trusts the machine's authorities."""

    def __init__(self, reactor: IReactorTime, host: str, port: int, name: str, pem: bytes | None) -> None:
        self._reactor = reactor
        self._name = name
        self._address = host, port
        found = [] if pem is None else load_pem_x509_certificates(pem)
        pinned = [Certificate(X509.from_cryptography(certificate)) for certificate in found]
        self._root = trustRootFromCertificates(pinned) if pinned else platformTrust()

    def endpointForURI(self, uri: URI) -> IStreamClientEndpoint:
        host, port = self._address
        trusting = _Pinning(optionsForClientTLS(self._name, trustRoot=self._root))
        return wrapClientTLS(trusting, HostnameEndpoint(self._reactor, host, port))


@implementer(IOpenSSLClientConnectionCreator)
class _Pinning:
    """Trusts a pinned certificate also if another one has signed it, as gRPC's library does."""

    def __init__(self, creator: Any) -> None:
        self._creator = creator

    def clientConnectionForTLS(self, protocol: Any) -> Connection:
        connection: Connection = self._creator.clientConnectionForTLS(protocol)
        store = connection.get_context().get_cert_store()
        assert store is not None
        store.set_flags(X509StoreFlags.PARTIAL_CHAIN)
        return connection
