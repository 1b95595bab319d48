"""Listens for both protocols. The first bytes tell which one a client speaks, whatever port it came to."""

from __future__ import annotations

import os
import socket
from typing import Any

from twisted.internet.interfaces import IAddress, IHandshakeListener, IOpenSSLServerConnectionCreator
from twisted.internet.protocol import Factory, Protocol, connectionDone
from twisted.protocols.tls import TLSMemoryBIOFactory
from twisted.python.failure import Failure
from zope.interface import implementer

from node.door.connections import Connections
from node.door.relay import Relay
from node.door.sockets import Port
from node.door.upstream import Upstream
from node.http2 import PREFACE

# Connections that wait to be accepted; beyond it the kernel drops their first packet, and they come a second later.
BACKLOG = 1024


class Entrance(Factory):
    """Leads each connection to `site`, or over a relay to gRPC's server."""

    noisy = False

    def __init__(self, connections: Connections, site: Any, upstream: Upstream) -> None:
        self.connections = connections
        self._site = site
        self._upstream = upstream

    def buildProtocol(self, addr: IAddress | None) -> Threshold:
        return Threshold(self, addr)

    def listen(
        self, reactor: Any, port: int, interface: str, context: IOpenSSLServerConnectionCreator, held: int | None = None
    ) -> Port:
        """Raises `CannotListenError`. `held`: the descriptor of a socket that listens there already."""
        vestibule = Vestibule(self.connections, context, self)
        if held is None:
            listening = Port(port, vestibule, BACKLOG, interface, reactor)
        else:
            with socket.socket(fileno=os.dup(held)) as there:
                listening = Port._fromListeningDescriptor(reactor, held, there.family, vestibule)
        listening.startListening()
        return listening

    def http_1(self, address: IAddress | None) -> Any:
        return self._site.buildProtocol(address)

    def http_2(self) -> Relay:
        return Relay(self.connections, self._upstream)


class Vestibule(Factory):
    """Where connections wait for their first byte: until then they cost next to nothing, TLS not at all."""

    noisy = False

    def __init__(self, connections: Connections, context: IOpenSSLServerConnectionCreator, entrance: Entrance) -> None:
        self.connections = connections
        self.tls = TLSMemoryBIOFactory(context, False, entrance)

    def buildProtocol(self, addr: IAddress | None) -> Silent:
        return Silent(self, addr)


class Silent(Protocol):
    """One connection, until its first byte is here."""

    transport: Any

    def __init__(self, vestibule: Vestibule, address: IAddress | None) -> None:
        self._vestibule = vestibule
        self._address = address
        self._tls: Any = None

    def connectionMade(self) -> None:
        self._connection = self._vestibule.connections.enter(self.transport)

    def dataReceived(self, data: bytes) -> None:
        if self._tls is None:
            self._tls = self._vestibule.tls.buildProtocol(self._address)
            self._tls.makeConnection(self.transport)
        self._tls.dataReceived(data)

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        if self._tls is not None:
            if not self._connection.secured:
                self._vestibule.connections.handshakes.happened(self._connection.address)
            self._tls.connectionLost(reason)
        else:
            self._connection.leave()


@implementer(IHandshakeListener)
class Threshold(Protocol):
    """One connection, until its first bytes are here.

    Not ALPN decides: there are deployed clients that offer h2 alone and then speak HTTP/1.1.
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
