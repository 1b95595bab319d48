"""Whom the client believes over REST: the certificate that is pinned, or those that an authority signed."""

from __future__ import annotations

from typing import Any

from cryptography.x509 import load_pem_x509_certificates
from OpenSSL.crypto import X509, X509StoreFlags
from OpenSSL.SSL import Connection
from twisted.internet.interfaces import IOpenSSLClientConnectionCreator
from twisted.internet.ssl import Certificate, optionsForClientTLS, platformTrust, trustRootFromCertificates
from twisted.web.iweb import IPolicyForHTTPS
from zope.interface import implementer


@implementer(IPolicyForHTTPS)
class Trust:
    """Without `pem` the machine's authorities count. The host's name is checked in any case."""

    def __init__(self, pem: bytes | None) -> None:
        found = [] if pem is None else load_pem_x509_certificates(pem)
        pinned = [Certificate(X509.from_cryptography(certificate)) for certificate in found]
        self._root = trustRootFromCertificates(pinned) if pinned else platformTrust()

    def creatorForNetloc(self, hostname: bytes, port: int) -> IOpenSSLClientConnectionCreator:
        return _Pinning(optionsForClientTLS(hostname.decode("ascii"), trustRoot=self._root))


@implementer(IOpenSSLClientConnectionCreator)
class _Pinning:
    """Has a certificate trusted for itself where another one signed it, too, as gRPC's library does."""

    def __init__(self, creator: Any) -> None:
        self._creator = creator

    def clientConnectionForTLS(self, protocol: Any) -> Connection:
        connection: Connection = self._creator.clientConnectionForTLS(protocol)
        store = connection.get_context().get_cert_store()
        assert store is not None
        store.set_flags(X509StoreFlags.PARTIAL_CHAIN)
        return connection
