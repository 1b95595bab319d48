"""The site's limits and the log stream, byte by byte over real sockets on the loopback."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from twisted.internet import reactor as installed
from twisted.internet.defer import Deferred, ensureDeferred
from twisted.internet.interfaces import IHalfCloseableProtocol
from twisted.internet.protocol import ClientFactory, Protocol
from twisted.internet.ssl import Certificate, optionsForClientTLS
from twisted.internet.task import Clock, LoopingCall, deferLater
from twisted.logger import ILogObserver, LogLevel, globalLogPublisher
from twisted.protocols.policies import ProtocolWrapper
from twisted.protocols.tls import TLSMemoryBIOFactory
from twisted.python.failure import Failure
from twisted.trial.unittest import TestCase
from twisted.web.resource import IResource, Resource
from twisted.web.server import NOT_DONE_YET
from zope.interface import implementer

from node.api.auth import Authenticator
from node.api.calls import Calls
from node.base.logs import COALESCE, LogRing
from node.door.connections import DEAD_AFTER, Limits
from node.door.delivery import written
from node.door.rest import HEARTBEAT, make_app
from node.door.site import Site
from node.door.tls import REST_FIRST, Certificates, ContextFactory
from scripts.staging import certs
from tests.harness.sites import site_of
from tests.node.door.test_rest import FakeBackend

reactor: Any = installed

KEY = "3f2b8c1e-0d5a-4b6f-9a77-1c2d3e4f5a6b"
BEARER = f"Authorization: Bearer {KEY}".encode()
DEPLOYED = f"x-api-key: {KEY}".encode()


@implementer(IHalfCloseableProtocol)
class Client(Protocol):
    """Sends and receives raw bytes. `ended`: no more will come; `closed`: nor can it send."""

    def __init__(self) -> None:
        self.received = bytearray()
        self.ended = False
        self.closed = False

    def dataReceived(self, data: bytes) -> None:
        self.received += data

    def readConnectionLost(self) -> None:
        self.ended = True

    def writeConnectionLost(self) -> None:
        """Ignored: the test waits for the whole end."""

    def connectionLost(self, reason: Failure = Failure(ConnectionError())) -> None:  # noqa: B008
        self.ended = self.closed = True

    def send(self, *parts: bytes) -> None:
        assert self.transport is not None
        self.transport.write(b"".join(parts))

    def holds(self, part: bytes, times: int = 1) -> Callable[[], bool]:
        return lambda: self.received.count(part) >= times

    @property
    def status(self) -> int:
        return int(self.received.split(b" ", 2)[1]) if self.received else 0

    @property
    def body(self) -> bytes:
        return bytes(self.received.partition(b"\r\n\r\n")[2])


class Probe(Resource):
    """Keeps each request, and the type of its body's buffer."""

    isLeaf = True  # noqa: N815

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[bytes, bytes, type, bytes]] = []

    def render(self, request: Any) -> bytes:
        self.seen.append((request.method, request.path, type(request.content), request.content.read()))
        return bytes(b"seen " + request.path)


class Waits(Resource):
    """Answers requests only when the test says so."""

    isLeaf = True  # noqa: N815

    def __init__(self) -> None:
        super().__init__()
        self.requests: list[Any] = []

    def render(self, request: Any) -> int:
        self.requests.append(request)
        return NOT_DONE_YET


def head(line: bytes, *headers: bytes) -> bytes:
    return b"\r\n".join((line + b" HTTP/1.1", b"Host: x", *headers, b"", b""))


async def until(condition: Callable[[], object], seconds: float = 5.0) -> None:
    """Wait for a condition, with a deadline."""
    end = reactor.seconds() + seconds
    while not condition():
        assert reactor.seconds() < end, "not in time"
        await deferLater(reactor, 0.01)


class SiteCase(TestCase):
    """Sites on loopback ports, and clients of them."""

    def setUp(self) -> None:
        self.probe = Probe()
        self.clients: list[Client] = []

    def serve(self, limits: Limits | None = None, clock: Any = reactor, resource: IResource | None = None) -> Site:
        self.site = site_of(resource or self.probe, Authenticator(KEY), clock, limits, log_requests=True)
        self.listen(self.site)
        return self.site

    def listen(self, factory: Any) -> None:
        self.port = reactor.listenTCP(0, factory, interface="127.0.0.1")
        self.addCleanup(self.leave)

    async def leave(self) -> None:
        await self.port.stopListening()
        self.site.connections.disconnect()
        for client in self.clients:
            if not client.closed:
                client.transport.abortConnection()  # type: ignore[union-attr]
        await until(lambda: not self.site.connections and all(client.closed for client in self.clients))

    async def connect(self, tls: Any = None) -> Client:
        client = Client()
        factory: Any = ClientFactory.forProtocol(lambda: client)
        if tls is not None:
            factory = TLSMemoryBIOFactory(tls, True, factory)
        reactor.connectTCP("127.0.0.1", self.port.getHost().port, factory)
        await until(lambda: client.connected)
        self.clients.append(client)
        return client

    @staticmethod
    def make_tls(offered: list[bytes]) -> tuple[Any, Any]:
        with TemporaryDirectory() as directory:
            made = certs.make(Path(directory), ["localhost"])
            trust = Certificate.loadPEM(made.certificate.read_bytes())
            certificates = Certificates(made.certificate, made.key)
            certificates.load()
        client = optionsForClientTLS("localhost", trustRoot=trust, acceptableProtocols=offered)
        return ContextFactory(certificates, REST_FIRST), client

    async def drip(self, client: Client, data: bytes) -> float:
        """Send this repeatedly in small pieces until the connection ends. Returns how many seconds it took."""
        began = reactor.seconds()
        dripping = LoopingCall(client.send, data)
        dripping.start(0.02).addErrback(lambda _: None)
        await until(lambda: client.closed)
        dripping.stop()
        return float(reactor.seconds() - began)


class AuthenticationTests(SiteCase):
    """Clients without a valid key."""

    async def test_before_the_body(self) -> None:
        """A wrong key is 401 at the headers, without one byte of the body."""
        self.serve()
        client = await self.connect()
        client.send(head(b"POST /start", b"Authorization: Bearer no", b"Content-Length: 60000000"))
        await until(lambda: client.ended)
        self.assertEqual(client.status, 401)
        self.assertIn(b"Connection: close", client.received)
        self.assertEqual(json.loads(client.body), {"error": "missing or wrong API key", "code": "unauthenticated"})
        self.assertEqual(self.probe.seen, [])

    async def test_dialect(self) -> None:
        """A client with a wrong x-api-key gets plain text, also for an unknown path."""
        self.serve()
        client = await self.connect()
        client.send(head(b"GET /nothing", b"x-api-key: no"))
        await until(lambda: client.ended)
        self.assertEqual((client.status, client.body), (401, b"missing or wrong API key"))
        self.assertIn(b"text/plain", client.received)

    async def test_both_must_match(self) -> None:
        """A valid key beside a wrong one is refused, and bytes that are not text are only a wrong key."""
        self.serve()
        for headers in ((BEARER, b"x-api-key: no"), (b"Authorization: no", DEPLOYED), (b"x-api-key: \xff",)):
            client = await self.connect()
            client.send(head(b"GET /", *headers))
            await until(lambda client=client: client.ended)  # type: ignore[misc]
            self.assertEqual(client.status, 401)

    async def test_unauthenticated_client_that_keeps_sending(self) -> None:
        """A refused client that goes on sending can read the answer, and is cut soon."""
        self.serve(Limits(linger=0.3))
        client = await self.connect()
        client.send(head(b"POST /start", b"Content-Length: 60000000"))
        took = await self.drip(client, b"x" * 1000)
        self.assertEqual(client.status, 401)
        self.assertTrue(0.2 < took < 3, took)

    async def test_pipelined_after_a_refusal(self) -> None:
        """The site ignores requests after a refused one."""
        self.serve()
        client = await self.connect()
        client.send(head(b"GET /a", b"x-api-key: no"), head(b"GET /b", BEARER))
        await until(lambda: client.ended)
        self.assertEqual((client.status, client.received.count(b"HTTP/1.1")), (401, 1))
        self.assertEqual(self.probe.seen, [])

    async def test_expect(self) -> None:
        """Expect: 100-continue is answered after authentication, and only then."""
        self.serve()
        client = await self.connect()
        headers = b"Content-Length: 2", b"Expect: 100-continue"
        client.send(head(b"PUT /a", BEARER, *headers))
        await until(client.holds(b"HTTP/1.1 100 Continue\r\n\r\n"))
        client.send(b"hi")
        await until(client.holds(b"seen /a"))
        stranger = await self.connect()
        stranger.send(head(b"PUT /stop", *headers))
        await until(lambda: stranger.ended)
        self.assertEqual((stranger.status, stranger.received.count(b"HTTP/1.1")), (401, 1))

    async def test_a_stranger(self) -> None:
        """Without a key, only an operation's path is 401: all else is a reply without a text, as of a web server."""
        self.serve()
        for text, status in (
            (head(b"GET /"), 404),
            (head(b"BREW /pot", b"Content-Length: 3") + b"tea", 404),
            (head(b"GET /infos"), 404),
            (head(b"GET /info/"), 401),
            (head(b"BREW /info"), 401),
        ):
            client = await self.connect()
            client.send(text)
            await until(lambda client=client: client.ended)  # type: ignore[misc]
            self.assertEqual((client.status, client.received.count(b"HTTP/1.1")), (status, 1), text)
            self.assertEqual(client.body == b"" and b"\r\nContent-Type" not in client.received, status == 404)
            self.assertNotIn(b"Server:", client.received)
        self.assertEqual(self.probe.seen, [])

    async def test_a_client_that_has_shown_a_key(self) -> None:
        """It gets texts: a later request without one is 401 on any path."""
        self.serve()
        client = await self.connect()
        client.send(head(b"GET /a", BEARER), head(b"GET /b"))
        await until(client.holds(b"missing or wrong API key"))
        self.assertIn(b"HTTP/1.1 401", client.received)


class BodyTests(SiteCase):
    """The size limit, and where bodies are kept."""

    async def test_declared(self) -> None:
        """A declared length over the limit is 413 at the headers, in the caller's dialect, without 100 Continue."""
        self.serve()
        for credential, answer in ((BEARER, b'"too_large"'), (DEPLOYED, b"a body may have 67108864 bytes at most")):
            client = await self.connect()
            client.send(head(b"POST /a", credential, b"Content-Length: 67108865", b"Expect: 100-continue"))
            await until(client.holds(answer))
            self.assertEqual(client.status, 413)

    async def test_chunked(self) -> None:
        """A chunked body is 413 when it goes over the limit, and the rest is dropped until the body's deadline."""
        self.serve(Limits(max_body=1000, body_deadline=0.5))
        client = await self.connect()
        client.send(head(b"POST /a", BEARER, b"Transfer-Encoding: chunked"))
        took = await self.drip(client, b"64\r\n" + b"x" * 100 + b"\r\n")
        self.assertEqual((client.status, client.received.count(b"HTTP/1.1")), (413, 1))
        self.assertTrue(0.4 < took < 3, took)
        self.assertEqual(self.probe.seen, [])

    async def test_chunked_in_one_go(self) -> None:
        """A chunked body that is over the limit and complete in one read is 413 as well, once."""
        self.serve(Limits(max_body=1000))
        client = await self.connect()
        chunks = (b"64\r\n" + b"x" * 100 + b"\r\n") * 20 + b"0\r\n\r\n"
        client.send(head(b"POST /a", BEARER, b"Transfer-Encoding: chunked"), chunks, head(b"GET /b", BEARER))
        await until(lambda: client.ended)
        self.assertEqual((client.status, client.received.count(b"HTTP/1.1")), (413, 1))
        self.assertEqual(self.probe.seen, [])

    async def test_in_memory(self) -> None:
        """Long and chunked bodies are kept in memory, whole."""
        self.serve(Limits(max_body=300_000))
        client = await self.connect()
        body = b"secret" * 50_000
        client.send(head(b"POST /a", BEARER, b"Content-Length: 300000"), body)
        client.send(head(b"POST /b", BEARER, b"Transfer-Encoding: chunked"), b"493e0\r\n", body, b"\r\n0\r\n\r\n")
        await until(client.holds(b"seen /b"))
        expected = [(b"POST", path, BytesIO, body) for path in (b"/a", b"/b")]
        self.assertEqual(self.probe.seen, expected)

    async def test_without_room(self) -> None:
        """Large bodies beyond the budget are 503 with Retry-After, by their declared length or as they come."""
        self.serve(Limits(bodies=150_000))
        bodies = self.site.connections.bodies
        holder = await self.connect()
        holder.send(head(b"POST /a", BEARER, b"Content-Length: 100000"), bytes(50_000))
        await until(lambda: bodies.taken == 100_000)
        chunk = b"10000\r\n" + bytes(0x10000) + b"\r\n"
        for more in (b"Content-Length: 70000", b"Transfer-Encoding: chunked"):
            client = await self.connect()
            client.send(head(b"POST /b", BEARER, more), chunk)
            await until(client.holds(b'"crowded"'))
            self.assertEqual(client.status, 503)
            self.assertIn(b"Retry-After: 1\r\n", client.received)
        small = await self.connect()
        small.send(head(b"POST /c", BEARER, b"Content-Length: 9"), bytes(9))
        await until(small.holds(b"seen /c"))
        holder.send(bytes(50_000))
        await until(holder.holds(b"seen /a"))
        self.assertEqual(bodies.taken, 0)
        for end in (lambda one: one.transport.abortConnection(), lambda one: one.send(b"zz\r\n")):
            client = await self.connect()
            client.send(head(b"POST /d", BEARER, b"Transfer-Encoding: chunked"), chunk)
            await until(lambda: bodies.taken == 0x10000)
            end(client)
            await until(lambda: not bodies.taken)

    async def test_get_with_a_body(self) -> None:
        """GET may have a body, and one request follows another on the same connection."""
        self.serve()
        client = await self.connect()
        for path in (b"/a", b"/b"):
            client.send(head(b"GET " + path, BEARER, b"Content-Length: 2"), b"hi")
            await until(client.holds(b"seen " + path))
        self.assertEqual([body for *_, body in self.probe.seen], [b"hi", b"hi"])

    async def test_pipelined(self) -> None:
        """Requests sent in one go are answered in order."""
        self.serve()
        client = await self.connect()
        client.send(*(head(b"GET /%d" % n, BEARER) for n in range(5)))
        await until(client.holds(b"seen ", 5))
        self.assertEqual([path for _, path, *_ in self.probe.seen], [b"/%d" % n for n in range(5)])

    async def test_not_http(self) -> None:
        """Bytes that are not HTTP get a 400 and a closed connection, with a text for clients that try a key."""
        self.serve()
        for text, answer in (
            (b"what\r\n\r\n", b""),
            (head(b"GET /a", DEPLOYED, b"no colon", b"more: x"), b"this is not a valid HTTP/1.1 request"),
            (head(b"GET /a", BEARER, b"Content-Length: " + b"9" * 5000), b'"invalid_request"'),
            (head(b"GET /a", BEARER, *[b"x: " + b"y" * 6_000] * 3), b'"invalid_request"'),
            (head(b"GET /a", *[b"x: " + b"y" * 6_000] * 3, BEARER), b""),
            (b"GET /" + b"y" * 40_000, b""),
            (head(b"POST /a", BEARER, b"Transfer-Encoding: chunked") + b"zz\r\n", b'"invalid_request"'),
        ):
            client = await self.connect()
            client.send(text)
            await until(lambda client=client: client.ended)  # type: ignore[misc]
            self.assertEqual((client.status, client.received.count(b"HTTP/1.1 400")), (400, 1), text[:50])
            self.assertIn(answer, client.body)
            self.assertEqual(bool(client.body), bool(answer))
        self.assertEqual(self.probe.seen, [])


class DeadlineTests(SiteCase):
    """Deadlines."""

    async def test_dripping_headers(self) -> None:
        """Headers that trickle in are answered 408 at the deadline, and the client is cut."""
        self.serve(Limits(deadline=1, linger=0.3))
        for key in (b"", BEARER + b"\r\n"):
            client = await self.connect()
            client.send(b"GET /a HTTP/1.1\r\n" + key + b"Host: x\r\nx: ")
            took = await self.drip(client, b"y")
            self.assertEqual(client.status, 408)
            if key:
                self.assertEqual(json.loads(client.body)["code"], "request_timeout")
            else:
                self.assertEqual(client.body, b"")
            self.assertLess(took, 5)

    async def test_dripping_body(self) -> None:
        """A body that trickles in is answered 408 at its own deadline, in the caller's dialect; the client is cut."""
        clock = Clock()
        self.serve(Limits(deadline=10, body_deadline=50, linger=1), clock=clock)
        client = await self.connect()
        client.send(head(b"POST /a", DEPLOYED, b"Content-Length: 1000000"))
        # The node has read the headers when the deadline of the body is set.
        await until(lambda: any(call.getTime() >= 50 for call in clock.getDelayedCalls()))
        for _ in range(4):
            client.send(b"y")
            clock.advance(12)
        self.assertEqual(client.received, b"")
        clock.advance(12)
        await until(lambda: client.status == 408)
        self.assertTrue(client.body.startswith(b"the request did not arrive in time"))
        clock.advance(2)
        await until(lambda: client.ended)

    async def test_second_request_drips(self) -> None:
        """The deadline holds for every request of a connection, from its first byte."""
        self.serve(Limits(deadline=1, linger=0.3))
        client = await self.connect()
        client.send(head(b"GET /a", BEARER))
        await until(client.holds(b"seen /a"))
        self.assertLess(await self.drip(client, b"y"), 3)
        self.assertEqual(client.received.count(b"408 Request Time"), 1)

    async def test_silence(self) -> None:
        """A connection on which nothing comes is closed at the deadline, without an answer."""
        clock = Clock()
        site = self.serve(clock=clock)
        client = await self.connect()
        await until(lambda: site.connections)
        clock.advance(9)
        self.assertTrue(site.connections)
        clock.advance(2)
        await until(lambda: client.ended)
        self.assertEqual(client.received, b"")

    async def test_idle(self) -> None:
        """Between two requests the idle limit counts, not the deadline of a request."""
        clock = Clock()
        site = self.serve(clock=clock)
        client = await self.connect()
        for n in range(3):
            client.send(head(b"GET /%d" % n, BEARER))
            await until(client.holds(b"seen /%d" % n))
            clock.advance(119)
        self.assertTrue(site.connections)
        clock.advance(2)
        await until(lambda: client.ended)
        self.assertEqual(client.received.count(b"HTTP/1.1"), 3)
        await until(lambda: not site.connections)
        self.assertEqual(clock.getDelayedCalls(), [])


class ConnectionTests(SiteCase):
    """How many connections there may be, which ones are cut for others, and TLS."""

    async def test_connections_without_a_key_go_first(self) -> None:
        """When all places are taken, the oldest connection without a key is cut, and none with a key; one log line."""
        self.serve(Limits(max_connections=3))
        warnings = self.watch(LogLevel.warn, "node.door.connections")
        known = await self.connect()
        await self.ask(known)
        strangers = [await self.admitted(count) for count in (2, 3)]
        another = await self.connect()
        await until(lambda: strangers[0].closed)
        await self.ask(another)
        await self.ask(known)
        self.assertFalse(strangers[1].closed)
        last = await self.connect()
        await until(lambda: strangers[1].closed)
        await self.ask(last)
        self.assertEqual(len(warnings), 1)

    async def test_idle_ones_go_next(self) -> None:
        """Of connections with a key, the one that is idle for longest is cut."""
        self.serve(Limits(max_connections=2))
        first, second = await self.connect(), await self.connect()
        for client in (first, second, first):
            await self.ask(client)
        another = await self.connect()
        await until(lambda: second.closed)
        await self.ask(another)
        self.assertFalse(first.closed)

    async def test_busy_ones_stay(self) -> None:
        """No busy connection is cut for a newcomer: a new connection is closed until there is room."""
        self.serve(Limits(max_connections=2))
        busy = [await self.connect(), await self.connect()]
        for client in busy:
            client.send(head(b"PUT /a", BEARER, b"Content-Length: 2", b"Expect: 100-continue"))
            await until(client.holds(b"100 Continue"))
        over = await self.connect()
        await until(lambda: over.closed)
        for client in busy:
            client.send(b"hi")
            await until(client.holds(b"seen /a"))
        await self.ask(await self.connect())

    async def admitted(self, count: int) -> Client:
        """A silent client that is admitted; there are this many connections then."""
        client = await self.connect()
        await until(lambda: len(self.site.connections) == count)
        return client

    async def ask(self, client: Client) -> None:
        before = client.received.count(b"seen /a")
        client.send(head(b"GET /a", BEARER))
        await until(client.holds(b"seen /a", before + 1))

    async def test_refusals_are_not_logged(self) -> None:
        """Refused requests are not logged, unless every request is."""
        self.serve()
        for log_requests in (False, True):
            self.site._log_requests = log_requests
            lines = [self.watch(level) for level in LogLevel.iterconstants()]
            for text in (head(b"GET /a", b"x-api-key: no"), b"what\r\n\r\n"):
                client = await self.connect()
                client.send(text)
                await until(lambda client=client: client.ended)  # type: ignore[misc]
            self.assertEqual(sum(map(len, lines)), 2 * log_requests)

    async def test_the_log_has_no_secrets(self) -> None:
        """A request is one debug line without its key and its body; there is no other line."""
        self.serve()
        lines = self.watch(LogLevel.debug)
        client = await self.connect()
        client.send(head(b"PUT /a", BEARER, b"Content-Length: 6"), b"secret")
        await until(client.holds(b"seen /a"))
        self.assertEqual([(line["method"], line["path"], line["status"]) for line in lines], [("PUT", "/a", 200)])
        self.assertNotIn(KEY, repr(lines))
        self.assertNotIn("secret", repr(lines))

    async def test_dead_clients(self) -> None:
        """The kernel's keep-alive is on for every connection."""
        site = self.serve()
        await self.connect()
        await until(lambda: site.connections)
        (channel,) = site.connections
        self.check_keep_alive(channel.transport.getHandle())

    async def test_tls(self) -> None:
        """Over TLS, too: no HTTP/2, kernel keep-alive, and the site cuts clients that keep sending or are silent."""
        clock = Clock()
        server_tls, client_tls = self.make_tls([b"h2", b"http/1.1"])
        site = self.site = site_of(self.probe, Authenticator(KEY), clock, Limits(max_connections=2))
        self.listen(TLSMemoryBIOFactory(server_tls, False, site))
        client = await self.connect(client_tls)
        client.send(head(b"GET /a", BEARER))
        await until(client.holds(b"seen /a"))
        self.assertEqual(client.transport.negotiatedProtocol, b"http/1.1")  # type: ignore[union-attr]
        (channel,) = site.connections
        self.assertIsInstance(channel.transport, ProtocolWrapper)
        self.check_keep_alive(channel.transport.transport.getHandle())

        polite = await self.connect(client_tls)
        polite.send(head(b"POST /start", b"Content-Length: 60000000"), b"x" * 100_000)
        await until(lambda: polite.closed)
        self.assertEqual(polite.status, 401)

        stubborn = await self.connect(client_tls)
        await until(lambda: stubborn.transport.negotiatedProtocol)  # type: ignore[union-attr]
        stubborn.send(head(b"POST /a", b"Content-Length: 60000000"))
        stubborn.transport.transport.pauseProducing()  # type: ignore[union-attr]
        await until(lambda: any(one._action == one.transport.abortConnection for one in site.connections))
        clock.advance(5)
        await until(lambda: len(site.connections) == 1)
        stubborn.transport.transport.resumeProducing()  # type: ignore[union-attr]

        for tls in (None, client_tls):
            silent = await self.connect(tls)
            await until(lambda tls=tls, silent=silent: not tls or silent.transport.negotiatedProtocol)  # type: ignore[misc]
            await until(lambda: len(site.connections) == 2)
            silent.transport.pauseProducing()  # type: ignore[union-attr]
            clock.advance(10)
            await until(lambda: len(site.connections) == 1)

        client.transport.pauseProducing()  # type: ignore[union-attr]
        clock.advance(120)
        self.assertEqual(len(site.connections), 1)
        clock.advance(5)
        await until(lambda: not site.connections)

    async def test_h2_alone(self) -> None:
        """A client that offers only HTTP/2 and then speaks HTTP/1.1 is served."""
        server_tls, client_tls = self.make_tls([b"h2"])
        self.site = site_of(self.probe, Authenticator(KEY), reactor)
        self.listen(TLSMemoryBIOFactory(server_tls, False, self.site))
        client = await self.connect(client_tls)
        client.send(head(b"GET /a", BEARER))
        await until(client.holds(b"seen /a"))

    def check_keep_alive(self, handle: socket.socket) -> None:
        self.assertEqual(handle.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE), 1)
        self.assertEqual(handle.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT), DEAD_AFTER * 1000)

    def watch(self, level: Any, namespace: str = "node.door.site") -> list[Any]:
        """Collect what is logged there at this level from now on."""
        events: list[Any] = []

        @implementer(ILogObserver)
        def observe(event: Any) -> None:
            if event["log_namespace"].startswith(namespace) and event["log_level"] is level:
                events.append(event)

        globalLogPublisher.addObserver(observe)
        self.addCleanup(globalLogPublisher.removeObserver, observe)
        return events


class EndTests(SiteCase):
    """The end of the node: clients that keep their connection learn it before they send the next request."""

    async def test_quiet(self) -> None:
        """Over TLS, too, a connection without recent requests ends at once."""
        client = await self.begin()
        ends = ensureDeferred(self.site.connections.finish(1.0, lambda: True))
        await self.going(lambda: client.ended)
        await self.going(lambda: ends.called)

    async def test_dismissed(self) -> None:
        """A node that stops may cut the remaining connections, because their clients got a notice."""
        client = await self.begin()
        ends = ensureDeferred(self.site.connections.dismiss())
        await self.going(lambda: client.ended and ends.called)

    async def test_recently_used(self) -> None:
        """A client that has just had a reply may be sending a request: its next reply is the last, with `close`."""
        client = await self.begin()
        ends = ensureDeferred(self.site.connections.dismiss())
        self.assertFalse(ends.called)
        client.send(head(b"GET /b", BEARER))
        await until(client.holds(b"seen /b"))
        self.assertEqual(client.received.count(b"Connection: close"), 1)
        await self.going(lambda: client.ended and ends.called)

    async def test_busy(self) -> None:
        """A call under way keeps its connection for as long as it takes; its reply is the last."""
        waits = Waits()
        client = await self.begin(waits)
        client.send(head(b"GET /b", BEARER))
        await until(lambda: waits.requests)
        ends = ensureDeferred(self.site.connections.finish(1.0, lambda: False))
        await self.going(lambda: ends.called)
        self.assertFalse(client.ended)
        waits.requests[0].write(b"at last")
        waits.requests[0].finish()
        await until(lambda: client.ended)
        self.assertIn(b"at last", client.received)
        self.assertEqual(client.received.count(b"Connection: close"), 1)

    async def test_a_reply_on_its_way(self) -> None:
        """The end of a connection is sent after the reply is known to be delivered: a client that resets has had it."""
        waits = Waits()
        client = await self.begin(waits)
        client.send(head(b"GET /b", BEARER))
        await until(lambda: waits.requests)
        ends = ensureDeferred(self.site.connections.finish(1.0, lambda: True))
        delivered: Deferred[bool] = Deferred()
        outcomes: list[bool] = []
        delivered.addCallback(outcomes.append)
        await self.going(lambda: all(one.session._last for one in self.site.connections))  # type: ignore[union-attr]
        self.site.deliveries.write(waits.requests[0], b"at last", delivered)
        waits.requests[0].finish()
        await until(client.holds(b"at last"))
        # Another request is served meanwhile: there was time enough for an end.
        other = await self.connect(self.client_tls)
        other.send(head(b"GET /a"))
        await until(lambda: other.ended)
        self.assertEqual((outcomes, client.ended, ends.called), ([], False, False))
        await self.going(lambda: client.ended and ends.called)
        self.assertEqual(outcomes, [True])

    async def test_a_reply_that_is_not_delivered(self) -> None:
        """The node waits for its delivery as long as for calls, and no longer."""
        await self.begin()
        (connection,) = self.site.connections
        # One byte more than there are.
        beyond = written(connection.transport) + 1
        self.site.deliveries.watch(connection.transport, beyond, Deferred())
        before = self.clock.seconds()
        ends = ensureDeferred(self.site.connections.finish(2.0, lambda: True))
        await self.going(lambda: ends.called)
        self.assertTrue(2.0 < self.clock.seconds() - before < 3.0)

    async def begin(self, waits: Waits | None = None) -> Client:
        """A client that keeps its connection, with one request answered on it."""
        server_tls, client_tls = self.make_tls([b"http/1.1"])
        self.client_tls = client_tls
        self.clock = Clock()
        site = self.site = site_of(waits or self.probe, Authenticator(KEY), self.clock)
        self.listen(TLSMemoryBIOFactory(server_tls, False, site))
        client = await self.connect(client_tls)
        client.send(head(b"GET /a", BEARER))
        if waits is not None:
            await until(lambda: waits.requests)
            waits.requests.pop().finish()
        await until(client.holds(b" 200 OK"))
        await until(lambda: all(connection.idle for connection in site.connections))
        return client

    async def going(self, condition: Callable[[], object]) -> None:
        """Wait for the condition while time passes for the site."""

        def passed() -> object:
            self.clock.advance(0.01)
            return condition()

        await until(passed)


class LogStreamTests(SiteCase):
    """`GET /logs`."""

    def setUp(self) -> None:
        super().setUp()
        self.clock = Clock()
        self.ring = LogRing(self.clock, 100)
        self.serve(clock=self.clock, resource=make_app(Calls(FakeBackend(), self.ring)))

    async def open(self, credential: bytes) -> Client:
        client = await self.connect()
        client.send(head(b"GET /logs", credential))
        await until(client.holds(b"\r\n\r\n"))
        return client

    def extend(self, *lines: str) -> None:
        self.ring.extend(lines)
        self.clock.advance(COALESCE)

    async def turning(self, condition: Callable[[], object]) -> None:
        """Wait for a condition that takes several turns of the reactor."""

        end = reactor.seconds() + 20
        while not condition():
            assert reactor.seconds() < end, "not in time"
            self.clock.advance(0)
            await deferLater(reactor, 0)

    async def test_sse(self) -> None:
        """A Bearer client gets the tail, then each line as an event; with Last-Event-ID, the lines after that."""
        self.extend("before")
        client = await self.open(BEARER)
        self.assertIn(b"Content-Type: text/event-stream", client.received)
        await until(client.holds(b"data: before\n\n"))
        self.extend("one", "two\r\nlines")
        await until(client.holds(b"data: two\\r\\nlines\n\n"))
        [first] = re.findall(rb"id: (.*)\ndata: one\n\n", client.received)
        again = await self.open(BEARER + b"\r\nLast-Event-ID: " + first)
        await until(again.holds(b"data: two\\r\\nlines\n\n"))
        self.assertNotIn(b"data: one", again.received)
        elsewhere = await self.open(BEARER + b"\r\nLast-Event-ID: 7@another node")
        await until(elsewhere.holds(b"data: two\\r\\nlines\n\n"))
        self.assertIn(b"data: before", elsewhere.received)

    async def test_headers_at_once(self) -> None:
        """Without lines, both dialects get their headers at once, and only the document's gets a comment."""
        client = await self.open(BEARER)
        await until(client.holds(b": heartbeat\n\n"))
        deployed = await self.open(DEPLOYED)
        self.assertEqual(deployed.status, 200)
        self.assertEqual(deployed.body, b"")

    async def test_heartbeat(self) -> None:
        """A comment comes after silence; deployed clients, which would show it, get none."""
        client, deployed = await self.open(BEARER), await self.open(DEPLOYED)
        await until(client.holds(b": heartbeat"))
        self.clock.advance(HEARTBEAT - 1)
        self.extend("a line")
        self.clock.advance(HEARTBEAT - 1)
        await until(client.holds(b"data: a line\n\n"))
        self.assertEqual(client.received.count(b": heartbeat\n\n"), 1)
        self.clock.advance(1)
        await until(client.holds(b": heartbeat\n\n", 2))
        await until(deployed.holds(b"a line\n"))
        self.assertNotIn(b"heartbeat", deployed.received)
        self.assertNotIn(b"data:", deployed.received)

    async def test_stays_open(self) -> None:
        """No deadline of the site ends a stream, and a reader takes nothing away from another."""
        clients = [await self.open(BEARER), await self.open(DEPLOYED)]
        for _ in range(600):
            self.clock.advance(60)
        self.extend("late")
        for client in clients:
            await until(client.holds(b"late\n"))
            self.assertFalse(client.ended)

    async def test_disconnect(self) -> None:
        """A client that goes away releases its place in the ring and its timers."""
        for credential in (BEARER, DEPLOYED):
            client = await self.open(credential)
            await until(lambda: self.ring._waiters)
            client.transport.loseConnection()  # type: ignore[union-attr]
            await until(lambda: not self.site.connections)
            self.assertEqual(len(self.ring._waiters), 0)
            self.assertEqual(self.clock.getDelayedCalls(), [])

    async def test_slow_reader(self) -> None:
        """A reader that takes nothing loses lines, and gets their number and all others; another reader gets all."""
        slow, quick = await self.open(DEPLOYED), await self.open(DEPLOYED)
        slow.transport.pauseProducing()  # type: ignore[union-attr]
        for n in range(12):
            self.extend(*(f"{n}-{m} " + "x" * 30_000 for m in range(100)))
            await self.turning(lambda n=n: b"\n%d-99 " % n in quick.received[-40_000:])  # type: ignore[misc]
        self.assertNotIn(b"dropped", quick.received)
        slow.transport.resumeProducing()  # type: ignore[union-attr]
        await self.turning(lambda: b"\n11-99 " in slow.received[-40_000:])
        dropped = [int(n) for n in re.findall(rb"^\[node\] (\d+) lines were dropped", slow.received, re.MULTILINE)]
        self.assertTrue(dropped)
        self.assertEqual(sum(dropped) + len(re.findall(rb"^\d+-\d+ ", slow.received, re.MULTILINE)), 1200)
        self.assertLess(len(slow.received), len(quick.received))

    async def test_slow_reader_goes_away(self) -> None:
        """A paused reader that disconnects is released, too."""
        slow = await self.open(BEARER)
        slow.transport.pauseProducing()  # type: ignore[union-attr]
        for n in range(6):
            self.extend(*(f"{n}-{m} " + "x" * 30_000 for m in range(100)))
        slow.transport.abortConnection()  # type: ignore[union-attr]
        await until(lambda: not self.site.connections)
        self.assertEqual(len(self.ring._waiters), 0)
        self.clock.advance(COALESCE)
        self.assertEqual(self.clock.getDelayedCalls(), [])
