"""The ports of the node on real sockets: which are opened, by which sockets, and how they end."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import ssl
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast
from unittest.mock import patch

from twisted.internet import reactor as installed
from twisted.internet.threads import deferToThread
from twisted.trial.unittest import TestCase

from node.api.auth import Authenticator
from node.api.calls import Calls
from node.base.aio import Aio
from node.base.logs import LogRing
from node.base.sockets import Passed
from node.contract.keeper import Keeper
from node.door.options import DoorOptions
from node.door.ports import Place, Ports
from node.door.tls import Certificates
from scripts.staging import certs
from scripts.staging.ports import free_port
from tests.harness.strangers import blind
from tests.node.door.test_rest import FakeBackend, until

reactor: Any = installed
KEY = "3f2b8c1e-0d5a-4b6f-9a77-1c2d3e4f5a6b"


class Holding(Keeper):
    """Holds one socket, for the port of REST."""

    def __init__(self, held: int) -> None:
        self.held = held

    def take(self, name: str) -> list[int]:
        return [self.held] if name == "listen/rest" else []


def asked(port: int, key: str, tls: bool = True) -> bytes:
    """The first line of the answer to a request."""
    with socket.create_connection(("127.0.0.1", port), 5) as plain:
        context = blind()
        link = context.wrap_socket(plain) if tls else plain
        link.sendall(b"GET /info HTTP/1.1\r\nHost: node\r\nx-api-key: %b\r\n\r\n" % key.encode())
        line = link.recv(65_536).partition(b"\r\n")[0]
        if isinstance(link, ssl.SSLSocket):
            link.detach()
        return line


def handshake(port: int) -> None:
    """Connect with TLS, and hang up."""
    with socket.create_connection(("127.0.0.1", port), 5) as plain, blind().wrap_socket(plain):
        pass


def relayed(front: socket.socket, port: int) -> tuple[int, int]:
    """Pass one connection on to a port. Returns the bytes that were sent to it, and received from it."""
    client, _ = front.accept()
    count = {client: 0, (server := socket.create_connection(("127.0.0.1", port))): 0}
    with client, server:
        open_ = {client, server}
        while server in open_:  # what the port sends after the client has hung up counts, too
            for link in select.select(open_, [], [])[0]:
                try:
                    data = link.recv(65_536)
                except OSError:
                    data = b""
                count[link] += len(data)
                other = server if link is client else client
                with contextlib.suppress(OSError):
                    other.sendall(data) if data else other.shutdown(socket.SHUT_WR)
                if not data:
                    open_.remove(link)
    return count[client], count[server]


class PortsTests(TestCase):
    """Ports on loopback, with a fake backend."""

    def setUp(self) -> None:
        directory = TemporaryDirectory()
        self.addCleanup(directory.cleanup)
        made = certs.make(Path(directory.name), ["localhost"])
        certificates = Certificates(made.certificate, made.key)
        certificates.load()
        aio = Aio(reactor)
        aio.start()
        self.addCleanup(aio.stop)
        self.aio, self.certificates, self.directory = aio, certificates, Path(directory.name)
        self.rest = free_port()

    def opened(self, metrics: int | None = None, keeper: Keeper | None = None) -> Ports:
        """Ports that are open, and are stopped with the test."""
        calls = Calls(cast(Any, FakeBackend()), LogRing(reactor, 100))
        options = DoorOptions(host="127.0.0.1", rest_port=self.rest, grpc_port=None)
        place = Place(self.directory, metrics, keeper or Keeper())
        ports = Ports(reactor, self.aio, calls, Authenticator(KEY), self.certificates, options, place)
        ports.start()
        self.addCleanup(self.leave, ports)
        return ports

    async def leave(self, ports: Ports) -> None:
        await ports.stop()
        await until(lambda: not [*ports.clients()])

    async def test_which_are_opened(self) -> None:
        """A port of None is not; the metrics port has no TLS and knows no operations."""
        metrics = free_port()
        ports = self.opened(metrics)
        self.assertEqual(
            {name: port.getHost().port for name, port in ports.listening.items()},
            {
                "rest": self.rest,
                "metrics": metrics,
            },
        )
        self.assertEqual(await deferToThread(asked, self.rest, KEY), b"HTTP/1.1 200 OK")
        self.assertEqual(await deferToThread(asked, self.rest, "wrong"), b"HTTP/1.1 401 Unauthorized")
        self.assertEqual(await deferToThread(asked, metrics, KEY, tls=False), b"HTTP/1.1 404 Not Found")

    async def test_clients(self) -> None:
        """Each has the protocol of its port, and whether it has shown a key."""
        ports = self.opened()
        with socket.create_connection(("127.0.0.1", self.rest)):
            await until(lambda: [*ports.clients()] == [("rest", False)])
        await until(lambda: not [*ports.clients()])

    async def test_bytes_of_clients(self) -> None:
        """All that pass the network are counted; those of this machine's clients do not."""
        ports = self.opened()
        passed = ports.listening["rest"].passed
        self.assertEqual(await deferToThread(asked, self.rest, KEY), b"HTTP/1.1 200 OK")
        self.assertEqual(passed, Passed(0, 0))
        with patch("node.door.ports.is_loopback", return_value=False), socket.create_server(("127.0.0.1", 0)) as front:
            passing = deferToThread(relayed, front, self.rest)
            await deferToThread(handshake, front.getsockname()[1])
            self.assertEqual(Passed(*await passing), passed)
            self.assertTrue(passed.received and passed.sent)

    async def test_a_socket_that_was_left(self) -> None:
        """The port listens by it, and its descriptor is closed."""
        with socket.create_server(("127.0.0.1", self.rest)) as left:
            left.setblocking(False)
            held = os.dup(left.fileno())
            inode = os.fstat(held).st_ino
        ports = self.opened(keeper=Holding(held))
        self.assertEqual(os.fstat(ports.listening["rest"].fileno()).st_ino, inode)
        self.assertEqual(await deferToThread(asked, self.rest, KEY), b"HTTP/1.1 200 OK")
        # The kernel may have given the number to another file since.
        with contextlib.suppress(OSError):
            self.assertNotEqual(os.fstat(held).st_ino, inode)

    async def test_the_end(self) -> None:
        """No connection is accepted any more, and open ones are aborted."""
        ports = self.opened()
        link = socket.create_connection(("127.0.0.1", self.rest))
        self.addCleanup(link.close)
        await until(lambda: [*ports.clients()])
        await ports.stop()
        self.assertRaises(ConnectionRefusedError, socket.create_connection, ("127.0.0.1", self.rest))
        await until(lambda: not [*ports.clients()])
        self.assertRaises(ConnectionResetError, link.recv, 1)
