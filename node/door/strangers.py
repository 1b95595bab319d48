"""Clients that do not know the node's secret name (DOOR_NAME): their connection ends, or leads to a decoy.

TLS carries the name that a client asks for in its first message, the ClientHello, before the server shows anything. A
decoy is a web server; it gets a stranger's connection byte by byte, so that it answers with its own TLS.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from twisted.internet.interfaces import IHalfCloseableProtocol
from twisted.internet.protocol import ClientFactory, Protocol, connectionDone
from twisted.python.failure import Failure
from zope.interface import implementer

from node.door.connections import Connection, Connections

# Bytes of a ClientHello with the headers of its records; those with keys against quantum computers have about 2,000.
LARGEST = 16 * 1024
# Seconds for the connection to the decoy.
CONNECT = 5.0
# What a record of a handshake begins with, the size of its header, the type of the message, and of the extension with
# the name (RFC 8446, RFC 6066).
_BEGIN, _RECORD, _CLIENT_HELLO, _SERVER_NAME = b"\x16\x03", 5, 1, 0
# Where the length of the session id is: after the version and 32 random bytes.
_SESSION = 34


@dataclass(frozen=True)
class Strangers:
    """What becomes of clients that do not know `name`: without a `decoy`, a host and port, their connection ends."""

    name: str
    decoy: tuple[str, int] | None = None

    def is_one(self, asked: str) -> bool:
        """Whether a client that asked for this name is a stranger."""
        return not hmac.compare_digest(asked.encode(), self.name.encode())


class Hello:
    """Collects a ClientHello from the first bytes of a connection, however they are cut. `seen` are all bytes."""

    def __init__(self) -> None:
        self.seen = bytearray()
        # The beginning of the next record in `seen`, and the message in the records before it.
        self._next = 0
        self._message = bytearray()

    def feed(self, data: bytes) -> str | None:
        """Return the name that the client asks for: empty without a name or a ClientHello, None if it is incomplete."""
        self.seen += data
        while True:
            head = self.seen[self._next : self._next + _RECORD]
            length = int.from_bytes(head[3:])
            if len(self.seen) > LARGEST or not _BEGIN.startswith(bytes(head[:2])):
                return ""
            end = self._next + _RECORD + length
            if len(head) < _RECORD or len(self.seen) < end:
                return None
            self._message += self.seen[self._next + _RECORD : end]
            self._next = end
            if self._message and self._message[0] != _CLIENT_HELLO:
                return ""
            size = int.from_bytes(self._message[1:4])
            if len(self._message) >= 4 + size and len(self._message) > 4:
                return _name_in(bytes(self._message[4 : 4 + size]))


def _name_in(hello: bytes) -> str:
    """Return the name in the body of a ClientHello, in lower case; empty if there is none."""

    def number(at: int, size: int = 2) -> int:
        if at + size > len(hello):
            raise ValueError
        return int.from_bytes(hello[at : at + size])

    try:
        at = _SESSION + 1 + number(_SESSION, 1)
        at += 2 + number(at)  # cipher suites
        at += 1 + number(at, 1)  # compression
        at += 2  # the length of all extensions
        while number(at) != _SERVER_NAME:
            at += 4 + number(at + 2)
        # Its length, that of the list, and the type of its first entry: 0 is a host name.
        if number(at + 6, 1) != 0:
            return ""
        begin = at + 9
        return hello[begin : begin + number(at + 7)].decode("ascii").lower()
    except ValueError:
        return ""


@implementer(IHalfCloseableProtocol)
class _Side(Protocol):
    """One side of a connection that is passed on: what it receives, the other one sends."""

    transport: Any
    other: _Side
    _ended = False

    def join(self, other: _Side) -> None:
        """Pass on from now on, with backpressure both ways."""
        self.other, other.other = other, self
        self.transport.registerProducer(other.transport, True)
        other.transport.registerProducer(self.transport, True)

    def dataReceived(self, data: bytes) -> None:
        self.other.transport.write(data)

    def readConnectionLost(self) -> None:
        self._ended = True
        sides = (self, self.other) if self.other._ended else (self.other,)
        for side in sides:
            side.transport.unregisterProducer()
            (side.transport.loseConnection if len(sides) == 2 else side.transport.loseWriteConnection)()

    def writeConnectionLost(self) -> None:
        """This side has been sent all, and its end; it may still send."""

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        self.other.transport.unregisterProducer()
        if reason.check(type(connectionDone.value)):
            self.other.transport.loseConnection()
        else:
            self.other.transport.abortConnection()


class _Stranger(_Side):
    """The stranger's side. `other` is missing while the decoy is not connected."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        self.connection.leave()
        if hasattr(self, "other"):
            super().connectionLost(reason)


class _Decoy(_Side):
    """The decoy's side. `seen` are the stranger's first bytes."""

    def __init__(self, stranger: _Stranger, seen: bytes) -> None:
        self._stranger = stranger
        self._seen = seen

    def connectionMade(self) -> None:
        self.transport.write(self._seen)
        self.join(self._stranger)
        self._stranger.transport.resumeProducing()


class _Calling(ClientFactory):
    """Connects to the decoy for one stranger, whose connection ends if that fails."""

    noisy = False

    def __init__(self, stranger: _Stranger, seen: bytes, lost: Callable[[], None]) -> None:
        self._stranger = stranger
        self._seen = seen
        self._lost = lost

    def buildProtocol(self, _: Any) -> Protocol | None:
        return None if self._stranger.connection.over else _Decoy(self._stranger, self._seen)

    def clientConnectionFailed(self, _: Any, __: Failure) -> None:
        self._lost()
        if not self._stranger.connection.over:
            self._stranger.connection.cut()


def pass_on(connections: Connections, connection: Connection, decoy: tuple[str, int], seen: bytes) -> None:
    """Connect a stranger to the decoy, from their first bytes on. The connection keeps its place among strangers'."""
    transport, stranger = connection.transport, _Stranger(connection)
    transport.pauseProducing()
    transport.protocol = stranger
    stranger.makeConnection(transport)
    connection.arm(connections.limits.body_deadline, connection.cut)
    host, port = decoy
    lost = partial(connections.no_decoy.happened, f"{host} port {port}")
    transport.reactor.connectTCP(host, port, _Calling(stranger, seen, lost), CONNECT)
