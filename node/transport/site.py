"""The bounded HTTP/1.1 site in front of the REST interface.

A stranger is answered at the headers, before any body is read. Every request has absolute deadlines and a limit of
size, every body stays in memory, and a client that is gone is noticed. twisted.web alone limits neither the size nor
the time of a request (Twisted issues 4898 and 10191) and puts bodies over 100 kB, here users' secrets, into files.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from io import BytesIO
from typing import Any
from urllib.parse import unquote

from twisted.internet.interfaces import IReactorTime
from twisted.python.failure import Failure
from twisted.web import http, server
from twisted.web.http_headers import Headers
from twisted.web.resource import IResource

from node.api.auth import NOBODY, Authenticator, Caller, Dialect, bearer_of, dialect
from node.api.methods import MAX_BODY, scope_of
from node.api.pages import Page
from node.door import connections
from node.door.bodies import AGAIN, SMALL
from node.door.connections import Connection, Connections
from node.door.delivery import queued, tcp
from node.errors import (
    Crowded,
    Forbidden,
    Internal,
    InvalidRequest,
    NodeError,
    RequestTimeout,
    TooLarge,
    Unauthenticated,
)
from node.keyfile import Scope
from node.logs import Logger

# Verbs that change nothing.
_LOOKING = (b"GET", b"HEAD")
# In every response.
_EVERYWHERE = ((b"Server", b"txnode"), (b"Cache-Control", b"no-store"), (b"X-Content-Type-Options", b"nosniff"))

_logger = Logger()


@dataclass(frozen=True)
class Limits(connections.Limits):
    """What a client of REST may take besides."""

    max_body: int = MAX_BODY


def describe(error: NodeError, dialect: Dialect) -> tuple[bytes, bytes]:
    """The media type and the body that tell a caller of this dialect about an error."""
    if dialect is Dialect.DEPLOYED:
        return b"text/plain; charset=utf-8", error.text.encode("utf-8", "replace")
    return b"application/json", json.dumps({"error": error.text, "code": error.code}).encode()


class Request(server.Request):
    """A request whose caller is known. `dialect` is what the caller speaks."""

    channel: Any
    site: Any
    content: BytesIO
    caller: Caller
    dialect = Dialect.DOCUMENT

    def __init__(self, channel: Channel, *args: Any, **options: Any) -> None:
        super().__init__(channel, *args, **options)
        self.began = channel.site.reactor.seconds()

    def gotLength(self, length: int | None) -> None:
        self.content = BytesIO()
        self._announced = length or 0

    def handleContentChunk(self, data: bytes) -> None:
        size = self.content.tell() + len(data)
        if size > self.channel.site.limits.max_body:
            self.channel.refuse_body()
        elif self.channel.has_room(max(size, self._announced)):
            self.content.write(data)

    def getRequestHostname(self) -> bytes:
        """Routes do not depend on a name that the client chose, and a strange one is no error."""
        return b"node"

    def fail(self, error: NodeError) -> bytes:
        """Make the response one that reports this error. Returns its body."""
        media_type, body = describe(error, self.dialect)
        self.setResponseCode(error.http)
        self.setHeader(b"Content-Type", media_type)
        self.setHeader(b"Content-Length", b"%d" % len(body))
        return body

    def processingFailed(self, reason: Failure) -> Failure:
        _logger.failure("a request failed outside its handler", failure=reason)
        self.write(self.fail(Internal("internal error outside any operation; the node's log has more")))
        self.finish()
        return reason


class Channel(http.HTTPChannel):
    """One connection, from its first byte on."""

    site: Site
    transport: Any
    connection: Connection
    _heard = False
    _closing = False
    # Bytes of a body that have a place.
    _held = 0

    def connectionMade(self) -> None:
        super().connectionMade()
        self.connection = self.site.connections.enter(self.transport)
        self.connection.arm_instead(self._late)

    def connectionLost(self, reason: Failure) -> None:  # type: ignore[override]
        self.connection.leave()
        self._make_room()
        super().connectionLost(reason)
        self.site.deliveries.lost(self.transport, reason)

    def dataReceived(self, data: bytes) -> None:
        self._heard = True
        if self._closing or self.connection.over:
            return
        if self.connection.idle:
            self.connection.arm(self.site.limits.deadline, self._late)
        super().dataReceived(data)

    def lineLengthExceeded(self, line: bytes) -> None:
        self._respondToBadRequestAndDisconnect()

    def headerReceived(self, line: bytes) -> bool:
        try:
            return bool(super().headerReceived(line))
        except ValueError:  # a Content-Length of thousands of digits
            self._respondToBadRequestAndDisconnect()
            return False

    def allHeadersReceived(self) -> None:
        """Refuse here all that can be refused without the body, before a client is told to continue."""
        request, limits = self.requests[-1], self.site.limits
        try:
            caller = self._caller(request)
        except Unauthenticated as error:
            self._refuse_stranger(error)
            return
        request.caller, request.dialect = replace(caller, address=self.connection.address), caller.dialect
        if caller.known:
            self.connection.known = True
        try:
            request.caller.require(self._scope())
        except Forbidden as error:
            self.site.authenticator.refused("forbidden")
            self._refuse(error, limits.linger)
            return
        self.site.heard(request.caller)
        self.connection.arm(limits.body_deadline, self._late)
        if self.length is not None and self.length > limits.max_body:
            self.refuse_body()
        elif self.has_room(self.length or 0):
            super().allHeadersReceived()

    def allContentReceived(self) -> None:
        if not self._closing:
            self.connection.disarm()
            super().allContentReceived()

    def requestDone(self, request: http.Request) -> None:
        self.connection.rest(self._rested)
        self._make_room()
        super().requestDone(request)

    def refuse_body(self) -> None:
        """It is over the limit. The caller is no stranger: what comes is thrown away until the body's deadline."""
        error = TooLarge(f"a body may have {self.site.limits.max_body} bytes at most: send less at a time")
        self._refuse(error, self.site.limits.body_deadline)

    def has_room(self, size: int) -> bool:
        """Whether the request's body of so many bytes has a place; if not, it is refused."""
        bodies = self.site.connections.bodies
        if size >= SMALL and size > self._held:
            if not bodies.take(size - self._held):
                self._refuse(Crowded(), self.site.limits.linger)
                return False
            self._held = size
        return True

    def _make_room(self) -> None:
        self.site.connections.bodies.give(self._held)
        self._held = 0

    def _caller(self, request: http.Request) -> Caller:
        """Whose key the request has; nobody's, where none is needed and none is shown. Raises `Unauthenticated`.

        Where there is nothing but reading, the password of basic authentication is a key, too.
        """
        bearers, keys = _credentials(request)
        looks = self._command in _LOOKING
        if looks and self._where() in self.site.pages:
            bearers = [bearer_of(value) for value in bearers]
        # A stranger's body is not read.
        if looks and not (bearers or keys) and self.length == 0 and self.site.is_open(self._where(), self.transport):
            return NOBODY
        return self.site.authenticator.check(bearers, keys)

    def _scope(self) -> Scope:
        """What the request takes, by its path."""
        return scope_of(self._command.decode("latin-1"), self._where())

    def _where(self) -> str:
        """The path, which nobody has taken apart yet."""
        return unquote(self._path.partition(b"?")[0].decode("latin-1"))

    def _refuse_stranger(self, error: NodeError) -> None:
        """Whoever has shown many wrong keys waits for the answer, and is not read meanwhile."""
        late, linger = self.site.connections.guesses.wrong(self.connection), self.site.limits.linger
        if not late:
            self._refuse(error, linger)
            return

        def answer() -> None:
            self._closing = False
            self.transport.resumeProducing()
            self._refuse(error, linger)

        self._closing = True
        self.clearLineBuffer()
        self.transport.pauseProducing()
        self.connection.arm(late, answer)

    def writeHeaders(self, version: bytes, code: bytes, reason: bytes, headers: Headers) -> None:
        for name, value in _EVERYWHERE:
            headers.setRawHeaders(name, [value])
        super().writeHeaders(version, code, reason, headers)

    def loseConnection(self) -> None:
        """Everything is answered. A client that takes neither the rest nor its leave is cut off in the end."""
        self._closing = True
        self.connection.arm(self.site.limits.body_deadline, self.transport.abortConnection)
        super().loseConnection()

    def _rested(self) -> None:
        """Nothing more was asked. A client that has everything, and does not take its leave, keeps no place by that."""
        delivered = not queued(tcp(self.transport))
        self.loseConnection()
        if delivered:
            self.connection.arm(self.site.limits.linger, self.transport.abortConnection, idle=True)

    def _respondToBadRequestAndDisconnect(self) -> None:
        self._refuse(InvalidRequest("this is not a request that HTTP/1.1 allows"), self.site.limits.linger)

    def _late(self) -> None:
        if not self._heard:  # not even TLS may be there to say farewell to
            self.connection.cut()
            return
        error = RequestTimeout("the request did not arrive in time: its headers or its body are incomplete")
        self._refuse(error, self.site.limits.linger)

    def _refuse(self, error: NodeError, linger: float) -> None:
        """Answer without reading on, and close, at first only our direction."""
        if self._closing:
            return
        self._closing = True
        self._answer(error)
        self.requests.clear()  # with what there is of a body
        self._make_room()
        self.clearLineBuffer()
        self.connection.arm(linger, self.transport.abortConnection)
        self.transport.unregisterProducer()
        half_close = self.transport.loseConnection if self.isSecure() else self.transport.loseWriteConnection
        half_close()

    def _answer(self, error: NodeError) -> None:
        spoken = dialect(_credentials(self.requests[-1])[1]) if self.requests else Dialect.DOCUMENT
        media_type, body = describe(error, spoken)
        length = b"%d" % len(body)
        headers = Headers({b"Content-Type": [media_type], b"Content-Length": [length], b"Connection": [b"close"]})
        if isinstance(error, Crowded):
            headers.setRawHeaders(b"Retry-After", [b"%d" % AGAIN])
        self.writeHeaders(b"HTTP/1.1", b"%d" % error.http, http.RESPONSES[error.http], headers)
        self.write(body)
        self.site.log_refusal(self, error)


class Site(server.Site):
    """Serves `resource` to those who know the key, over HTTP/1.1 alone: over HTTP/2 twisted.web's streams stall.

    `heard` is called with each request that carries the key, whatever becomes of it.
    """

    noisy = False
    requestFactory = Request  # noqa: N815
    protocol = Channel  # type: ignore[assignment]

    def __init__(
        self,
        resource: IResource,
        authenticator: Authenticator,
        reactor: IReactorTime,
        limits: Limits | None = None,
        log_requests: bool = False,
        heard: Callable[[Caller], None] = lambda _: None,
        pages: Iterable[Page] = (),
        is_open: Callable[[str, Any], bool] = lambda _, __: False,
    ) -> None:
        """`is_open`: whether a path needs no key, on a connection of this transport."""
        # No timeout: the channel has its own timer.
        super().__init__(resource, reactor=reactor, timeout=None, parsePOSTFormSubmission=False)
        self.authenticator = authenticator
        self.limits = limits or Limits()
        self.connections = Connections(reactor, self.limits)
        self.deliveries = self.connections.deliveries
        self._log_requests = log_requests
        self.heard = heard
        self.pages = frozenset(page.path for page in pages)
        self.is_open = is_open

    def acceptableProtocols(self) -> list[bytes]:
        return [b"http/1.1"]

    def startFactory(self) -> None:
        """There is no access log to open."""

    def log(self, request: http.Request) -> None:
        """One line about an answered request, for debugging; never a body or a header."""
        if not self._log_requests:
            return
        method, path = (part.decode("ascii", "backslashreplace") for part in (request.method, request.path))
        ms = round((self.reactor.seconds() - getattr(request, "began", 0.0)) * 1000, 1)
        peer = request.getClientAddress()
        _logger.debug(
            "{method} {path} {status} {ms} ms {peer}", method=method, path=path, status=request.code, ms=ms, peer=peer
        )

    def log_refusal(self, channel: Channel, error: NodeError) -> None:
        """Like `log`: strangers must not fill the log."""
        if self._log_requests:
            peer = channel.getPeer()
            _logger.debug("refused {peer}: {status} {code}", peer=peer, status=error.http, code=error.code)


def _credentials(request: http.Request) -> list[list[str]]:
    """The values of `Authorization`, and those of `x-api-key`."""
    values = (request.requestHeaders.getRawHeaders(name, []) for name in (b"Authorization", b"X-API-Key"))
    return [[value.decode("utf-8", "surrogateescape") for value in given] for given in values]
