"""The first bytes of a connection decide its protocol, whichever port it came to."""

from __future__ import annotations

from typing import Any

from twisted.internet.interfaces import IHandshakeListener, IOpenSSLServerConnectionCreator
from twisted.internet.protocol import Factory, Protocol, connectionDone
from twisted.protocols.tls import TLSMemoryBIOFactory
from twisted.python.failure import Failure
from zope.interface import implementer

from node.door.connections import Connections
from node.door.relay import Relay
from node.door.strangers import Hello, Strangers, pass_on
from node.door.upstream import Upstream
from node.http2.frames import PREFACE


class _Passing(Protocol):
    """Enters the connection, and passes all on to the `_inner` protocol as soon as the bytes have decided on it."""

    factory: Any
    transport: Any
    _inner: Any = None

    def connectionMade(self) -> None:
        self.connection = self.factory.connections.enter(self.transport)

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
    """Waits for the first byte of a connection, then starts TLS.

    If strangers are turned away, it first waits for the name that the client asks for.
    """

    factory: PlainFactory
    _hello: Hello

    def connectionMade(self) -> None:
        super().connectionMade()
        if self.factory.strangers is not None:
            self._hello = Hello()
            self.connection.arm_instead(self._turn_away)

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        if self._inner is not None and not self.connection.secured:
            self.factory.connections.handshakes.happened(self.connection.address)
        super().connectionLost(reason)

    def _decide(self, data: bytes) -> None:
        if self.factory.strangers is not None:
            asked = self._hello.feed(data)
            if asked is None:
                return
            if self.factory.strangers.is_one(asked):
                self._turn_away()
                return
            self.connection.arm_instead(self.connection.cut)
            data = bytes(self._hello.seen)
        self._pass_to(self.factory.tls.buildProtocol(self.transport.getPeer()), data)

    def _turn_away(self) -> None:
        if self.connection.over or self.factory.strangers is None:
            return
        self.factory.connections.unnamed.happened(self.connection.address)
        if self.factory.strangers.decoy is None:
            self.connection.cut()
        else:
            seen = bytes(self._hello.seen)
            pass_on(self.factory.connections, self.connection, self.factory.strangers.decoy, seen)


@implementer(IHandshakeListener)
class ProtocolDetector(_Passing):
    """Decides by the first decrypted bytes of a connection whether it speaks HTTP/2.

    It ignores ALPN: some deployed clients offer only h2, and then speak HTTP/1.1.
    """

    factory: Entrance
    _begun = b""

    def handshakeCompleted(self) -> None:
        self.connection.secured = True

    def _decide(self, data: bytes) -> None:
        begun = self._begun = self._begun + data
        if len(begun) < len(PREFACE) and PREFACE.startswith(begun):
            return
        self._begun = b""
        if begun.startswith(PREFACE):
            self._pass_to(Relay(self.factory.connections, self.factory.upstream), begun)
        else:
            self._pass_to(self.factory.site.buildProtocol(self.transport.getPeer()), begun)


class Entrance(Factory):
    """Hands each connection to `site`, or to a relay to gRPC's server."""

    noisy = False
    protocol = ProtocolDetector  # type: ignore[assignment]

    def __init__(self, connections: Connections, site: Any, upstream: Upstream) -> None:
        self.connections = connections
        self.site = site
        self.upstream = upstream

    def secured(self, context: IOpenSSLServerConnectionCreator, strangers: Strangers | None = None) -> PlainFactory:
        """Return the factory for a port, with TLS. Unless `strangers` are answered, they are turned away before it."""
        return PlainFactory(self.connections, TLSMemoryBIOFactory(context, False, self), strangers)


class PlainFactory(Factory):
    """Makes an `AwaitFirstByte` for each connection: TLS is set up only at the first byte, and costs nothing before."""

    noisy = False
    protocol = AwaitFirstByte  # type: ignore[assignment]

    def __init__(self, connections: Connections, tls: TLSMemoryBIOFactory, strangers: Strangers | None = None) -> None:
        self.connections = connections
        self.tls = tls
        self.strangers = strangers
