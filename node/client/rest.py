"""The client's calls over REST, by treq. Connections are kept for later calls; a stream has one of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from io import BytesIO
from itertools import chain
from typing import Any, Generic, TypeVar

from cryptography.x509 import load_pem_x509_certificates
from google.protobuf.message import DecodeError, Message
from google.protobuf.proto import serialize_length_prefixed
from OpenSSL import SSL
from OpenSSL.crypto import X509, X509StoreFlags
from OpenSSL.SSL import Connection
from treq.client import HTTPClient
from twisted.internet import error
from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.endpoints import HostnameEndpoint, wrapClientTLS
from twisted.internet.interfaces import IOpenSSLClientConnectionCreator, IReactorTime, IStreamClientEndpoint
from twisted.internet.protocol import Protocol, connectionDone
from twisted.internet.ssl import Certificate, optionsForClientTLS, platformTrust, trustRootFromCertificates
from twisted.python.failure import Failure
from twisted.web.client import (  # type: ignore[attr-defined]
    URI,
    Agent,
    HTTPConnectionPool,
    RequestGenerationFailed,
    RequestNotSent,
    RequestTransmissionFailed,
    ResponseDone,
    ResponseFailed,
)
from twisted.web.http_headers import Headers
from twisted.web.iweb import IAgentEndpointFactory, IResponse
from zope.interface import implementer

from node.api.auth import Dialect
from node.api.framing import arrived, single
from node.api.methods import MAX_BODY, Kind, Method
from node.base.alarm import Alarm
from node.base.errors import InvalidRequest, UsersRefused
from node.client.failures import NoReply, StreamEnded, UnexpectedReply, Unreachable, of_http
from node.client.target import Target
from node.client.transport import LAST, Inbox, Line
from protos.service_pb2 import Event

MEDIA_TYPE = "application/x-protobuf"
# Seconds for which an idle connection is kept; the node closes one after 120.
IDLE = 30
_OK = 200
_NO_HEADERS: Mapping[str, str] = {}
_BROKEN = (
    error.ConnectError,
    error.ConnectionClosed,
    error.ConnectingCancelledError,
    error.DNSLookupError,
    RequestGenerationFailed,
    RequestNotSent,
    RequestTransmissionFailed,
    ResponseFailed,
    SSL.Error,
)
T = TypeVar("T")
Split = Callable[[bytes], tuple[Iterable[T], bytes]]
# Seconds without a byte after which a stream counts as broken; the node sends a heartbeat every 15.
SILENCE = 45.0
# Bytes of a line or an event; the node's lines have at most 64 Ki characters.
MAX_LINE = 1024 * 1024


class RestTransport:
    """See `Transport`. A feed of users is one request for each; all are sent, then one error lists the refused ones."""

    def __init__(self, reactor: IReactorTime, target: Target) -> None:
        self._reactor = reactor
        self._host = target.address
        self._dialect = target.dialect
        self._credentials = target.credentials()
        self._pool = HTTPConnectionPool(reactor)
        self._pool.cachedConnectionTimeout = IDLE
        name = target.asked_name or target.name
        endpoints = TlsEndpointFactory(reactor, target.name, target.port, name, target.certificates())
        self._http = HTTPClient(Agent.usingEndpointFactory(reactor, endpoints, pool=self._pool))

    async def call(self, method: Method, messages: Sequence[Message]) -> bytes:
        if method.kind is Kind.FEED and method.cut is single:
            return await self._one_by_one(method, messages)
        if method.kind is Kind.FEED:
            return await self._ask(method, _delimited(messages))
        (message,) = messages
        return await self._ask(method, message.SerializeToString())

    async def lines(self, method: Method, last: str) -> Inbox[Line]:
        response = await self._opened(method, b"", {LAST: last} if last else {})
        placed = self._dialect is Dialect.DOCUMENT
        return StreamBody(self._reactor, response, placed_lines if placed else plain_lines, heartbeats=placed).inbox

    async def events(self, method: Method, request: Message) -> Inbox[Event]:
        response = await self._opened(method, request.SerializeToString())
        return StreamBody(self._reactor, response, split_events).inbox

    async def close(self) -> None:
        await self._pool.closeCachedConnections()

    async def _one_by_one(self, method: Method, messages: Sequence[Message]) -> bytes:
        refused: list[str] = []
        for message in messages:
            try:
                await self._ask(method, message.SerializeToString())
            except UsersRefused as fault:
                refused.append(fault.text.removeprefix(UsersRefused([]).text))
        if refused:
            raise UsersRefused.of_text(UsersRefused([]).text + "; ".join(refused))
        return b""

    async def _ask(self, method: Method, body: bytes) -> bytes:
        return await _whole(await self._opened(method, body))

    async def _opened(self, method: Method, body: bytes, more: Mapping[str, str] = _NO_HEADERS) -> IResponse:
        """Return the response with status 200, before its body is read. Raises the error of any other status."""
        fields = {**self._credentials, **more, "host": self._host}
        headers = Headers({name: [value] for name, value in fields.items()})
        if body:
            headers.setRawHeaders("Content-Type", [MEDIA_TYPE])
        try:
            response = await self._http.request(
                method.verbs[0],
                # Not the real host: treq does not accept IPv6 addresses.
                "https://node" + method.path,
                headers=headers,
                data=body or None,
                allow_redirects=False,
                unbuffered=True,
            )
        except _BROKEN as fault:
            raise _unanswered(fault) from fault
        except ValueError as fault:  # from Twisted and idna, before the name is resolved
            raise Unreachable(f"{self._host!r} is not a valid address: {fault}") from fault
        if response.code != _OK:
            raise of_http(method, response.code, await _whole(response), self._dialect)
        return response


def _delimited(messages: Sequence[Message]) -> bytes:
    body = BytesIO()
    for message in messages:
        serialize_length_prefixed(message, body)
    return body.getvalue()


def _unanswered(fault: Exception) -> Exception:
    """Return the error of a call without an answer: cancelled by the caller, no connection, or a broken one."""
    reasons = [failure.value for failure in getattr(fault, "reasons", ())] or [fault]
    if any(isinstance(reason, CancelledError | error.ConnectingCancelledError) for reason in reasons):
        return CancelledError()
    return Unreachable("no answer: " + "; ".join(f"{type(reason).__name__}: {reason}" for reason in reasons))


@implementer(IAgentEndpointFactory)
class TlsEndpointFactory:
    """Connects to this host, whatever the URL, and checks `name`. Without `pem` it trusts the machine's authorities."""

    def __init__(self, reactor: IReactorTime, host: str, port: int, name: str, pem: bytes | None) -> None:
        self._reactor = reactor
        self._name = name
        self._address = host, port
        found = [] if pem is None else load_pem_x509_certificates(pem)
        pinned = [Certificate(X509.from_cryptography(certificate)) for certificate in found]
        self._root = trustRootFromCertificates(pinned) if pinned else platformTrust()

    def endpointForURI(self, uri: URI) -> IStreamClientEndpoint:
        host, port = self._address
        trusting = _Pinning(optionsForClientTLS(self._name, trustRoot=self._root))
        return wrapClientTLS(trusting, HostnameEndpoint(self._reactor, host, port))


@implementer(IOpenSSLClientConnectionCreator)
class _Pinning:
    """Trusts a pinned certificate also if another one has signed it, as gRPC's library does."""

    def __init__(self, creator: Any) -> None:
        self._creator = creator

    def clientConnectionForTLS(self, protocol: Any) -> Connection:
        connection: Connection = self._creator.clientConnectionForTLS(protocol)
        store = connection.get_context().get_cert_store()
        assert store is not None
        store.set_flags(X509StoreFlags.PARTIAL_CHAIN)
        return connection


class Body(Protocol):
    """Passes data to `take`, which may raise `NoReply`. `done` fires at the end; cancelling it ends the connection."""

    transport: Any

    def __init__(self, take: Callable[[bytes], object]) -> None:
        self.done: Deferred[None] = Deferred(lambda _: self.transport.loseConnection())
        self._take = take

    def dataReceived(self, data: bytes) -> None:
        try:
            if not self.done.called:
                self._take(data)
        except NoReply as error:
            self.transport.loseConnection()
            self.done.errback(error)

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        if self.done.called:
            return
        if reason.check(ResponseDone):
            self.done.callback(None)
        else:
            self.done.errback(reason)


async def _whole(response: IResponse) -> bytes:
    """Read a whole body. Raises `UnexpectedReply` if it is longer than any reply may be, and `Unreachable`."""
    found = bytearray()

    def take(data: bytes) -> None:
        found.extend(data)
        if len(found) > MAX_BODY:
            raise UnexpectedReply(f"the reply is larger than {MAX_BODY} bytes")

    body = Body(take)
    response.deliverBody(body)
    try:
        await body.done
    except _BROKEN as fault:
        raise _unanswered(fault) from fault
    return bytes(found)


class StreamBody(Generic[T]):
    """Reads an endless body into `inbox`. With `heartbeats` a silent node is gone.

    `split` takes the received data apart into complete items and the incomplete rest. It raises `UnexpectedReply`.
    """

    def __init__(self, reactor: IReactorTime, response: IResponse, split: Split[T], heartbeats: bool = True) -> None:
        self._split = split
        self._heartbeats = heartbeats
        self._tail = b""
        self._silence = Alarm(reactor, self._silent)
        self._body = Body(self._take)
        self.inbox: Inbox[T] = Inbox(reactor, self._body.done.cancel)
        self._body.done.addCallbacks(self._over, self._broken)
        response.deliverBody(self._body)
        self._listen()

    def _take(self, data: bytes) -> None:
        found, self._tail = self._split(self._tail + data)
        if len(self._tail) > MAX_LINE:
            raise UnexpectedReply(f"a log line or an event is larger than {MAX_LINE} bytes")
        self.inbox.put(found)
        self._listen()
        if self.inbox.full:
            self._silence.cancel()
            self._body.transport.pauseProducing()
            self.inbox.room().addCallback(self._go_on)

    def _go_on(self, _: None) -> None:
        self._listen()
        self._body.transport.resumeProducing()

    def _listen(self) -> None:
        """Restart the timer that ends the stream if no heartbeat comes."""
        if self._heartbeats and not self._body.done.called:
            self._silence.set(SILENCE)

    def _silent(self) -> None:
        self.inbox.end(Unreachable(f"nothing came from the node for {SILENCE:g} s"))
        self._body.done.cancel()

    def _over(self, _: None) -> None:
        self._silence.cancel()
        self.inbox.end(StreamEnded())

    def _broken(self, failure: Failure) -> None:
        self._silence.cancel()
        error = failure.value
        self.inbox.end(error if isinstance(error, NoReply) else Unreachable(f"the stream broke: {error}"))


def plain_lines(data: bytes) -> tuple[Iterable[Line], bytes]:
    """Split off the log lines of a body without places."""
    head, ended, tail = data.replace(b"\r\n", b"\n").rpartition(b"\n")
    return map(Line, head.decode("utf-8", "replace").split("\n") if ended else ()), tail


def placed_lines(data: bytes) -> tuple[Iterable[Line], bytes]:
    """Split off the log lines of Server-Sent Events, with their places; heartbeats are comments."""
    # An event ends with an empty line.
    head, ended, tail = data.replace(b"\r\n", b"\n").rpartition(b"\n\n")
    return chain.from_iterable(map(_lines, head.decode("utf-8", "replace").split("\n\n") if ended else ())), tail


def _lines(event: str) -> Iterator[Line]:
    """Return the line of one event; a comment has none."""
    fields = [line.partition(":") for line in event.split("\n")]
    place = next((value.removeprefix(" ") for name, _, value in fields if name == "id"), "")
    return (Line(value.removeprefix(" "), place) for name, _, value in fields if name == "data")


def split_events(data: bytes) -> tuple[Iterable[Event], bytes]:
    """Split off the events, each after its length; empty ones are heartbeats. Raises `UnexpectedReply`."""
    try:
        bodies, rest = arrived(data)
        found = [Event.FromString(body) for body in bodies]
    except (InvalidRequest, DecodeError) as error:
        raise UnexpectedReply(f"the reply is not a stream of events: {error}") from error
    return [event for event in found if event.kind], rest
