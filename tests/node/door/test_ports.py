"""The ports of the node: which are opened, on which sockets, and how they end."""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from twisted.internet import reactor as installed
from twisted.internet.threads import deferToThread
from twisted.trial.unittest import TestCase

from node.api.auth import Authenticator
from node.api.calls import Calls
from node.base.aio import Aio
from node.base.logs import LogRing
from node.door.options import DoorOptions
from node.door.ports import Ports
from node.door.tls import Certificates
from scripts.staging import certs
from scripts.staging.ports import free_port
from tests.harness.strangers import blind
from tests.node.door.test_rest import FakeBackend, until

reactor: Any = installed
KEY = "3f2b8c1e-0d5a-4b6f-9a77-1c2d3e4f5a6b"


def none_held(_: str, __: str, ___: int) -> int | None:
    return None


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
        calls, self.rest = Calls(FakeBackend(), LogRing(reactor, 100)), free_port()
        options = DoorOptions(host="127.0.0.1", rest_port=self.rest, grpc_port=None)
        self.ports = Ports(reactor, aio, calls, Authenticator(KEY), certificates, Path(directory.name), options)
        self.addCleanup(self.leave)

    async def leave(self) -> None:
        await self.ports.stop_accepting()
        await self.ports.dismiss()
        self.ports.disconnect()
        await until(lambda: not [*self.ports.clients()])

    async def test_which_are_opened(self) -> None:
        """A port of None is not; the metrics port has no TLS and knows no operations."""
        metrics = free_port()
        self.ports.listen([], metrics, none_held)
        self.assertEqual(
            {name: port.getHost().port for name, port in self.ports.listening.items()},
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
        self.ports.listen([], None, none_held)
        with socket.create_connection(("127.0.0.1", self.rest)):
            await until(lambda: [*self.ports.clients()] == [("rest", False)])
        await until(lambda: not [*self.ports.clients()])

    async def test_a_socket_that_was_left(self) -> None:
        """The port listens by it, and its descriptor is closed."""
        with socket.create_server(("127.0.0.1", 0)) as left:
            left.setblocking(False)
            number, held = left.getsockname()[1], os.dup(left.fileno())
            inode = os.fstat(held).st_ino
        asked_for: list[tuple[str, str, int]] = []

        def holding(*place: Any) -> int:
            asked_for.append(place)
            return held

        self.ports.listen([], None, holding)
        self.assertEqual(asked_for, [("rest", "127.0.0.1", self.rest)])
        self.assertEqual(await deferToThread(asked, number, KEY), b"HTTP/1.1 200 OK")
        # The kernel may have given the number to another file since.
        with contextlib.suppress(OSError):
            self.assertNotEqual(os.fstat(held).st_ino, inode)

    async def test_the_end(self) -> None:
        """No connection is accepted any more, and open ones are aborted."""
        self.ports.listen([], None, none_held)
        link = socket.create_connection(("127.0.0.1", self.rest))
        self.addCleanup(link.close)
        await until(lambda: [*self.ports.clients()])
        await self.ports.stop_accepting()
        self.assertRaises(ConnectionRefusedError, socket.create_connection, ("127.0.0.1", self.rest))
        await self.ports.dismiss()
        self.ports.disconnect()
        await until(lambda: not [*self.ports.clients()])
        self.assertRaises(ConnectionResetError, link.recv, 1)
