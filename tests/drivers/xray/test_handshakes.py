"""No handshake overlaps a removal: established users go on, all others wait or are reset.

This process is the core: it holds real connections.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from typing import Any
from unittest import mock

from twisted.internet import reactor as installed
from twisted.internet.defer import CancelledError, ensureDeferred
from twisted.internet.task import deferLater
from twisted.trial.unittest import TestCase

from drivers.sockets import sock_diag
from drivers.sockets.listeners import Hush
from drivers.sockets.sock_diag import Endpoint, endpoint
from drivers.xray import handshakes
from drivers.xray.handshakes import Busy, Handshakes
from drivers.xray.ingress import HandshakePorts, handshake_ports
from protos.xray_pb2 import (
    InboundHandlerConfig,
    PortList,
    PortRange,
    ReceiverConfig,
    SocketConfig,
    StreamConfig,
    TypedMessage,
)

reactor: Any = installed


class HandshakeTests(TestCase):
    timeout = 20

    def setUp(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.addCleanup(self.listener.close)
        port = self.listener.getsockname()[1]
        self.ports = (range(port, port + 1),)
        self.accepted: dict[socket.socket, socket.socket] = {}
        # Endpoints named by lines, with their cookie.
        self.known: set[tuple[Endpoint, int]] = set()
        self.handshakes = self.make(plain=True)

    def make(self, plain: bool = False, crowded: bool = False) -> Handshakes:
        ports = {"home": HandshakePorts(self.ports, plain, crowded)}
        return Handshakes(reactor, ports, os.getpid(), lambda where, cookie: (where, cookie) in self.known)

    def knock(self) -> socket.socket:
        link = socket.create_connection(self.listener.getsockname(), timeout=5)
        self.addCleanup(link.close)
        link.setblocking(False)
        return link

    def connect(self) -> socket.socket:
        link = self.knock()
        self.accept(link)
        return link

    def accept(self, link: socket.socket) -> None:
        self.accepted[link] = self.listener.accept()[0]
        self.addCleanup(self.accepted[link].close)

    def line(self, link: socket.socket) -> None:
        """The core logs the user of this connection."""
        where = endpoint(*link.getsockname())
        self.known |= {(each.peer, each.cookie) for each in sock_diag.connections(self.ports) if each.peer == where}

    def lives(self, link: socket.socket) -> bool:
        try:
            return link.recv(1) == b"x"
        except BlockingIOError:
            return True
        except ConnectionResetError:
            return False

    async def paused(self, meanwhile: Callable[[], object] = lambda: None) -> None:
        async with self.handshakes.paused(["home"]):
            meanwhile()

    async def _closes(self, *links: socket.socket) -> None:
        """The core closes reset connections as soon as it notices."""
        for link in links:
            while self.lives(link):
                await deferLater(reactor, 0.005)
            self.accepted[link].close()

    async def test_established_connections_stay(self) -> None:
        """Connections with an access line or an answer of the core stay; all others are reset."""
        told, answered, silent, half = (self.connect() for _ in range(4))
        self.line(told)
        self.accepted[answered].send(b"x")
        half.send(b"half of a handshake")
        closing = ensureDeferred(self._closes(silent, half))
        await self.paused(lambda: self.assertTrue(closing.called))
        self.assertEqual([self.lives(link) for link in (told, answered, silent, half)], [True, True, False, False])

    async def test_handshakes_that_finish_in_time(self) -> None:
        """A connection whose handshake finishes in time is not reset."""
        told, answered = self.connect(), self.connect()
        pausing = ensureDeferred(self.paused())
        await deferLater(reactor, handshakes.COURTESY / 5)
        self.line(told)
        self.accepted[answered].send(b"x")
        await pausing
        self.assertTrue(self.lives(told) and self.lives(answered))

    async def test_it_waits_for_the_core(self) -> None:
        """A handshake is over when the core has closed its connection, not when that was reset."""
        link, entered = self.connect(), list[bool]()
        pausing = ensureDeferred(self.paused(lambda: entered.append(True)))
        while self.lives(link):
            await deferLater(reactor, 0.005)
        await deferLater(reactor, 10 * handshakes.NOTICE)
        self.assertFalse(entered)
        self.accepted[link].close()
        await pausing
        self.assertTrue(entered)

    async def test_waiting_connections(self) -> None:
        """Waiting connections count: the core may accept them at any time. If it does not, the pause fails."""
        link = self.knock()
        with mock.patch.object(handshakes, "PATIENCE", 0.1), self.assertRaises(Busy):
            await self.paused()
        pausing = ensureDeferred(self.paused())
        await deferLater(reactor, 0.05)
        self.accept(link)
        self.line(link)
        await pausing
        self.assertTrue(self.lives(link))
        self.connect()

    async def test_new_connections_wait(self) -> None:
        """Clients that connect during a pause get through after it, also after an error."""
        link = socket.socket()
        self.addCleanup(link.close)
        link.setblocking(False)

        def come() -> None:
            link.connect_ex(self.listener.getsockname())
            self.listener.settimeout(0.2)
            self.assertRaises(TimeoutError, self.listener.accept)
            raise ZeroDivisionError

        with self.assertRaises(ZeroDivisionError):
            await self.paused(come)
        self.listener.settimeout(5)
        self.accept(link)

    async def test_a_cancelled_caller(self) -> None:
        """A cancelled caller leaves no client blocked."""
        for wait in (0.0, 0.001, 0.01, 0.03):
            pausing = ensureDeferred(self.paused())
            await deferLater(reactor, wait)
            pausing.cancel()
            await pausing.addErrback(lambda failure: failure.trap(CancelledError) and None)
            self.accept(self.knock())

    async def test_a_node_that_was_killed(self) -> None:
        """The next node process ends the pause of a killed one."""
        left = Hush(os.getpid(), self.ports)
        left.begin()
        self.addCleanup(left.end)
        await self.handshakes.resume()
        self.listener.settimeout(5)
        self.connect()

    async def test_a_port_that_is_used_again(self) -> None:
        """A line about an earlier connection from the same port does not count."""
        link = self.connect()
        self.known = {(endpoint(*link.getsockname()), 1)}
        closing = ensureDeferred(self._closes(link))
        await self.paused()
        self.assertTrue(closing.called)

    async def test_many_on_one_connection(self) -> None:
        """A connection that can carry many handshakes is reset, even with known users."""
        self.handshakes = self.make(crowded=True)
        link = self.connect()
        self.line(link)
        self.accepted[link].send(b"x")
        closing = ensureDeferred(self._closes_all(link))
        await self.paused()
        self.assertTrue(closing.called)

    async def _closes_all(self, link: socket.socket) -> None:
        while True:
            try:
                self.accepted[link].send(b"x")
            except OSError:
                self.accepted[link].close()
                return
            await deferLater(reactor, 0.005)

    async def test_what_is_sent_before_a_handshake(self) -> None:
        """Transports with their own handshake send bytes before: then only a line counts."""
        self.handshakes = self.make()
        link = self.connect()
        self.accepted[link].send(b"x")
        closing = ensureDeferred(self._closes_all(link))
        await self.paused()
        self.assertTrue(closing.called)


def handler(stream: StreamConfig, domain: str = "") -> InboundHandlerConfig:
    receiver = ReceiverConfig(stream_settings=stream, port_list=PortList(range=[PortRange(first=7, last=9)]))
    receiver.listen.domain = domain
    return InboundHandlerConfig(receiver_settings=TypedMessage(value=receiver.SerializeToString()))


def test_handshake_ports() -> None:
    """By transport: what shows the end of a handshake."""
    ports = (range(7, 10),)
    for name in ("", "tcp"):
        assert handshake_ports(handler(StreamConfig(protocol_name=name))) == HandshakePorts(ports, plain=True)
        assert handshake_ports(handler(StreamConfig(protocol_name=name, security_type="tls"))) == HandshakePorts(ports)
    for name in ("websocket", "httpupgrade"):
        assert handshake_ports(handler(StreamConfig(protocol_name=name))) == HandshakePorts(ports)
    for name in ("grpc", "splithttp", "one that comes later"):
        assert handshake_ports(handler(StreamConfig(protocol_name=name))) == HandshakePorts(ports, crowded=True)
    told = SocketConfig(accept_proxy_protocol=True)
    assert handshake_ports(handler(StreamConfig(socket_settings=told))) == HandshakePorts(ports, crowded=True)
    assert handshake_ports(handler(StreamConfig(protocol_name="mkcp"))) is None
    assert handshake_ports(handler(StreamConfig(), "/run/a.sock")) is None
