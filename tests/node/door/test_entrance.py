"""Both protocols on one port, and the relay between a client and gRPC's server, byte by byte over the loopback."""

from __future__ import annotations

import stat
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import ConnectionTerminated, DataReceived, Event, ResponseReceived, StreamEnded
from h2.settings import SettingCodes, Settings
from twisted.internet import reactor as installed
from twisted.internet.defer import Deferred
from twisted.internet.protocol import ClientFactory, Factory, Protocol
from twisted.internet.task import Clock
from twisted.internet.threads import deferToThread
from twisted.trial.unittest import TestCase

from node.aio import Aio  # first: it sets gRPC's environment

# isort: split
import grpc

from node.api.auth import Authenticator
from node.api.calls import Calls
from node.api.methods import SERVICE
from node.door import manners, relay
from node.door.bodies import Bodies
from node.door.connections import Connection, Connections, Limits
from node.door.entrance import Entrance
from node.door.sockets import Port
from node.door.upstream import Upstream
from node.events.journal import Journal
from node.http2 import PREFACE
from node.logs import LogRing
from node.sockets import Prompt
from node.transport.rest import make_app
from node.transport.rpc import RpcServer
from node.transport.site import Limits as SiteLimits
from node.transport.site import Site
from protos.service_pb2 import BaseInfoResponse, Log
from tests.node.transport.test_rest import FakeBackend, sample
from tests.node.transport.test_site import BEARER, Client, head, until

reactor: Any = installed
KEY = "3f2b8c1e-0d5a-4b6f-9a77-1c2d3e4f5a6b"
INFO = f"/{SERVICE.full_name}/GetBaseInfo"


class Http2(Client):
    """Speaks HTTP/2, and keeps what it hears."""

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

    def ask(self, stream: int, key: str = KEY, message: bytes = bytes(5), end: bool = True) -> None:
        names = {":method": "POST", ":scheme": "http", ":path": INFO, ":authority": "x", "te": "trailers"}
        self.http.send_headers(stream, [*names.items(), ("content-type", "application/grpc"), ("x-api-key", key)])
        while message:
            # A window's worth; more is for a client that has the time to wait.
            self.http.send_data(stream, message[:16_000], end_stream=end and len(message) <= 16_000)
            message = message[16_000:]
        self.flush()

    def heard(self, kind: type[Event]) -> Callable[[], Any]:
        return lambda: next((event for event in self.events if isinstance(event, kind)), None)


class LineReader(Http2):
    """Reads log lines, and takes few bytes at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.http.local_settings = Settings(initial_values={SettingCodes.INITIAL_WINDOW_SIZE: 200})
        self.held = b""

    def dataReceived(self, data: bytes) -> None:
        super().dataReceived(data)
        for event in self.events:
            if isinstance(event, DataReceived):
                self.held += event.data
                self.http.acknowledge_received_data(event.flow_controlled_length, 1)
        self.events = [event for event in self.events if not isinstance(event, DataReceived)]
        self.flush()

    @property
    def lines(self) -> list[str]:
        """Those that are here whole."""
        found, body = [], self.held
        while len(body) >= 5 and len(body) >= (end := 5 + int.from_bytes(body[1:5])):
            found.append(Log.FromString(body[5:end]).detail)
            body = body[end:]
        return found


class DoorCase(TestCase):
    """A whole node but for its backend and TLS: by their first bytes clients without TLS are told apart, too."""

    timeout = 60

    async def setUp(self) -> None:  # type: ignore[override]
        directory = TemporaryDirectory()
        self.addCleanup(directory.cleanup)
        self.directory = Path(directory.name)
        self.clock = Clock()
        self.ring = LogRing(reactor, 1000)
        self.calls = Calls(FakeBackend(), self.ring, journal=Journal(reactor))
        self.aio = Aio(reactor)
        self.aio.startService()
        self.addCleanup(self.aio.stopService)
        self.upstream = Upstream(reactor, self.directory)
        self.server = RpcServer(self.aio, self.calls, Authenticator(KEY), self.upstream)
        await self.aio.run(self.server.start())
        self.addCleanup(lambda: self.aio.run(self.server.stop()))
        self.site = Site(make_app(self.calls), Authenticator(KEY), self.clock, SiteLimits())
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
        """Our side of the one connection."""
        await until(lambda: len(self.site.connections) == 1)
        (connection,) = self.site.connections
        return connection

    async def asked(self, client: Http2, stream: int = 1) -> None:
        client.events.clear()
        client.ask(stream)
        await until(client.heard(StreamEnded))


class EntranceTests(DoorCase):
    """Who is led where."""

    async def test_both_protocols(self) -> None:
        """HTTP/1.1 is led to the site, HTTP/2 to gRPC's server, on one port."""
        rest = await self.connect(Client())
        rest.send(head(b"GET /info", BEARER))
        await until(rest.holds(b"HTTP/1.1 200"))
        self.assertEqual(await deferToThread(self.fetch), sample(BaseInfoResponse).SerializeToString())

    def fetch(self) -> bytes:
        with grpc.insecure_channel(f"127.0.0.1:{self.port.getHost().port}") as channel:
            reply: bytes = channel.unary_unary(INFO)(b"", metadata=[("x-api-key", KEY)], timeout=10)
            return reply

    async def test_what_is_written_goes_out(self) -> None:
        """It does not wait until the client has acknowledged what was before."""
        client = await self.connect(Client())
        await self.ours()
        here = client.transport.getPeer().port
        (ours,) = [one for one in reactor.getReaders() if isinstance(one, Prompt) and one.getHost().port == here]
        self.assertTrue(ours.getTcpNoDelay())

    async def test_a_preface_in_pieces(self) -> None:
        """One byte a time, and a request that begins like it."""
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
        """Nothing, and half a preface, are cut off in time, and nothing is left behind."""
        for begun in (b"", PREFACE[:20]):
            client = await self.connect(Client())
            client.send(begun)
            await self.ours()
            self.clock.advance(10)
            await until(lambda client=client: client.closed)  # type: ignore[misc]
            await until(lambda: not self.site.connections)
            self.assertEqual(client.received, b"")

    async def test_the_socket(self) -> None:
        """The server's socket is ours alone; what a killed node left is removed, and nothing else."""
        (socket,) = self.directory.iterdir()
        self.assertEqual(stat.S_IMODE(socket.stat().st_mode), 0o600)
        (self.directory / "grpc.file").touch()
        other = Upstream(reactor, self.directory)
        other.sweep()
        self.assertEqual([left.name for left in self.directory.iterdir()], ["grpc.file"])

    async def test_another_server(self) -> None:
        """Who comes while the server is replaced by another one waits for it."""
        await self.aio.run(self.server.stop())
        client = await self.connect(Http2())
        client.ask(1)
        await self.ours()
        self.server = RpcServer(self.aio, self.calls, Authenticator(KEY), self.upstream)
        await self.aio.run(self.server.start())
        self.clock.advance(relay.RETRY)
        await until(client.heard(StreamEnded))


class RoomTests(DoorCase):
    """Large bodies, more of them at once than have room."""

    size = 80_000

    def begin(self, client: Http2, stream: int) -> None:
        """A call whose message is announced, and half here."""
        client.ask(stream, message=b"\0" + self.size.to_bytes(4) + bytes(self.size // 2), end=False)

    async def shown(self) -> Http2:
        """A client that has shown the key."""
        client = Http2()
        await self.connect(client)
        await self.asked(client)
        client.events.clear()
        return client

    async def test_a_call_without_room(self) -> None:
        """It is told so, and when to come again; others go on, on its own connection too; then there is room."""
        self.site.connections.bodies = Bodies(100_000)
        first, second = await self.shown(), await self.shown()
        self.begin(first, 3)
        await until(lambda: self.site.connections.bodies.taken == self.size)
        self.begin(second, 3)
        await until(second.heard(StreamEnded))
        told = dict(second.heard(ResponseReceived)().headers)
        self.assertEqual((told[":status"], told["grpc-status"]), ("200", "8"))
        self.assertEqual(told["grpc-retry-pushback-ms"], "1000")
        second.events.clear()
        await self.asked(second, 5)
        first.http.send_data(3, bytes(self.size // 2), end_stream=True)
        first.flush()
        await until(first.heard(StreamEnded))
        await until(lambda: not self.site.connections.bodies.taken)
        second.events.clear()
        self.begin(second, 7)
        await until(lambda: self.site.connections.bodies.taken == self.size)

    async def test_who_leaves_gives_it_back(self) -> None:
        """A connection that is lost, and a call that is reset."""
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
        """A client that speaks HTTP/2 and asks nothing is cut off when the deadline is over."""
        client = await self.connect(Http2())
        await until(lambda: client.events)
        await self.ours()
        self.clock.advance(10)
        await until(lambda: client.ended)

    async def test_the_key_in_time(self) -> None:
        """A client that was refused may ask again, but not for long."""
        client = await self.connect(Http2())
        client.ask(1, "wrong")
        await until(client.heard(StreamEnded))
        connection = await self.ours()
        self.assertFalse(connection.known)
        self.clock.advance(10)
        goodbye = await self.goodbye(client)
        self.assertEqual((goodbye.error_code, goodbye.last_stream_id), (0, 1))

    async def test_a_long_message_before_the_key_is_known(self) -> None:
        """A call with the key whose message takes its time is waited for, though not for ever."""
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
        """With the key, a connection ends when nothing was asked for as long as may be, and is told what was taken."""
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
        await until(lambda: connection.known and not connection.idle)
        for _ in range(10):
            self.clock.advance(100)
        self.assertFalse(client.ended)

    async def test_a_flood(self) -> None:
        """A client that exceeds the limits is told so, and nothing more is taken from it."""
        client = await self.connect(Http2())
        for _ in range(manners.PINGS[0] + 1):
            client.http.ping(bytes(8))
        client.flush()
        await until(client.heard(ConnectionTerminated))
        self.assertEqual(client.heard(ConnectionTerminated)().error_code, 11)
        self.clock.advance(relay.FAREWELL)
        await until(lambda: not self.site.connections)

    async def reading_lines(self) -> LineReader:
        """A client with a narrow window, whose log stream has begun."""
        client: LineReader = await self.connect(LineReader())
        names = {":method": "POST", ":scheme": "http", ":path": f"/{SERVICE.full_name}/GetLogs", ":authority": "x"}
        client.http.send_headers(
            1, [*names.items(), ("te", "trailers"), ("content-type", "application/grpc"), ("x-api-key", KEY)]
        )
        client.http.send_data(1, bytes(5), end_stream=True)
        client.flush()
        await until(client.heard(ResponseReceived))
        return client

    async def test_log_lines_through_a_narrow_window(self) -> None:
        """They come in bundles, of which the client knows nothing: each is a message, in order, none is missing."""
        client = await self.reading_lines()
        sent = [f"line {number}" for number in range(150)]

        def are_here(whole: int) -> Any:
            # Small pieces in a row are gathered.
            self.clock.advance(relay.GATHER)
            return client.lines == sent[:whole]

        for begin in range(0, len(sent), 3):
            self.ring.extend(sent[begin : begin + 3])
            await until(partial(are_here, begin + 3))

    async def test_short_lines_through_a_narrow_window(self) -> None:
        """A client that has seen less than half of its window says nothing; what is around lines must not fill it."""
        client = await self.reading_lines()

        def are_here(whole: int) -> Any:
            self.clock.advance(relay.GATHER)
            return len(client.lines) == whole

        for number in range(60):
            self.ring.extend([""])
            await until(partial(are_here, number + 1))

    async def test_names_are_forgotten(self) -> None:
        """Of a client that is gone nothing is left."""
        client = await self.connect(Http2())
        await self.asked(client)
        self.assertEqual(len(self.upstream._clients), 1)
        client.transport.loseConnection()
        await until(lambda: not self.site.connections)
        self.assertEqual(self.upstream._clients, {})
        self.assertEqual(self.clock.getDelayedCalls(), [])


class Slow(Protocol):
    """Takes what comes, but only when it is told to."""

    def __init__(self) -> None:
        self.received = 0

    def dataReceived(self, data: bytes) -> None:
        self.received += len(data)


class PressureTests(TestCase):
    """A relay between two ends of the test's own: who does not read is not written for."""

    timeout = 60
    # The longest frame that there is.
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
        self.connections = Connections(reactor, Limits())
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
        """Nothing more is taken from the sender for some turns."""
        seen: list[int] = []

        def still() -> bool:
            seen.append(self.held(sender.transport))
            return len(seen) > 20 and len(set(seen[-20:])) == 1

        return still

    async def test_a_slow_client(self) -> None:
        await self.check(self.behind[0], self.client, lambda: self.relay)

    async def test_a_slow_server(self) -> None:
        (server,) = (one for one in reactor.getReaders() if isinstance(one, Prompt) and one is not self.relay)
        await self.check(self.client, self.behind[0], lambda: server)

    async def test_what_the_server_has_written_and_nobody_read(self) -> None:
        """It is part of a reply that the server says it has written: not delivered before the client has it."""
        told: list[bool] = []
        delivered: Deferred[bool] = Deferred()
        delivered.addCallback(told.append)
        relayed = self.relay.protocol._inner
        self.client.transport.pauseProducing()  # type: ignore[union-attr]
        self.behind[0].transport.write(b"\xff\xff\xff" + bytes((0, 0, 0, 0, 0, 1)) + bytes(self.size))  # type: ignore[union-attr]
        await until(lambda: relayed._server._client_is_full and relayed._server.waiting(), 20)
        relayed.watch(delivered)
        ((end, _),) = relayed._marks
        self.assertEqual(end, relayed._passed + relayed._server.waiting())
        self.assertEqual(told, [])
        self.client.transport.resumeProducing()  # type: ignore[union-attr]
        await until(lambda: told == [True], 20)

    async def test_a_client_that_leaves(self) -> None:
        """What it has sent before still reaches the server."""
        self.client.transport.write(bytes((0, 0, 5, 0, 0, 0, 0, 0, 1)) + b"hello")  # type: ignore[union-attr]
        self.client.transport.loseConnection()  # type: ignore[union-attr]
        await until(lambda: self.behind[0].received == len(PREFACE) + 14)
        await until(lambda: not self.behind[0].transport.connected)  # type: ignore[union-attr]

    async def test_a_server_that_leaves(self) -> None:
        """The client has what was written, and then the end."""
        self.behind[0].transport.write(bytes((0, 0, 5, 0, 0, 0, 0, 0, 1)) + b"hello")  # type: ignore[union-attr]
        self.behind[0].transport.loseConnection()  # type: ignore[union-attr]
        await until(lambda: not self.client.transport.connected)  # type: ignore[union-attr]
        self.assertEqual(self.client.received, 14)
