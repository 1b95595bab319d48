"""The first bytes of a connection decide its protocol, whichever port it came to."""

from __future__ import annotations

from typing import Any

from twisted.internet.interfaces import IAddress, IHandshakeListener, IOpenSSLServerConnectionCreator
from twisted.internet.protocol import Factory, Protocol, connectionDone
from twisted.protocols.tls import TLSMemoryBIOFactory
from twisted.python.failure import Failure
from zope.interface import implementer

from node.door.connections import Connections
from node.door.relay import Relay
from node.door.upstream import Upstream
from node.http2.frames import PREFACE


class Entrance(Factory):
    """Hands each connection to `site`, or to a relay to gRPC's server."""

    noisy = False

    def __init__(self, connections: Connections, site: Any, upstream: Upstream) -> None:
        self.connections = connections
        self.site = site
        self.upstream = upstream

    def buildProtocol(self, addr: IAddress | None) -> ProtocolDetector:
        return ProtocolDetector(self, addr)

    def secured(self, context: IOpenSSLServerConnectionCreator) -> PlainFactory:
        """Return the factory for a port, with TLS."""
        return PlainFactory(self.connections, TLSMemoryBIOFactory(context, False, self))


class PlainFactory(Factory):
    """Makes an `AwaitFirstByte` for each connection: TLS is set up only at the first byte, and costs nothing before."""

    noisy = False

    def __init__(self, connections: Connections, tls: TLSMemoryBIOFactory) -> None:
        self.connections = connections
        self.tls = tls

    def buildProtocol(self, addr: IAddress | None) -> AwaitFirstByte:
        return AwaitFirstByte(self, addr)


class _Passing(Protocol):
    """Enters the connection, and passes all on to the `_inner` protocol as soon as the bytes have decided on it."""

    transport: Any
    _inner: Any = None

    def __init__(self, factory: Any, address: IAddress | None) -> None:
        self._factory = factory
        self._address = address

    def connectionMade(self) -> None:
        self.connection = self._factory.connections.enter(self.transport)

    def dataReceived(self, data: bytes) -> None:
        if self._inner is not None:
            self._inner.dataReceived(data)
        else:
            self._decide(data)

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        if self._inner is not None:
            self._inner.connectionLost(reason)
        else:
            self.connection.leave()

    def _decide(self, data: bytes) -> None:
        raise NotImplementedError

    def _pass_to(self, inner: Any, data: bytes) -> None:
        self._inner = inner
        inner.makeConnection(self.transport)
        inner.dataReceived(data)


class AwaitFirstByte(_Passing):
    """Waits for the first byte of a connection, then starts TLS."""

    _factory: PlainFactory

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        if self._inner is not None and not self.connection.secured:
            self._factory.connections.handshakes.happened(self.connection.address)
        super().connectionLost(reason)

    def _decide(self, data: bytes) -> None:
        self._pass_to(self._factory.tls.buildProtocol(self._address), data)


@implementer(IHandshakeListener)
class ProtocolDetector(_Passing):
    """Decides by the first decrypted bytes of a connection whether it speaks HTTP/2.

    It ignores ALPN: some deployed clients offer only h2, and then speak HTTP/1.1.
    """

    _factory: Entrance
    _begun = b""

    def handshakeCompleted(self) -> None:
        self.connection.secured = True

    def _decide(self, data: bytes) -> None:
        begun = self._begun = self._begun + data
        if len(begun) < len(PREFACE) and PREFACE.startswith(begun):
            return
        self._begun = b""
        if begun.startswith(PREFACE):
            self._pass_to(Relay(self._factory.connections, self._factory.upstream), begun)
        else:
            self._pass_to(self._factory.site.buildProtocol(self._address), begun)
