"""node.door.strangers: the name in a ClientHello, however it is cut; and what becomes of those who do not know it."""

from __future__ import annotations

import ssl
from base64 import b32decode
from typing import Any

import pytest
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from hypothesis import given
from hypothesis import strategies as st
from twisted.internet import reactor as installed
from twisted.internet.interfaces import IHalfCloseableProtocol
from twisted.internet.protocol import Factory
from twisted.internet.task import Clock
from zope.interface import implementer

from node.api.auth import Authenticator
from node.door.connections import Limits
from node.door.entrance import Entrance
from node.door.ports import Port
from node.door.strangers import LARGEST, Hello, Strangers
from node.keys.keyfile import digest_of, door_name
from tests.harness.sites import site_of
from tests.node.door.test_site import BEARER, KEY, Client, SiteCase, head, until

reactor: Any = installed
NAME = "k3.example"
BIG = bytes(range(256)) * 4096


def hello(name: str | None, *alpn: str) -> bytes:
    """A ClientHello of OpenSSL's, in one record."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    if alpn:
        context.set_alpn_protocols(list(alpn))
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    with pytest.raises(ssl.SSLWantReadError):
        context.wrap_bio(incoming, outgoing, server_hostname=name).do_handshake()
    return outgoing.read()


def records(message: bytes, size: int) -> bytes:
    """The message in records of so many bytes."""
    pieces = [message[at : at + size] for at in range(0, len(message), size)]
    return b"".join(b"\x16\x03\x01" + len(piece).to_bytes(2) + piece for piece in pieces)


def asked(data: bytes, piece: int) -> str | None:
    """What is known after these bytes, which come in pieces; nothing may be known before it is final."""
    found, known = Hello(), None
    for at in range(0, len(data), piece):
        known = found.feed(data[at : at + piece])
        if known is not None:
            break
    return known


@pytest.mark.parametrize("size", [1, 3, 40, 16_384])
@pytest.mark.parametrize("piece", [1, 5, 100_000])
def test_the_name(size: int, piece: int) -> None:
    """It is found in whatever records and segments the hello comes, in lower case; without one it is empty."""
    for name, found in ((NAME, NAME), (NAME.upper(), NAME), (None, "")):
        whole = records(hello(name, "h2", "http/1.1")[5:], size)
        if len(whole) <= LARGEST:
            assert asked(whole, piece) == found
            assert asked(whole[:-1], piece) is None


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\n",
        b"\x80\x2e\x01",
        b"\x16\x02",
        b"\x16\x03\x01\x00\x05\x02",
        b"\x16\x03\x01\x40\x00\x01\x00\x3f\xff" + bytes(LARGEST),
        b"\x16\x03\x01\x00\x06\x01\x00\x00\x02\x03\x03",
        b"\x17\x03\x03\x00\x01\x01",
    ],
)
def test_no_hello(data: bytes) -> None:
    """Other bytes, other messages and what is too long or cut inside are known at once to have no name."""
    if data.startswith(b"\x16\x03\x01\x00\x05\x02"):
        data += bytes(4)
    assert Hello().feed(data) == ""


@given(st.binary(max_size=300), st.integers(0, 400))
def test_damaged_ones(noise: bytes, at: int) -> None:
    """No bytes are an error."""
    whole = hello(NAME)
    Hello().feed(whole[:at] + noise + whole[at:])
    Hello().feed(whole[:5] + whole[5 : 5 + at] + noise)


def test_the_name_made_from_a_key() -> None:
    """It is the same for each spelling of the key, is a host name, and differs by key."""
    name = door_name(KEY)
    assert name == door_name(KEY.upper()) != door_name("another key of some length")
    assert name.endswith(".internal") and len(name.partition(".")[0]) == 24
    assert KEY[:8] not in name
    secret = HKDF(SHA256(), 15, None, b"DOOR_NAME").derive(digest_of(KEY))
    assert b32decode(name.partition(".")[0].upper()) == secret


@implementer(IHalfCloseableProtocol)
class Web(Client):
    """A decoy: replies to each piece, and ends its side when the client does."""

    def dataReceived(self, data: bytes) -> None:
        super().dataReceived(data)
        if b"big" in data:
            self.send(BIG)
        elif b"bye" in data:
            self.send(b"bye")
            self.transport.loseConnection()  # type: ignore[union-attr]
        elif b"reset" in data:
            self.transport.abortConnection()  # type: ignore[union-attr]
        else:
            self.send(b"seen ", data)

    def readConnectionLost(self) -> None:
        super().readConnectionLost()
        self.send(b" the end")
        self.transport.loseConnection()  # type: ignore[union-attr]


class TurnedAwayTests(SiteCase):
    """Clients that do not ask for the name."""

    def serve_by_name(self, decoy: bool = True, clock: Any = reactor, limits: Limits | None = None) -> Any:
        """A port that serves the site to clients that know the name. Returns their TLS."""
        self.webs: list[Web] = []
        web = Factory.forProtocol(self.web)
        self.decoy = reactor.listenTCP(0, web, interface="127.0.0.1")
        self.addCleanup(self.decoy.stopListening)
        tls, ours = self.make_tls([b"http/1.1"])
        self.site = site_of(self.probe, Authenticator(KEY), clock, limits)
        address = ("127.0.0.1", self.decoy.getHost().port) if decoy else None
        entrance = Entrance(self.site.connections, self.site, None)  # type: ignore[arg-type]
        self.port = Port(0, entrance.secured(tls, Strangers("localhost", address)), 5, "127.0.0.1", reactor)
        self.port.startListening()
        self.addCleanup(self.leave)
        return ours

    def web(self) -> Web:
        self.webs.append(Web())
        return self.webs[-1]

    async def test_one_who_knows_the_name(self) -> None:
        """They reach the site, and the decoy sees nothing of it."""
        ours = self.serve_by_name()
        client = await self.connect(ours)
        client.send(head(b"GET /a", BEARER))
        await until(client.holds(b"seen /a"))
        self.assertEqual(self.webs, [])

    async def test_closed(self) -> None:
        """Without a decoy, the connection ends without a byte, whatever comes first: at once, or at the deadline."""
        clock = Clock()
        self.serve_by_name(decoy=False, clock=clock)
        for data in (hello("other.example"), hello(None), b"GET / HTTP/1.1\r\n", b"\x16\x03\x01", b""):
            client = await self.connect()
            await until(lambda: len(self.site.connections) == 1)
            client.send(data)
            if data in (b"\x16\x03\x01", b""):
                clock.advance(10)
            await until(lambda client=client: client.closed)  # type: ignore[misc]
            self.assertEqual(bytes(client.received), b"")
            await until(lambda: not self.site.connections)

    async def test_passed_on(self) -> None:
        """The decoy gets all bytes, from the first one on, and its own come back; silent clients reach it later."""
        clock = Clock()
        self.serve_by_name(clock=clock)
        for data in (hello("other.example"), hello(None), b"GET / HTTP/1.1\r\n", b"\x16\x03\x01"):
            client = await self.connect()
            await until(lambda: len(self.site.connections) == 1)
            client.send(data)
            if data == b"\x16\x03\x01":
                await until(lambda: [c for c in self.site.connections if c.transport.protocol._hello.seen])
                clock.advance(10)
            await until(client.holds(b"seen " + data))
            client.send(b"more")
            await until(client.holds(b"seen more"))
            client.transport.loseWriteConnection()  # type: ignore[union-attr]
            await until(client.holds(b" the end"))
            await until(lambda client=client: client.ended)  # type: ignore[misc]
            await until(lambda: not self.site.connections)
            self.assertTrue(self.webs[-1].closed)

    async def test_large_replies_and_ends(self) -> None:
        """All of a large reply arrives before the decoy's end; its reset is a reset."""
        self.serve_by_name()
        client = await self.connect()
        client.transport.pauseProducing()  # type: ignore[union-attr]
        client.send(b"big")
        await until(lambda: self.webs)
        reactor.callLater(0.2, client.transport.resumeProducing)  # type: ignore[union-attr]
        await until(lambda: len(client.received) == len(BIG))
        self.assertEqual(bytes(client.received), BIG)
        client.send(b"bye")
        await until(client.holds(b"bye"))
        await until(lambda: client.ended)
        other = await self.connect()
        other.send(b"reset")
        await until(lambda: other.closed)

    async def test_limits(self) -> None:
        """It has a place among strangers' connections, and an absolute deadline; the decoy's side ends with it."""
        clock = Clock()
        self.serve_by_name(clock=clock, limits=Limits(strangers=2))
        clients = []
        for _ in range(3):
            client = await self.connect()
            client.send(b"hello")
            await until(client.holds(b"seen hello"))
            clients.append(client)
        await until(lambda: clients[0].closed)
        self.assertEqual(len(self.site.connections), 2)
        clock.advance(Limits().body_deadline - 1)
        clients[1].send(b"on")
        await until(clients[1].holds(b"seen on"))
        clock.advance(1)
        await until(lambda: all(client.closed for client in clients))
        await until(lambda: all(web.closed for web in self.webs))

    async def test_no_decoy(self) -> None:
        """Without a decoy there, the connection ends, and the log says so."""
        self.serve_by_name()
        await self.decoy.stopListening()
        client = await self.connect()
        client.send(b"hello")
        await until(lambda: client.closed)
        self.assertEqual(bytes(client.received), b"")
