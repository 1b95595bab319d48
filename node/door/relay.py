"""Relay a client's HTTP/2 to gRPC's server and back, within the limits of `manners`, with backpressure both ways."""

from __future__ import annotations

from collections import deque
from typing import Any

from twisted.internet.defer import Deferred
from twisted.internet.protocol import Protocol, connectionDone
from twisted.protocols.tls import TLSMemoryBIOProtocol
from twisted.python.failure import Failure

from node.base.alarm import Alarm
from node.base.waiting import fire
from node.door.bodies import AGAIN
from node.door.connections import Connection, Connections
from node.door.delivery import tcp, written
from node.door.manners import Manners
from node.door.upstream import Client, Server, Upstream
from node.http2.frames import Code, Kind, Violation, frame, goaway, reset
from node.http2.headers import response, trailers

# Seconds until the next attempt to connect, while a failed server is being replaced.
RETRY = 0.02
# Seconds in which a client that broke a limit may read the GOAWAY.
FAREWELL = 1.0
# Trailers for a call that the budget for bodies has no room for: RESOURCE_EXHAUSTED, and milliseconds until a retry.
_CROWDED = {
    "grpc-status": "8",
    "grpc-message": "too many large bodies are under way at once; send this again in a second",
    "grpc-retry-pushback-ms": f"{AGAIN * 1000:.0f}",
}
# Trailers for a call that is still open when another node process takes over: UNAVAILABLE.
_SUCCEEDED = {
    "grpc-status": "14",
    "grpc-message": "the node becomes another version of itself; call again",
}


class Relay(Protocol, Client):
    """The client's side of the relay, from the preface on."""

    transport: Any
    relayed = True

    def __init__(self, connections: Connections, upstream: Upstream) -> None:
        self._connections = connections
        self._upstream = upstream
        self._now = connections.reactor.seconds
        self._manners = Manners(self._now(), connections.knows, connections.bodies)
        self._bundles = self._manners.bundles
        # Frames of the door's own for either side; they wait for the end of the frame that is being passed on.
        self._for_client = self._for_server = b""
        self._server: Server | None = None
        self._held: list[bytes] = []
        # Replies that the server has written and the relay has not: their end in the server's stream, and the waiter.
        self._marks: deque[tuple[int, Deferred[bool]]] = deque()
        # The number of replies to be watched, and the end of the last piece of a reply in the TCP stream to the client.
        self._expected = self._end = 0
        self._asked_at: float | None = None
        # gRPC's server has begun a request with a key.
        self._served = False
        self._leaving = False
        # The client's bytes are no longer read.
        self._deaf = False
        self._held_back = Alarm(connections.reactor, self._go_on)

    def connectionMade(self) -> None:
        self.connection: Connection = self._connections.enter(self.transport)
        self.connection.session = self
        self.address = self.connection.address
        self._write = _writer(self.transport)
        tcp(self.transport).at_once = True
        self._connect()

    def dataReceived(self, data: bytes) -> None:
        if self._leaving or self._deaf or self.connection.over:
            return
        asked = self._manners.last
        try:
            self._manners.received(data, self._now(), self.connection.known)
        except Violation as error:
            self._refuse(error)
            return
        if self._manners.shown:
            self._know()
        elif self._manners.astray and not self.connection.known:
            self._turn_away()
            return
        self._look_after()
        self._look_for_room()
        self._for_server += self._bundles.give_back()
        if self._for_server and (gap := self._manners.gap) is not None:
            data, self._for_server = data[:gap] + self._for_server + data[gap:], b""
        if self._server is None:
            self._held.append(data)
            return
        if self._manners.last != asked:
            self._server.hurry()
        self._server.transport.write(data)

    def hold(self) -> None:
        self._deaf = True
        self.transport.pauseProducing()

    def finish(self, now: bool, streams: bool) -> bool:
        if self._leaving:
            return True
        # A complete call gets its answer; other open calls may be streams that last for ever.
        if self._manners.open and not (now or (streams and not self._manners.unanswered)):
            return False
        if self._manners.interruptible:
            for stream in self._manners.open:
                self._write(trailers(stream, _SUCCEEDED, stream in self._manners.begun))
            self._say_goodbye(Code.NO_ERROR)
        if self._server is not None:
            self._server.leave()
        self._leaving = True
        self.transport.unregisterProducer()
        self.transport.loseConnection()
        return True

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        self.connection.leave()
        self._held_back.cancel()
        if self._server is not None:
            self._server.leave()
        for _, delivered in self._marks:
            fire(delivered, False)
        self._marks.clear()
        self._manners.requests.close()
        self._connections.deliveries.lost(self.transport, reason)

    def reply(self, data: bytes) -> None:
        data, replies = self._manners.sent(data)
        self._look_after()
        self._write(data)
        if replies and (self._expected or self._marks):
            # Without what follows, such as a PING: a client that has the reply may close before that arrives.
            self._end = written(self.transport)
        self._write_refusals()
        self._look_for_replies()
        if self._bundles.much and self._manners.paused and self._server is not None:
            self._server.transport.write(self._bundles.give_back())

    def server_lost(self) -> None:
        if not self._leaving:
            self._close()

    def show_key(self) -> None:
        if not (self._served or self.connection.over or self._leaving):
            self._served = True
            self._know()
            self.connection.arm(self._connections.limits.idle, self._look_at_rest)
            self._look_after()
            self._look_for_room()

    def _know(self) -> None:
        """The client has shown a key, to the door or to gRPC's server."""
        if not self.connection.known:
            self.connection.known = True
            self._manners.requests.count()

    @property
    def takes_bundles(self) -> bool:
        return self._bundles.wanted

    def refused(self) -> None:
        """After many wrong keys, the relay passes nothing on for a while, either way."""
        late = self._connections.guesses.wrong(self.connection)
        if late and self._server is not None and not (self._held_back.pending or self.connection.known):
            self.transport.pauseProducing()
            self._server.pauseProducing()
            self._held_back.set(late)

    def _go_on(self) -> None:
        if self._server is not None and not (self._leaving or self.connection.over):
            self._server.resumeProducing()
            self.transport.resumeProducing()

    def expect(self, delivered: Deferred[bool]) -> None:
        def over(_: object) -> None:
            self._expected -= 1

        self._expected += 1
        delivered.addCallback(over)

    def watch(self, delivered: Deferred[bool]) -> None:
        if self._server is None:
            fire(delivered, False)
            return
        self._marks.append((self._bundles.passed + self._server.waiting(), delivered))
        self._look_for_replies()

    def _connect(self) -> None:
        if self.connection.over or self._leaving:
            return
        try:
            server = self._upstream.connect(self)
        except OSError:
            # There will be a server again in some milliseconds; the deadline keeps running.
            self.transport.pauseProducing()
            self._connections.reactor.callLater(RETRY, self._connect)
            return
        self._server = server
        self.transport.resumeProducing()
        server.transport.registerProducer(self.transport, True)
        self.transport.registerProducer(server, True)
        server.transport.write(b"".join(self._held))
        self._held.clear()

    def _look_for_room(self) -> None:
        """Refuse calls whose messages the budget has no room for, and reset them at gRPC's server."""
        refused = self._manners.requests.refused
        while refused:
            stream = refused.pop()
            if stream not in self._manners.open:
                continue
            begun = stream in self._manners.begun
            self._manners.close(stream)
            self._for_client += trailers(stream, _CROWDED, begun) + reset(stream, Code.NO_ERROR)
            self._for_server += reset(stream, Code.CANCEL)
        self._write_refusals()

    def _write_refusals(self) -> None:
        if self._for_client and self._manners.interruptible:
            data, self._for_client = self._for_client, b""
            self._write(data)

    def _look_for_replies(self) -> None:
        """Start watching the delivery of replies that are written completely."""
        while self._marks and self._marks[0][0] <= self._bundles.passed:
            self._connections.deliveries.watch(self.transport, self._end, self._marks.popleft()[1])

    def _look_after(self) -> None:
        """Update whether the connection is idle; start the timer for the key at the first headers."""
        connection = self.connection
        if connection.known and connection.idle is bool(self._manners.open):
            connection.idle = not connection.idle
            connection.idle_since = self._now()
        # A client that is not read any more has its end set already.
        if self._manners.asked and self._asked_at is None and not self._deaf:
            self._asked_at = self._now()
            connection.arm(self._connections.limits.key, self._look_for_key)

    def _look_for_key(self) -> None:
        """Close the connection if gRPC's server has not reported a key in time.

        A call without a key is refused at its headers. The server reports a key when the call's message is complete,
        which may take up to `body_deadline`.
        """
        limits, waited = self._connections.limits, self._now() - (self._asked_at or 0.0)
        if self._manners.open and waited < limits.body_deadline:
            self.connection.arm(limits.key, self._look_for_key)
        else:
            self._leave()

    def _look_at_rest(self) -> None:
        """Close the connection if it was idle for the limit. Checked now and then: a timer for each call costs more."""
        connection, limit = self.connection, self._connections.limits.idle
        rested = self._now() - connection.idle_since if connection.idle else 0.0
        if rested >= limit:
            self._leave()
        else:
            connection.arm(limit - rested, self._look_at_rest, idle=connection.idle)

    def _turn_away(self) -> None:
        """Answer a client that tries no key and no service as a web server without pages does, and close."""

        def answer() -> None:
            if self._manners.interruptible:
                self._say_goodbye(Code.NO_ERROR, response(self._manners.astray, 404))
            self._part()

        self.hold()
        late = self._connections.guesses.wrong(self.connection)
        if late:
            self.connection.arm(late, answer)
        else:
            answer()

    def _refuse(self, error: Violation) -> None:
        self._leave(error.code)
        # Unread data fills the client's own buffers.
        self.transport.pauseProducing()
        self.connection.arm(FAREWELL, self.connection.cut)

    def _leave(self, code: Code = Code.NO_ERROR) -> None:
        """Send GOAWAY, unless a frame of the server's is incomplete, and close the connection."""
        if self._manners.interruptible:
            self._say_goodbye(code)
        self._part()

    def _part(self) -> None:
        if self._server is not None:
            self._server.leave()
        self._close()

    def _say_goodbye(self, code: Code, before: bytes = b"") -> None:
        # SETTINGS come first on a connection (RFC 9113, 3.4); the server may not have sent its own yet.
        first = b"" if self._bundles.passed else frame(Kind.SETTINGS, 0, 0)
        self._write(first + before + goaway(self._manners.last, code))

    def _close(self) -> None:
        self._leaving = True
        self.transport.unregisterProducer()
        self.transport.resumeProducing()
        self.connection.arm(self._connections.limits.linger, self.connection.cut)
        self.transport.loseConnection()


def _writer(transport: Any) -> Any:
    """Return a function that writes at once: TLS's own `write` buffers small pieces for a reactor turn."""
    if isinstance(transport, TLSMemoryBIOProtocol):
        return lambda data: TLSMemoryBIOProtocol.write(transport, data)
    return transport.write
