"""Delivery of replies: what the handler learns, over both transports, whatever the client does."""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from twisted.internet import reactor as installed
from twisted.internet.defer import Deferred
from twisted.internet.error import ConnectionAborted
from twisted.internet.task import Clock
from twisted.internet.threads import deferToThread
from twisted.protocols.tls import TLSMemoryBIOFactory
from twisted.python.failure import Failure
from twisted.trial.unittest import SynchronousTestCase, TestCase

from node.api.auth import Authenticator, Caller
from node.api.calls import Calls
from node.api.methods import METHODS, SERVICE
from node.base.aio import Aio
from node.base.logs import LogRing
from node.door.connections import Connections, Limits
from node.door.delivery import LAST_LOOK, Deliveries, Delivery, Progress, progress, written
from node.door.entrance import Entrance
from node.door.ports import listen
from node.door.rest import make_app
from node.door.rpc import RpcServer
from node.door.tls import GRPC_FIRST, REST_FIRST, Certificates, ContextFactory
from node.door.upstream import Upstream
from node.keys.keyfile import Key, Scope
from protos.service_pb2 import Stat, StatResponse
from scripts.staging import certs
from tests.harness.sites import site_of
from tests.harness.strangers import nobody
from tests.harness.wire import GrpcWire, Wire
from tests.node.door.test_rest import FakeBackend, until

reactor: Any = installed

KEY = "3f2b8c1e-0d5a-4b6f-9a77-1c2d3e4f5a6b"
# Bytes: more than the kernels of both sides hold for a connection, and fewer.
BIG, SMALL = (StatResponse(stats=[Stat(name="x" * size)]) for size in (20_000_000, 1000))
# The offset of tcpi_bytes_received in struct tcp_info of linux/tcp.h.
_BYTES_RECEIVED = 128


def heard(told: list[bool]) -> Deferred[bool]:
    """Return a Deferred that appends its result to this list."""
    delivered: Deferred[bool] = Deferred()
    delivered.addCallback(told.append)
    return delivered


class LookTests(SynchronousTestCase):
    """One reply that ends at byte 100 of the stream, and what the kernel reports."""

    def setUp(self) -> None:
        self.clock = Clock()
        self.told: list[bool] = []
        self.kernel: Progress | OSError = Progress(0, 0, over=False)
        self.delivery = Delivery(self.clock, self.look, 100, heard(self.told))

    def look(self) -> Progress:
        if isinstance(self.kernel, OSError):
            raise self.kernel
        return self.kernel

    def after(self, acknowledged: int, given: int, over: bool = False) -> list[bool]:
        """Return the outcomes after the kernel has reported this for the longest pause between two looks."""
        self.kernel = Progress(acknowledged, given, over)
        self.clock.advance(LAST_LOOK)
        return self.told

    def check_fired(self, whole: bool) -> None:
        self.assertEqual(self.told, [whole])
        self.assertEqual(self.clock.getDelayedCalls(), [])

    def test_the_last_byte_counts(self) -> None:
        """There is no outcome until the last byte is acknowledged; bytes written after it do not matter."""
        self.assertEqual(self.after(0, 0), [])
        self.assertEqual(self.after(99, 100), [])
        self.assertEqual(self.after(99, 5000), [])
        self.assertEqual(self.after(100, 5000), [True])
        self.check_fired(True)

    def test_looks_become_less_frequent(self) -> None:
        """A reply that takes a minute is not polled a thousand times."""
        looks: list[float] = []
        look = self.look
        self.delivery._look = lambda: looks.append(self.clock.seconds()) or look()  # type: ignore[func-returns-value]
        self.clock.pump([0.001] * 60_000)
        self.assertLess(looks[0], 0.01)
        self.assertLess(len(looks), 300)
        self.assertLessEqual(max(b - a for a, b in pairwise(looks)), LAST_LOOK + 0.002)

    def test_a_reset(self) -> None:
        """A reset connection with a byte missing has not delivered the reply; with all bytes it has."""
        self.after(99, 100, over=True)
        self.check_fired(False)

    def test_a_reset_after_the_last_byte(self) -> None:
        """A client that took everything and then resets the connection has the reply."""
        self.after(100, 124, over=True)
        self.check_fired(True)

    def test_lost_and_not_all_given(self) -> None:
        """A connection that is lost before the kernel got everything delivers no more."""
        self.kernel = Progress(50, 60, over=False)
        self.delivery.lost(short=True)
        self.check_fired(False)

    def test_the_fin_is_no_byte_of_the_reply(self) -> None:
        """With one byte held back, the acknowledgement of the FIN does not count as that byte's."""
        self.kernel = Progress(100, 100, over=False)
        self.delivery.lost(short=True)
        self.check_fired(False)

    def test_lost_and_still_on_its_way(self) -> None:
        """After the connection is closed here, the kernel goes on delivering what it has."""
        self.kernel = Progress(50, 101, over=False)
        self.delivery.lost(short=False)
        self.assertEqual(self.told, [])
        self.after(101, 101)
        self.check_fired(True)

    def test_lost_with_later_bytes_held_back(self) -> None:
        """Bytes held back may belong to a later response."""
        self.kernel = Progress(50, 201, over=False)
        self.delivery.lost(short=True)
        self.assertEqual(self.told, [])
        self.after(201, 201)
        self.check_fired(True)

    def test_no_time_left(self) -> None:
        """At the node's end, a reply that is not acknowledged is not delivered."""
        self.kernel = Progress(99, 100, over=False)
        self.delivery.give_up()
        self.check_fired(False)

    def test_no_time_left_for_what_is_there(self) -> None:
        """A last look is taken at the node's end."""
        self.kernel = Progress(100, 100, over=False)
        self.delivery.give_up()
        self.check_fired(True)

    def test_a_kernel_that_cannot_tell(self) -> None:
        """The error is logged, and the reply does not count as delivered."""
        self.kernel = OSError("no such thing")
        self.clock.advance(1)
        self.check_fired(False)
        self.assertEqual(len(self.flushLoggedErrors(OSError)), 1)


class DeliveryCase(TestCase):
    """A backend that answers GetStats, and asks whether the reply is delivered."""

    timeout = 60

    def setUp(self) -> None:
        self.backend = FakeBackend()
        self.told = self.backend.delivered = []
        self.calls = Calls(self.backend, LogRing(reactor, 1000))
        with TemporaryDirectory() as directory:
            made = certs.make(Path(directory), ["localhost"])
            self.pem = made.certificate.read_text()
            self.certificates = Certificates(made.certificate, made.key)
            self.certificates.load()

    async def check_told(self, *words: bool, seconds: float = 10) -> None:
        await until(lambda: len(self.told) >= len(words), seconds)
        self.assertEqual(self.told, list(words))
        # Later results are not collected.
        self.calls.close()
        self.assertEqual(self.told, list(words))

    async def wire(self, port: int, *alpn: str) -> Wire:
        wire: Wire = await deferToThread(Wire, port, self.pem, *alpn)
        self.addCleanup(wire.close)
        return wire


GET = b"GET /stats HTTP/1.1\r\nHost: x\r\nx-api-key: %b\r\n" % KEY.encode()


class RestTests(DeliveryCase):
    """REST over TLS: delivered when the client's kernel has acknowledged every byte."""

    def setUp(self) -> None:
        super().setUp()
        self.site = site_of(make_app(self.calls), Authenticator(KEY), reactor)
        factory = TLSMemoryBIOFactory(ContextFactory(self.certificates, REST_FIRST), False, self.site)
        self.port = reactor.listenTCP(0, factory, interface="127.0.0.1")
        self.addCleanup(self.leave)

    async def leave(self) -> None:
        await self.port.stopListening()
        self.site.connections.disconnect()
        await until(lambda: not self.site.connections)

    async def ask(self, reply: StatResponse, times: int = 1, header: bytes = b"") -> Wire:
        """A client that has sent its requests and read nothing."""
        self.backend.reply = reply
        wire = await self.wire(self.port.getHost().port, "http/1.1")
        await deferToThread(wire.send, (GET + header + b"\r\n") * times)
        return wire

    async def under_way(self) -> None:
        await until(lambda: self.site.deliveries._under_way)

    def below(self) -> Any:
        """The TCP transport below TLS of the one connection."""
        (channel,) = self.site.connections
        return channel.transport.transport

    async def test_a_client_that_reads_everything(self) -> None:
        """A client that reads the whole reply has it; until then there is no outcome."""
        wire = await self.ask(BIG)
        await self.under_way()
        self.assertEqual(await deferToThread(wire.read, BIG.ByteSize() // 2), BIG.ByteSize() // 2)
        self.assertEqual(self.told, [])
        await deferToThread(wire.read, BIG.ByteSize() // 2)
        await self.check_told(True)

    async def test_a_client_that_closes_afterwards(self) -> None:
        """A client that closes as soon as it has read everything has the reply, also if it asked the node to close."""
        for reply in (SMALL, BIG):
            for header in (b"", b"Connection: close\r\n") * 5:
                self.told.clear()
                wire = await self.ask(reply, header=header)
                self.assertEqual(await deferToThread(take_and_close, wire), reply.SerializeToString())
                await until(lambda: self.told)
                self.assertEqual(self.told, [True], (reply is BIG, header))
                await until(lambda: not self.site.connections)

    async def test_the_node_closes_when_it_was_asked_to(self) -> None:
        """A client that asks the node to close sees the end after the reply, without sending anything."""
        wire = await self.ask(SMALL, header=b"Connection: close\r\n")
        await deferToThread(wire.take)
        self.assertEqual(await deferToThread(wire.link.recv, 1), b"")
        await self.check_told(True)

    async def test_reset_when_the_node_was_to_close(self) -> None:
        """A client that asks the node to close, and resets without waiting for it."""
        wire = await self.ask(BIG, header=b"Connection: close\r\n")
        await deferToThread(read_and, wire, 10_000, Wire.reset)
        await self.check_told(False)
        await until(lambda: not self.site.connections)

    async def test_a_connection_that_is_kept(self) -> None:
        """Two replies on one connection: the first is delivered, the second is lost with the connection."""
        wire = await self.ask(SMALL)
        await deferToThread(wire.take)
        await until(lambda: self.told == [True])
        self.backend.reply = BIG
        await deferToThread(wire.send, GET, b"\r\n")
        await self.under_way()
        await deferToThread(wire.read, 10_000)
        await deferToThread(wire.reset)
        await self.check_told(True, False)

    async def test_pipelined(self) -> None:
        """Two requests sent together: each reply has its own outcome."""
        wire = await self.ask(BIG, times=2)
        await self.under_way()
        await deferToThread(wire.read, BIG.ByteSize() + 10_000)
        await until(lambda: len(self.backend.heard) == 2)
        await until(lambda: self.told == [True])
        await deferToThread(wire.reset)
        await self.check_told(True, False)

    async def test_closed_unread(self) -> None:
        """A client that sends a request and closes has no reply, whether it was there by then or not."""
        for leave in (Wire.close, Wire.reset) * 5:
            self.told.clear()
            wire = await self.ask(BIG)
            await self.under_way()
            await deferToThread(leave, wire)
            await until(lambda: self.told)
            self.assertEqual(self.told, [False])

    async def test_closed_before_there_is_a_reply(self) -> None:
        """The work goes on, and its reply is not delivered."""
        hold = self.backend.hold = Deferred()
        wire = await self.ask(SMALL)
        await until(lambda: self.backend.heard)
        await deferToThread(wire.close)
        await until(lambda: not self.site.connections)
        self.assertEqual(self.told, [])
        hold.callback(None)
        await self.check_told(False)

    async def test_read_a_little_and_reset(self) -> None:
        """10 kB of 20 MB are not the reply."""
        wire = await self.ask(BIG)
        await deferToThread(read_and, wire, 10_000, Wire.reset)
        await self.check_told(False)

    async def test_a_client_that_stops_reading(self) -> None:
        """The kernel gives up a client that takes nothing any more, and the reply is not delivered."""
        wire = await self.ask(BIG)
        await self.under_way()
        self.below().getHandle().setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 500)
        await deferToThread(wire.read, 10_000)
        self.assertEqual(self.told, [])
        await self.check_told(False)
        await until(lambda: not self.site.connections)

    async def test_the_node_stops(self) -> None:
        """A reply that is not acknowledged by then was not delivered, which is reported before connections end."""
        await self.ask(BIG)
        await self.under_way()
        self.site.connections.disconnect()
        await self.check_told(False)

    async def test_a_connection_lost_in_a_callback(self) -> None:
        """Two replies on one connection, which the first one's callback loses: each is reported once."""
        wire = await self.ask(SMALL)
        await deferToThread(wire.take)
        await until(lambda: self.told == [True])
        (channel,) = self.site.connections
        deliveries, replies = self.site.deliveries, [heard(self.told), heard(self.told)]
        replies[0].addCallback(lambda _: deliveries.lost(channel.transport, Failure(ConnectionAborted())))
        for delivered in replies:
            deliveries.write(
                SimpleNamespace(channel=channel, write=channel.transport.write), b"x" * 20_000_000, delivered
            )
        deliveries.close()
        await self.check_told(True, False, False)

    async def test_work_that_fails(self) -> None:
        """An error is not a delivered reply."""
        self.backend.error = RuntimeError("x")
        wire = await self.ask(SMALL)
        await deferToThread(wire.read, 100)
        await self.check_told(False)
        self.assertEqual(len(self.flushLoggedErrors(RuntimeError)), 1)

    async def test_no_handler_asked(self) -> None:
        """A reply whose delivery is not asked for is not watched."""
        self.backend.delivered = None
        wire = await self.ask(BIG)
        await until(lambda: self.backend.finished)
        await deferToThread(wire.read, BIG.ByteSize())
        self.assertFalse(self.site.deliveries._under_way)

    async def test_the_length_of_the_stream(self) -> None:
        """`written` is what the other side receives in the end, to the byte, wherever Twisted buffers it meanwhile."""
        wire = await self.ask(SMALL)
        await deferToThread(wire.take)
        (channel,) = self.site.connections
        for data in (b"x", b"x" * 1000, b"x" * 20_000_000):
            before = written(channel.transport)
            channel.transport.write(data)
            after = written(channel.transport)
            self.assertGreater(after - before, len(data))
            await deferToThread(wire.read, len(data))
            await until(lambda after=after: progress(self.below().getHandle()).acknowledged == after)  # type: ignore[misc]
            info = wire.link.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES_RECEIVED + 8)
            self.assertEqual(struct.unpack_from("Q", info, _BYTES_RECEIVED), (after,))

    async def test_a_connection_that_takes_nothing(self) -> None:
        """A write into an ending connection delivers no reply, although all written bytes are acknowledged."""
        wire = await self.ask(SMALL)
        await deferToThread(wire.take)
        await until(lambda: self.told == [True])
        (channel,) = self.site.connections
        fake = SimpleNamespace(channel=channel, write=lambda _: None)
        Deliveries(reactor).write(fake, b"x", heard(self.told))
        await self.check_told(True, False)

    async def test_a_write_that_fails(self) -> None:
        """The error of the write is raised, and the reply is not delivered."""
        wire = await self.ask(SMALL)
        await deferToThread(wire.take)
        await until(lambda: self.told == [True])
        (channel,) = self.site.connections

        def fail(_: bytes) -> None:
            raise ConnectionError

        with pytest.raises(ConnectionError):
            Deliveries(reactor).write(SimpleNamespace(channel=channel, write=fail), b"x", heard(self.told))
        await self.check_told(True, False)


def take_and_close(wire: Wire) -> bytes:
    body = wire.take()
    wire.close()
    return body


def read_and(wire: Wire, size: int, leave: Callable[[Wire], None]) -> None:
    wire.read(size)
    leave(wire)


class GrpcTests(DeliveryCase):
    """gRPC over the relay: delivered when the client's kernel has acknowledged every byte."""

    async def setUp(self) -> None:  # type: ignore[override]
        super().setUp()
        self.aio = Aio(reactor)
        self.aio.start()
        self.addCleanup(self.aio.stop)
        directory = TemporaryDirectory()
        self.addCleanup(directory.cleanup)
        upstream = Upstream(reactor, Path(directory.name))
        self.server = RpcServer(self.aio, self.calls, Authenticator(KEY), upstream)
        await self.aio.run(self.server.start())
        self.addCleanup(lambda: self.aio.run(self.server.stop()))
        self.connections = Connections(reactor, Limits(), nobody)
        factory = Entrance(self.connections, None, upstream).secured(ContextFactory(self.certificates, GRPC_FIRST))
        listening = listen(reactor, factory, 0, "127.0.0.1")
        self.port = listening.getHost().port
        self.addCleanup(self.leave)
        self.addCleanup(listening.stopListening)

    async def leave(self) -> None:
        self.connections.disconnect()
        await until(lambda: not self.connections)

    async def test_a_fault_of_the_node(self) -> None:
        """A fault is INTERNAL without its text, which may hold secrets, and is in the log with its traceback."""
        self.backend.error = RuntimeError("secret")

        def call() -> grpc.RpcError:
            with grpc.secure_channel(
                f"localhost:{self.port}", grpc.ssl_channel_credentials(self.pem.encode())
            ) as channel:
                feed = channel.stream_unary(f"/{SERVICE.full_name}/SyncUser")
                with pytest.raises(grpc.RpcError) as refused:
                    feed(iter([b""]), metadata=[("x-api-key", KEY)], timeout=10)
                return refused.value

        refused = await deferToThread(call)
        self.assertEqual((refused.code().name, "secret" in refused.details()), ("INTERNAL", False))
        self.assertEqual(len(self.flushLoggedErrors(RuntimeError)), 1)

    async def ask(self, reply: StatResponse, window: int = 65_535, deadline: str = "60S", receive: int = 0) -> GrpcWire:
        self.backend.reply = reply
        wire: GrpcWire = await deferToThread(GrpcWire, self.port, self.pem, window, receive)
        self.addCleanup(wire.close)
        await deferToThread(wire.ask, f"/{SERVICE.full_name}/GetStats", KEY, b"", deadline)
        return wire

    async def check_lost(self, leave: Callable[[GrpcWire], None]) -> None:
        wire = await self.ask(BIG)
        await deferToThread(wire.read, 10_000)
        self.assertEqual(self.told, [])
        await deferToThread(leave, wire)
        await self.check_told(False)

    async def test_a_client_that_reads_everything(self) -> None:
        """A usual client has the reply, however big."""
        for reply in (SMALL, BIG):
            self.told.clear()
            self.backend.reply = reply
            self.assertEqual(await deferToThread(self.fetch), reply)
            await until(lambda: self.told)
            self.assertEqual(self.told, [True])

    def fetch(self) -> StatResponse:
        credentials = grpc.ssl_channel_credentials(self.pem.encode())
        options = [("grpc.max_receive_message_length", 64 * 1024 * 1024)]
        with grpc.secure_channel(f"localhost:{self.port}", credentials, options) as channel:
            call = channel.unary_unary(f"/{SERVICE.full_name}/GetStats")
            return StatResponse.FromString(call(b"", metadata=[("x-api-key", KEY)], timeout=20))

    async def test_cancelled(self) -> None:
        """A client that cancels while the reply waits for its window."""
        await self.check_lost(GrpcWire.cancel)

    async def test_closed(self) -> None:
        """A client that closes the connection in the middle."""
        await self.check_lost(Wire.close)

    async def test_reset(self) -> None:
        """A client that is gone in the middle, as if killed."""
        await self.check_lost(Wire.reset)

    async def test_reset_with_a_wide_window(self) -> None:
        """A window for the whole reply: the connection does not take it."""
        wire = await self.ask(BIG, window=30_000_000)
        await deferToThread(wire.read, 10_000)
        await deferToThread(wire.reset)
        await self.check_told(False)

    async def test_deadline(self) -> None:
        """A client that stops reading, until the deadline of its call."""
        await self.ask(BIG, deadline="500m")
        await self.check_told(False)

    async def test_the_node_stops(self) -> None:
        """A client that stops reading, until the node ends."""
        wire = await self.ask(BIG)
        await deferToThread(wire.read, 10_000)
        await self.aio.run(self.server.stop())
        await self.check_told(False)

    async def test_gone_when_it_is_written(self) -> None:
        """A client whose connection is gone by the time that the server has written does not have the reply."""

        async def write(_: bytes) -> None: ...

        context = SimpleNamespace(invocation_metadata=lambda: (), peer=lambda: "unix-abstract:gone", write=write)
        (stats,) = (method for method in METHODS if method.name == "GetStats")
        watched = self.server._gate._handler(stats, Caller(Key("ann", Scope.ALL, b""))).unary_stream
        await self.aio.run(watched(b"", context))
        await self.check_told(False)

    async def test_hangs_up_at_the_end(self) -> None:
        """A client that closes as soon as the call has ended has the reply, each time."""
        for _ in range(20):
            self.told.clear()
            self.backend.reply = SMALL
            await deferToThread(self.fetch)
            await until(lambda: self.told)
            self.assertEqual(self.told, [True])

    async def test_in_the_kernel_when_it_breaks(self) -> None:
        """Written completely to the node's kernel, and reset before it was read: not delivered."""
        for _ in range(5):
            self.told.clear()
            self.backend.finished.clear()
            middle = StatResponse(stats=[Stat(name="x" * 400_000)])
            wire = await self.ask(middle, window=30_000_000, receive=4096)
            await until(lambda: self.backend.finished)
            await deferToThread(wire.reset)
            await until(lambda: self.told)
            self.assertEqual(self.told, [False])

    async def test_cancelled_before_there_is_a_reply(self) -> None:
        """The work goes on, and its reply is not delivered."""
        hold = self.backend.hold = Deferred()
        wire = await self.ask(SMALL)
        await until(lambda: self.backend.heard)
        await deferToThread(wire.cancel)
        await self.cancel_has_arrived()
        self.assertEqual(self.told, [])
        hold.callback(None)
        await self.check_told(False)

    async def cancel_has_arrived(self) -> None:
        """Wait until another call on another connection was answered; only then release the held one."""
        held, self.backend.hold = self.backend.hold, None
        self.backend.delivered = None
        await deferToThread(self.fetch)
        self.backend.delivered, self.backend.hold = self.told, held

    async def test_work_that_fails(self) -> None:
        """An error is not a delivered reply."""
        self.backend.error = RuntimeError("x")
        with pytest.raises(grpc.RpcError) as failed:
            await deferToThread(self.fetch)
        self.assertIs(failed.value.code(), grpc.StatusCode.INTERNAL)
        await self.check_told(False)
        self.assertEqual(len(self.flushLoggedErrors(RuntimeError)), 1)


def test_an_acknowledgement_while_the_kernel_is_asked_is_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Acknowledged bytes leave one of the kernel's two numbers and enter the other."""
    acknowledged = iter([100, 150, 150])
    waiting = iter([10, 10])
    link = SimpleNamespace(getsockopt=lambda *_: struct.pack("B119xQ", 1, next(acknowledged)))
    monkeypatch.setattr("node.door.delivery.fcntl.ioctl", lambda *_: struct.pack("i", next(waiting)))
    assert progress(link) == Progress(150, 160, over=False)  # type: ignore[arg-type]
