"""The listeners of both ports. The first bytes of a connection decide its protocol, whichever port it came to."""

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
        self._site = site
        self._upstream = upstream

    def buildProtocol(self, addr: IAddress | None) -> ProtocolDetector:
        return ProtocolDetector(self, addr)

    def secured(self, context: IOpenSSLServerConnectionCreator) -> PlainFactory:
        """Return the factory for a port, with TLS."""
        return PlainFactory(self.connections, TLSMemoryBIOFactory(context, False, self))

    def http_1(self, address: IAddress | None) -> Any:
        return self._site.buildProtocol(address)

    def http_2(self) -> Relay:
        return Relay(self.connections, self._upstream)


class PlainFactory(Factory):
    """Makes an `AwaitFirstByte` for each connection: TLS is set up only at the first byte, and costs nothing before."""

    noisy = False

    def __init__(self, connections: Connections, tls: TLSMemoryBIOFactory) -> None:
        self.connections = connections
        self.tls = tls

    def buildProtocol(self, addr: IAddress | None) -> AwaitFirstByte:
        return AwaitFirstByte(self, addr)


class AwaitFirstByte(Protocol):
    """Waits for the first byte of a connection, then starts TLS and passes everything on to it."""

    transport: Any

    def __init__(self, factory: PlainFactory, address: IAddress | None) -> None:
        self._factory = factory
        self._address = address
        self._tls: Any = None

    def connectionMade(self) -> None:
        self._connection = self._factory.connections.enter(self.transport)

    def dataReceived(self, data: bytes) -> None:
        if self._tls is None:
            self._tls = self._factory.tls.buildProtocol(self._address)
            self._tls.makeConnection(self.transport)
        self._tls.dataReceived(data)

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        if self._tls is not None:
            if not self._connection.secured:
                self._factory.connections.handshakes.happened(self._connection.address)
            self._tls.connectionLost(reason)
        else:
            self._connection.leave()


@implementer(IHandshakeListener)
class ProtocolDetector(Protocol):
    """Decides by the first decrypted bytes of a connection whether it speaks HTTP/2, then passes everything on.

    It ignores ALPN: some deployed clients offer only h2, and then speak HTTP/1.1.
    """

    transport: Any

    def __init__(self, entrance: Entrance, address: IAddress | None) -> None:
        self._entrance = entrance
        self._address = address
        self._begun = b""
        self._inner: Any = None

    def connectionMade(self) -> None:
        self.connection = self._entrance.connections.enter(self.transport)

    def handshakeCompleted(self) -> None:
        self.connection.secured = True

    def dataReceived(self, data: bytes) -> None:
        if self._inner is not None:
            self._inner.dataReceived(data)
            return
        self._begun += data
        if len(self._begun) >= len(PREFACE) or not PREFACE.startswith(self._begun):
            self._decide()

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        if self._inner is not None:
            self._inner.connectionLost(reason)
        else:
            self.connection.leave()

    def _decide(self) -> None:
        begun, self._begun = self._begun, b""
        http_2 = begun.startswith(PREFACE)
        self._inner = self._entrance.http_2() if http_2 else self._entrance.http_1(self._address)
        self._inner.makeConnection(self.transport)
        self._inner.dataReceived(begun)
