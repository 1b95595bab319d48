"""Both protocols on one port, and the relay between a client and gRPC's server, byte by byte over the loopback."""

from __future__ import annotations

import stat
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast
from unittest.mock import Mock

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import ConnectionTerminated, DataReceived, Event, PingAckReceived, ResponseReceived, StreamEnded
from h2.settings import SettingCodes, Settings
from hpack import Encoder
from twisted.internet import reactor as installed
from twisted.internet.defer import Deferred
from twisted.internet.protocol import ClientFactory, Factory, Protocol
from twisted.internet.task import Clock
from twisted.internet.threads import deferToThread
from twisted.trial.unittest import SynchronousTestCase, TestCase

from node.base.aio import Aio  # first: it sets gRPC's environment

# isort: split
import grpc

from node.api.auth import Authenticator
from node.api.calls import Calls
from node.api.methods import SERVICE
from node.base.logs import LogRing
from node.base.sockets import Prompt
from node.door import manners, relay
from node.door.bodies import Bodies
from node.door.bundles import LEAST
from node.door.connections import LATE, WRONG_KEYS, Connection, Connections, Limits
from node.door.connections import Limits as SiteLimits
from node.door.entrance import Entrance
from node.door.ports import Port
from node.door.rest import make_app
from node.door.rpc import RpcServer
from node.door.upstream import FEW, GATHER, Server, Upstream
from node.door.upstream import Client as UpstreamClient
from node.events.journal import Journal
from node.http2.frames import END_HEADERS, END_STREAM, PREFACE, Kind, frame
from protos.service_pb2 import BaseInfoResponse, Log
from tests.harness.sites import site_of
from tests.harness.strangers import nobody
from tests.node.door.test_rest import FakeBackend, sample
from tests.node.door.test_site import BEARER, Client, head, until

reactor: Any = installed
KEY = "3f2b8c1e-0d5a-4b6f-9a77-1c2d3e4f5a6b"
INFO = f"/{SERVICE.full_name}/GetBaseInfo"


class Http2(Client):
    """Speaks HTTP/2, and keeps what it receives."""

    def __init__(self) -> None:
        super().__init__()
        self.http = H2Connection(H2Configuration(client_side=True, header_encoding="utf-8"))
        self.events: list[Event] = []

    def connectionMade(self) -> None:
        self.http.initiate_connection()
        self.flush()

    def dataReceived(self, data: bytes) -> None:
        self.events += self.http.receive_data(data)
        self.flush()

    def flush(self) -> None:
        self.send(self.http.data_to_send())

    def look(self, stream: int, method: str = "GET", *more: tuple[str, str]) -> None:
        """Ask for a page, as a browser does."""
        names = {":method": method, ":scheme": "https", ":path": "/", ":authority": "x"}
        self.http.send_headers(stream, [*names.items(), *more], end_stream=True)
        self.flush()

    def ask(self, stream: int, key: str = KEY, message: bytes = bytes(5), end: bool = True) -> None:
        names = {":method": "POST", ":scheme": "http", ":path": INFO, ":authority": "x", "te": "trailers"}
        self.http.send_headers(stream, [*names.items(), ("content-type", "application/grpc"), ("x-api-key", key)])
        while message:
            # A window's worth; more is for a client that can wait.
            self.http.send_data(stream, message[:16_000], end_stream=end and len(message) <= 16_000)
            message = message[16_000:]
        self.flush()

    def heard(self, kind: type[Event]) -> Callable[[], Any]:
        return lambda: next((event for event in self.events if isinstance(event, kind)), None)


class LineReader(Http2):
    """Reads log lines, and takes few bytes at a time."""

    def __init__(self, window: int = 200) -> None:
        super().__init__()
        self.http.local_settings = Settings(initial_values={SettingCodes.INITIAL_WINDOW_SIZE: window})
        self.held = b""

    def dataReceived(self, data: bytes) -> None:
        super().dataReceived(data)
        for event in self.events:
            if isinstance(event, DataReceived):
                self.held += event.data if event.stream_id == 1 else b""
                self.http.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
        self.events = [event for event in self.events if not isinstance(event, DataReceived)]
        self.flush()

    @property
    def lines(self) -> list[str]:
        """The complete lines so far."""
        found, body = [], self.held
        while len(body) >= 5 and len(body) >= (end := 5 + int.from_bytes(body[1:5])):
            found.append(Log.FromString(body[5:end]).detail)
            body = body[end:]
        return found


class DoorCase(TestCase):
    """A whole node except backend and TLS; protocols are detected by the first bytes, without TLS, too."""

    timeout = 60

    async def setUp(self) -> None:  # type: ignore[override]
        directory = TemporaryDirectory()
        self.addCleanup(directory.cleanup)
        self.directory = Path(directory.name)
        self.clock = Clock()
        self.ring = LogRing(reactor, 1000)
        self.calls = Calls(FakeBackend(), self.ring, journal=Journal(reactor))
        self.aio = Aio(reactor)
        self.aio.start()
        self.addCleanup(self.aio.stop)
        self.upstream = Upstream(reactor, self.directory)
        self.server = RpcServer(self.aio, self.calls, Authenticator(KEY), self.upstream)
        await self.aio.run(self.server.start())
        self.addCleanup(lambda: self.aio.run(self.server.stop()))
        self.site = site_of(make_app(self.calls), Authenticator(KEY), self.clock, SiteLimits())
        self.entrance = Entrance(self.site.connections, self.site, self.upstream)
        self.port = Port(0, self.entrance, 5, "127.0.0.1", reactor)
        self.port.startListening()
        self.addCleanup(self.leave)
        self.addCleanup(self.port.stopListening)

    async def leave(self) -> None:
        self.site.connections.disconnect()
        await until(lambda: not self.site.connections)

    async def connect(self, client: Any) -> Any:
        factory: Any = ClientFactory.forProtocol(lambda: client)
        reactor.connectTCP("127.0.0.1", self.port.getHost().port, factory)
        await until(lambda: client.connected)
        return client

    async def ours(self) -> Connection:
        """The node's side of the one connection."""
        await until(lambda: len(self.site.connections) == 1)
        (connection,) = self.site.connections
        return connection

    async def gathered(self, condition: Callable[[], object]) -> None:
        """Wait for the condition, with time for batches of small pieces to end."""

        def passed() -> object:
            self.clock.advance(GATHER)
            return condition()

        await until(passed, 20)

    async def asked(self, client: Http2, stream: int = 1) -> None:
        client.events.clear()
        client.ask(stream)
        await until(client.heard(StreamEnded))


class EntranceTests(DoorCase):
    """Which protocol a connection is handed to."""

    async def test_both_protocols(self) -> None:
        """HTTP/1.1 goes to the site, HTTP/2 to gRPC's server, on one port."""
        rest = await self.connect(Client())
        rest.send(head(b"GET /info", BEARER))
        await until(rest.holds(b"HTTP/1.1 200"))
        self.assertEqual(await deferToThread(self.fetch), sample(BaseInfoResponse).SerializeToString())

    def fetch(self) -> bytes:
        with grpc.insecure_channel(f"127.0.0.1:{self.port.getHost().port}") as channel:
            reply: bytes = channel.unary_unary(INFO)(b"", metadata=[("x-api-key", KEY)], timeout=10)
            return reply

    async def test_what_is_written_goes_out(self) -> None:
        """A write does not wait until the client has acknowledged the one before."""
        client = await self.connect(Client())
        await self.ours()
        here = client.transport.getPeer().port
        (ours,) = [one for one in reactor.getReaders() if isinstance(one, Prompt) and one.getHost().port == here]
        self.assertTrue(ours.getTcpNoDelay())

    async def test_a_preface_in_pieces(self) -> None:
        """One byte at a time, and a request that begins like the preface."""
        client = await self.connect(Client())
        for place in range(len(PREFACE)):
            client.send(PREFACE[place : place + 1])
        client.send(bytes((0, 0, 0, 4, 0, 0, 0, 0, 0)))
        await until(lambda: client.received[3:4] == b"\x04")
        other = await self.connect(Client())
        other.send(PREFACE[:16])
        other.send(b"Authorization: Bearer " + KEY.encode() + b"\r\n\r\n")
        await until(other.holds(b"HTTP/1.1 4"))

    async def test_silence(self) -> None:
        """A silent client, and one with half a preface, are cut at the deadline; nothing is left behind."""
        for begun in (b"", PREFACE[:20]):
            client = await self.connect(Client())
            client.send(begun)
            await self.ours()
            self.clock.advance(10)
            await until(lambda client=client: client.closed)  # type: ignore[misc]
            await until(lambda: not self.site.connections)
            self.assertEqual(client.received, b"")

    async def test_the_socket(self) -> None:
        """Only the node may use the server's socket; a killed node's is removed, and nothing else."""
        (socket,) = self.directory.iterdir()
        self.assertEqual(stat.S_IMODE(socket.stat().st_mode), 0o600)
        (self.directory / "grpc.file").touch()
        other = Upstream(reactor, self.directory)
        other.sweep()
        self.assertEqual([left.name for left in self.directory.iterdir()], ["grpc.file"])

    async def test_another_server(self) -> None:
        """A client that connects while the server is being replaced waits for the new one."""
        await self.aio.run(self.server.stop())
        client = await self.connect(Http2())
        client.ask(1)
        await self.ours()
        self.server = RpcServer(self.aio, self.calls, Authenticator(KEY), self.upstream)
        await self.aio.run(self.server.start())
        self.clock.advance(relay.RETRY)
        await until(client.heard(StreamEnded))


class BatchTests(SynchronousTestCase):
    """When small pieces of gRPC's server are batched."""

    def test_pieces_in_a_row(self) -> None:
        """Those that keep coming are; those of which each comes alone, such as bundles of lines, are passed on."""
        clock, transport = Clock(), Mock()
        server = Server(UpstreamClient(), clock, lambda: None)
        server.transport = transport
        for _ in range(2 * FEW):
            clock.advance(GATHER)
            server.dataReceived(b"x")
        transport.pauseProducing.assert_not_called()
        for batches in (1, 2):
            while transport.pauseProducing.call_count < batches:
                self.assertLess(server._pieces, FEW + batches)
                server.dataReceived(b"x")
            clock.advance(GATHER)
            self.assertEqual(transport.resumeProducing.call_count, batches)


class RoomTests(DoorCase):
    """Large bodies, more of them at once than the budget has room for."""

    size = 80_000

    def begin(self, client: Http2, stream: int) -> None:
        """Begin a call whose message is announced, and half sent."""
        client.ask(stream, message=b"\0" + self.size.to_bytes(4) + bytes(self.size // 2), end=False)

    async def shown(self) -> Http2:
        """A client that has shown a key."""
        client = Http2()
        await self.connect(client)
        await self.asked(client)
        client.events.clear()
        return client

    async def test_a_call_without_room(self) -> None:
        """The call is refused, with a time to retry; others go on, also on its connection; later there is room."""
        self.site.connections.bodies = Bodies(100_000)
        first, second = await self.shown(), await self.shown()
        self.begin(first, 3)
        await until(lambda: self.site.connections.bodies.taken == self.size)
        self.begin(second, 3)
        await until(second.heard(StreamEnded))
        outcomes = dict(second.heard(ResponseReceived)().headers)
        self.assertEqual((outcomes[":status"], outcomes["grpc-status"]), ("200", "8"))
        self.assertEqual(outcomes["grpc-retry-pushback-ms"], "1000")
        second.events.clear()
        await self.asked(second, 5)
        first.http.send_data(3, bytes(self.size // 2), end_stream=True)
        first.flush()
        await until(first.heard(StreamEnded))
        await until(lambda: not self.site.connections.bodies.taken)
        second.events.clear()
        self.begin(second, 7)
        await until(lambda: self.site.connections.bodies.taken == self.size)

    async def test_a_client_that_leaves_releases_its_memory(self) -> None:
        """A lost connection and a reset call release the memory of a body."""
        client = await self.shown()
        self.begin(client, 3)
        await until(lambda: self.site.connections.bodies.taken == self.size)
        client.http.reset_stream(3)
        client.flush()
        await until(lambda: not self.site.connections.bodies.taken)
        self.begin(client, 5)
        await until(lambda: self.site.connections.bodies.taken == self.size)
        client.transport.abortConnection()  # type: ignore[union-attr]
        await until(lambda: not self.site.connections.bodies.taken)


class RelayTests(DoorCase):
    """One connection over HTTP/2."""

    async def test_headers_in_time(self) -> None:
        """A client that speaks HTTP/2 and makes no call is cut at the deadline."""
        client = await self.connect(Http2())
        await until(lambda: client.events)
        await self.ours()
        self.clock.advance(10)
        await until(lambda: client.ended)

    async def test_the_key_in_time(self) -> None:
        """A client that was refused may try again, but not for long."""
        client = await self.connect(Http2())
        client.ask(1, "wrong")
        await until(client.heard(StreamEnded))
        connection = await self.ours()
        self.assertFalse(connection.known)
        self.clock.advance(10)
        goodbye = await self.goodbye(client)
        self.assertEqual((goodbye.error_code, goodbye.last_stream_id), (0, 1))

    async def test_a_stranger(self) -> None:
        """A request with neither a key nor a service's path is 404, as of a web server; after a key it is not."""
        client = await self.connect(Http2())
        client.look(1)
        await until(client.heard(ResponseReceived))
        self.assertEqual(dict(client.heard(ResponseReceived)().headers), {":status": "404", "content-length": "0"})
        await until(lambda: client.ended)
        self.assertTrue(client.heard(StreamEnded)())
        goodbye = client.heard(ConnectionTerminated)()
        self.assertEqual((goodbye.error_code, goodbye.additional_data), (0, None))

        known = await self.connect(Http2())
        await self.asked(known)
        known.look(3, "POST", ("te", "trailers"), ("content-type", "application/grpc"))
        await until(lambda: any(isinstance(event, StreamEnded) and event.stream_id == 3 for event in known.events))
        known.events.clear()
        await self.asked(known, 5)

    async def test_a_stranger_who_has_guessed(self) -> None:
        """After many requests without a key the answer comes late, as over HTTP/1.1."""
        client = await self.connect(Http2())
        connection = await self.ours()
        for _ in range(WRONG_KEYS.at_once):
            self.site.connections.guesses.wrong(connection)
        client.look(1)
        await until(lambda: connection.session is not None)
        session = cast("Any", connection.session)
        await until(lambda: session._deaf)
        # What the server sends meanwhile does not take the answer's place.
        session.reply(frame(Kind.SETTINGS, 0, 0))
        self.clock.advance(LATE - 0.1)
        self.assertIsNone(client.heard(ResponseReceived)())
        self.clock.advance(0.1)
        await until(client.heard(ResponseReceived))

    async def test_many_calls_at_once(self) -> None:
        """A controller may begin with more calls than allowed without a key: the door finds the key in the first."""
        client = await self.connect(Http2())
        many = manners.STRANGERS_REQUESTS[0] + 50
        for number in range(many):
            client.ask(2 * number + 1)
        await self.gathered(lambda: sum(isinstance(event, StreamEnded) for event in client.events) == many)
        self.assertIsNone(client.heard(ConnectionTerminated)())

    async def test_a_long_message_before_the_key_is_known(self) -> None:
        """The door waits for a call with a key whose message takes long, but not for ever."""
        for patience, answered in ((50, True), (120, False)):
            client = await self.connect(Http2())
            names = {":method": "POST", ":scheme": "http", ":path": INFO, ":authority": "x", "te": "trailers"}
            client.http.send_headers(1, [*names.items(), ("content-type", "application/grpc"), ("x-api-key", KEY)])
            client.http.send_data(1, bytes(3))
            client.flush()
            connection = await self.ours()
            threshold = connection.transport.protocol
            await until(lambda of=threshold: of._inner and of._inner._manners.open)  # type: ignore[misc]
            for _ in range(patience // 10):
                self.clock.advance(10)
            if answered:
                client.http.send_data(1, bytes(2), end_stream=True)
                client.flush()
                await until(client.heard(StreamEnded))
                client.transport.loseConnection()
            else:
                await self.goodbye(client)
            await until(lambda: not self.site.connections)

    async def goodbye(self, client: Http2) -> ConnectionTerminated:
        await until(client.heard(ConnectionTerminated))
        self.clock.advance(5)
        await until(lambda: not self.site.connections)
        event = client.heard(ConnectionTerminated)()
        assert isinstance(event, ConnectionTerminated)
        return event

    async def test_idle(self) -> None:
        """With a key, a connection ends after the idle limit, with a GOAWAY that names the last stream."""
        client = await self.connect(Http2())
        await self.asked(client)
        connection = await self.ours()
        self.assertTrue(connection.known)
        await until(lambda: connection.idle)
        self.clock.advance(60)
        await self.asked(client, 3)
        await until(lambda: connection.idle)
        self.clock.advance(119)
        self.assertFalse(client.ended)
        self.clock.advance(1)
        goodbye = await self.goodbye(client)
        self.assertEqual((goodbye.error_code, goodbye.last_stream_id), (0, 3))

    async def test_an_open_stream_is_not_idle(self) -> None:
        client = await self.connect(Http2())
        names = {":method": "POST", ":scheme": "http", ":path": f"/{SERVICE.full_name}/GetLogs", ":authority": "x"}
        client.http.send_headers(1, [*names.items(), ("te", "trailers"), ("content-type", "application/grpc")])
        client.http.reset_stream(1)
        client.ask(3)
        await until(client.heard(StreamEnded))
        client.http.send_headers(
            5, [*names.items(), ("te", "trailers"), ("content-type", "application/grpc"), ("x-api-key", KEY)]
        )
        client.http.send_data(5, bytes(5), end_stream=True)
        client.flush()
        connection = await self.ours()
        # Until then the deadline for the first message runs.
        await until(lambda: connection.session._served and not connection.idle)  # type: ignore[union-attr]
        for _ in range(10):
            self.clock.advance(100)
        self.assertFalse(client.ended)

    async def test_a_flood(self) -> None:
        """A client that exceeds the limits gets a GOAWAY, and nothing more is read from it."""
        client = await self.connect(Http2())
        for _ in range(manners.PINGS[0] + 1):
            client.http.ping(bytes(8))
        client.flush()
        await until(client.heard(ConnectionTerminated))
        self.assertEqual(client.heard(ConnectionTerminated)().error_code, 11)
        self.clock.advance(relay.FAREWELL)
        await until(lambda: not self.site.connections)

    async def test_pings(self) -> None:
        """All allowed PINGs at once are answered: gRPC's own server would end the connection at the fourth."""
        client = await self.connect(Http2())
        await self.asked(client)
        many = manners.PINGS[0] - 10
        for number in range(many):
            client.http.ping(number.to_bytes(8))
        client.flush()
        await self.gathered(lambda: sum(isinstance(event, PingAckReceived) for event in client.events) == many)
        self.assertIsNone(client.heard(ConnectionTerminated)())
        await self.asked(client, 3)

    async def test_tiny_windows(self) -> None:
        """A client that takes a few bytes at a time still gets log lines and replies.

        If the prefixes of bundles could fill its window, it gets no bundles.
        """
        lines = ["one", "two", "", "four"]
        self.ring.extend(lines)
        for window in (1, 2, 3, 4, 5, 6, 7, 11, 12, LEAST - 1, LEAST):
            client = await self.reading_lines(window)
            await self.gathered(lambda client=client: client.lines == lines)  # type: ignore[misc]
            client.ask(3)
            await self.gathered(client.heard(StreamEnded))

    async def reading_lines(self, window: int = 200) -> LineReader:
        """A client with a narrow window, whose log stream has begun."""
        client: LineReader = await self.connect(LineReader(window))
        names = {":method": "POST", ":scheme": "http", ":path": f"/{SERVICE.full_name}/GetLogs", ":authority": "x"}
        client.http.send_headers(
            1, [*names.items(), ("te", "trailers"), ("content-type", "application/grpc"), ("x-api-key", KEY)]
        )
        client.http.send_data(1, bytes(5), end_stream=True)
        client.flush()
        await until(client.heard(ResponseReceived))
        return client

    async def test_log_lines_through_a_narrow_window(self) -> None:
        """Lines come in bundles, which the client does not see: each is a message, in order, and none is missing."""
        client = await self.reading_lines()
        sent = [f"line {number}" for number in range(150)]

        def are_here(whole: int) -> Any:
            # Small pieces in a row are batched.
            self.clock.advance(GATHER)
            return client.lines == sent[:whole]

        for begin in range(0, len(sent), 3):
            self.ring.extend(sent[begin : begin + 3])
            await until(partial(are_here, begin + 3))

    async def test_short_lines_through_a_narrow_window(self) -> None:
        """A client that has seen less than half of its window sends nothing; prefixes of bundles must not fill it."""
        client = await self.reading_lines()

        def are_here(whole: int) -> Any:
            self.clock.advance(GATHER)
            return len(client.lines) == whole

        for number in range(60):
            self.ring.extend([""])
            await until(partial(are_here, number + 1))

    async def test_names_are_removed(self) -> None:
        """The table of clients has no entry of a client that is gone."""
        client = await self.connect(Http2())
        await self.asked(client)
        self.assertEqual(len(self.upstream._clients), 1)
        client.transport.loseConnection()
        await until(lambda: not self.site.connections)
        self.assertEqual(self.upstream._clients, {})
        self.assertEqual(self.clock.getDelayedCalls(), [])


class Slow(Protocol):
    """Takes data only when the test lets it."""

    def __init__(self) -> None:
        self.received = 0
        self.first = b""

    def dataReceived(self, data: bytes) -> None:
        self.received += len(data)
        self.first = (self.first + data)[:100]


class PressureTests(TestCase):
    """A relay between two ends of the test's own, with backpressure."""

    timeout = 60
    # The longest possible frame.
    size = 2**24 - 1

    async def setUp(self) -> None:  # type: ignore[override]
        directory = TemporaryDirectory()
        self.addCleanup(directory.cleanup)
        path = Path(directory.name) / "grpc.1"
        self.behind: list[Slow] = []
        factory: Any = Factory.forProtocol(self.make)
        listening = reactor.listenUNIX(str(path), factory)
        self.addCleanup(listening.stopListening)
        upstream = Upstream(reactor, path.parent)
        upstream.listens(path)
        self.connections = Connections(reactor, Limits(), nobody)
        self.port = Port(0, Entrance(self.connections, None, upstream), 5, "127.0.0.1", reactor)
        self.port.startListening()
        self.addCleanup(self.leave)
        self.addCleanup(self.port.stopListening)
        self.client = Slow()
        reactor.connectTCP("127.0.0.1", self.port.getHost().port, ClientFactory.forProtocol(lambda: self.client))
        await until(lambda: self.client.connected)
        self.client.transport.write(PREFACE)  # type: ignore[union-attr]
        await until(lambda: self.behind and self.behind[0].received == len(PREFACE))
        (connection,) = self.connections
        connection.known = True
        self.relay = connection.transport
        assert connection.session is not None
        self.session = connection.session

    def make(self) -> Slow:
        self.behind.append(Slow())
        return self.behind[-1]

    async def leave(self) -> None:
        self.connections.disconnect()
        ends: list[Any] = [self.client, *self.behind]
        await until(lambda: not self.connections and not any(end.transport.connected for end in ends))

    def held(self, transport: Any) -> int:
        return int(len(transport.dataBuffer) + transport._tempDataLen)

    async def check(self, sender: Slow, receiver: Slow, out: Callable[[], Any]) -> None:
        """The receiver stops, much is sent, the relay holds little, and in the end everything has arrived."""
        receiver.transport.pauseProducing()  # type: ignore[union-attr]
        before = receiver.received
        sender.transport.write(b"\xff\xff\xff" + bytes((0, 0, 0, 0, 0, 1)) + bytes(self.size))  # type: ignore[union-attr]
        await until(lambda: self.held(out()) > 0, 20)
        await until(self.calm(sender), 20)
        self.assertLess(self.held(out()), 1_000_000)
        receiver.transport.resumeProducing()  # type: ignore[union-attr]
        await until(lambda: receiver.received - before == self.size + 9, 20)

    def calm(self, sender: Slow) -> Callable[[], bool]:
        """Whether nothing more is taken from the sender for some turns."""
        seen: list[int] = []

        def still() -> bool:
            seen.append(self.held(sender.transport))
            return len(seen) > 20 and len(set(seen[-20:])) == 1

        return still

    async def test_a_goaway_before_the_server_sends_anything(self) -> None:
        """A client accepts nothing but SETTINGS at the beginning of a connection."""
        self.session.finish(True, False)
        await until(lambda: self.client.received == 9 + 17)
        self.assertEqual([self.client.first[3], self.client.first[9 + 3]], [Kind.SETTINGS, Kind.GOAWAY])

    async def test_a_call_that_the_server_has_not_begun(self) -> None:
        """The node waits for a complete call, even if it counts as idle; it does not wait for an open stream."""
        call = frame(Kind.HEADERS, END_HEADERS | END_STREAM, 1, Encoder().encode([(":path", "/x/Y")]))
        self.client.transport.write(call)  # type: ignore[union-attr]
        await until(lambda: self.behind[0].received == len(PREFACE) + len(call))
        self.assertFalse(self.session.finish(False, True))
        self.behind[0].transport.write(frame(Kind.HEADERS, END_HEADERS, 1))  # type: ignore[union-attr]
        await until(lambda: self.client.received == 9)
        self.assertFalse(self.session.finish(False, False))
        self.assertTrue(self.session.finish(False, True))

    async def test_a_slow_client(self) -> None:
        await self.check(self.behind[0], self.client, lambda: self.relay)

    async def test_a_slow_server(self) -> None:
        (server,) = (one for one in reactor.getReaders() if isinstance(one, Prompt) and one is not self.relay)
        await self.check(self.client, self.behind[0], lambda: server)

    async def test_bytes_that_the_relay_has_not_read(self) -> None:
        """A reply is not delivered before the client has all bytes that the server has written for it."""
        outcomes: list[bool] = []
        delivered: Deferred[bool] = Deferred()
        delivered.addCallback(outcomes.append)
        relayed = self.relay.protocol._inner
        self.client.transport.pauseProducing()  # type: ignore[union-attr]
        self.behind[0].transport.write(b"\xff\xff\xff" + bytes((0, 0, 0, 0, 0, 1)) + bytes(self.size))  # type: ignore[union-attr]
        await until(lambda: relayed._server._client_is_full and relayed._server.waiting(), 20)
        relayed.watch(delivered)
        ((end, _),) = relayed._marks
        self.assertEqual(end, relayed._bundles.passed + relayed._server.waiting())
        self.assertEqual(outcomes, [])
        self.client.transport.resumeProducing()  # type: ignore[union-attr]
        await until(lambda: outcomes == [True], 20)

    async def test_a_client_that_leaves(self) -> None:
        """Bytes that the client has sent before it leaves still reach the server."""
        self.client.transport.write(bytes((0, 0, 5, 0, 0, 0, 0, 0, 1)) + b"hello")  # type: ignore[union-attr]
        self.client.transport.loseConnection()  # type: ignore[union-attr]
        await until(lambda: self.behind[0].received == len(PREFACE) + 14)
        await until(lambda: not self.behind[0].transport.connected)  # type: ignore[union-attr]

    async def test_a_server_that_leaves(self) -> None:
        """The client gets what was written, and then the end."""
        self.behind[0].transport.write(bytes((0, 0, 5, 0, 0, 0, 0, 0, 1)) + b"hello")  # type: ignore[union-attr]
        self.behind[0].transport.loseConnection()  # type: ignore[union-attr]
        await until(lambda: not self.client.transport.connected)  # type: ignore[union-attr]
        self.assertEqual(self.client.received, 14)
