"""The HTTP/1.1 site in front of the REST interface: authentication, deadlines and size limits.

A request without a valid key is answered at its headers, before any body is read. A client that tries no key and no
path of the interface gets what a web server without pages replies: 404, and no text. Every request has absolute
deadlines and a size limit, every body stays in memory, and a client that is gone is noticed. twisted.web alone limits
neither the size nor the time of a request (Twisted issues 4898 and 10191) and puts bodies over 100 kB, here users'
secrets, into files.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from io import BytesIO
from typing import Any
from urllib.parse import unquote

from twisted.python.failure import Failure
from twisted.web import http, server
from twisted.web.http_headers import Headers
from twisted.web.resource import IResource

from node.api.auth import ANONYMOUS, Authenticator, Caller, Dialect, bearer_of, dialect
from node.api.methods import is_operation, scope_of
from node.api.pages import Page
from node.base.errors import (
    Crowded,
    Forbidden,
    Internal,
    InvalidRequest,
    NodeError,
    RequestTimeout,
    TooLarge,
    Unauthenticated,
    UnknownPath,
)
from node.base.logs import Logger
from node.door.bodies import AGAIN, SMALL
from node.door.connections import LAST, Connection, Connections
from node.door.delivery import flush, queued, tcp

# Verbs of requests that change nothing.
_LOOKING = (b"GET", b"HEAD")
# The end of the headers of every response.
_EVERYWHERE = b"Cache-Control: no-store\r\nX-Content-Type-Options: nosniff\r\n\r\n"

_logger = Logger()


def describe(error: NodeError, dialect: Dialect) -> tuple[bytes, bytes]:
    """Return the media type and the body of an error, in the caller's dialect."""
    if dialect is Dialect.DEPLOYED:
        return b"text/plain; charset=utf-8", error.text.encode("utf-8", "replace")
    return b"application/json", json.dumps({"error": error.text, "code": error.code}).encode()


class Request(server.Request):
    """A request, with its caller and the caller's dialect."""

    channel: Any
    site: Any
    content: BytesIO
    caller: Caller
    dialect = Dialect.DOCUMENT
    # Whether its work goes on when the client is gone.
    goes_on = False

    def __init__(self, channel: Channel, *args: Any, **options: Any) -> None:
        super().__init__(channel, *args, **options)
        self.began = channel.site.reactor.seconds()

    def process(self) -> None:
        """Have the site's one resource answer. twisted.web would look for others, and name itself in a header."""
        self.site = self.channel.site
        self.setHeader(b"Date", http.datetimeToString())
        try:
            self.render(self.site.resource)
        except BaseException:  # noqa: BLE001 - answered, and logged
            self.processingFailed(Failure())

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
        """A constant: routes do not depend on the client's Host header, and an odd one is not an error."""
        return b"node"

    def fail(self, error: NodeError) -> bytes:
        """Turn the response into one for this error. Returns its body."""
        media_type, body = describe(error, self.dialect)
        self.setResponseCode(error.http)
        self.setHeader(b"Content-Type", media_type)
        self.setHeader(b"Content-Length", b"%d" % len(body))
        return body

    def processingFailed(self, reason: Failure) -> Failure:
        _logger.failure("a REST request failed outside its handler; it is answered with 500", failure=reason)
        self.write(self.fail(Internal("internal error outside any operation; the node's log has more")))
        self.finish()
        return reason


class Channel(http.HTTPChannel):
    """One HTTP/1.1 connection, from its first byte on."""

    site: Site
    transport: Any
    connection: Connection
    relayed = False
    _heard = False
    _closing = False
    # A request has arrived completely, and its reply is not written yet.
    _answering = False
    # The next reply is the last one on this connection.
    _last = False
    # Bytes of a body that are reserved in the budget.
    _held = 0

    def connectionMade(self) -> None:
        super().connectionMade()
        self.connection = self.site.connections.enter(self.transport)
        self.connection.session = self
        # TLS writes once a turn, or at the end of a reply.
        tcp(self.transport).at_once = self.isSecure()
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
        """Refuse what can be refused without the body, before a client is sent 100 Continue."""
        request, limits = self.requests[-1], self.site.limits
        try:
            caller = self._caller(request)
        except Unauthenticated as error:
            self._refuse_stranger(error if self._asks_for_us() else UnknownPath("there is no such path"))
            return
        request.dialect = caller.dialect
        request.caller = Caller(caller.key, caller.dialect, self.connection.address)
        if caller.known:
            self.connection.known = True
        try:
            request.caller.require(scope_of(self._command.decode("latin-1"), self._where()))
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
            self._answering = True
            super().allContentReceived()

    def requestDone(self, request: http.Request) -> None:
        flush(self.transport)
        self._answering = False
        self.persistent = self.persistent and not self._last
        self.connection.rest(self.site.limits.idle, self._rested)
        self._make_room()
        super().requestDone(request)

    def refuse_body(self) -> None:
        """Refuse a body over the size limit. The caller has a key: the rest is read and dropped until the deadline."""
        error = TooLarge(f"a body may have {self.site.limits.max_body} bytes at most: send less at a time")
        self._refuse(error, self.site.limits.body_deadline)

    def has_room(self, size: int) -> bool:
        """Reserve memory for the request's body. At the limit, refuse the request and return False."""
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
        """Return the caller of the request; `ANONYMOUS` where no key is needed or given. Raises `Unauthenticated`.

        For reading a page, the password of basic authentication is a key, too.
        """
        bearers, keys = _credentials(request)
        looks, page = self._command in _LOOKING, self.site.pages.get(self._where())
        if looks and page is not None:
            bearers = [bearer_of(value) for value in bearers]
        # Only without a body: no body is read without a key.
        if looks and not (bearers or keys) and self.length == 0 and self.site.is_open(page, self.transport):
            return ANONYMOUS
        return self.site.authenticator.check(bearers, keys)

    def _where(self) -> str:
        """The path of the request, before twisted.web parses it."""
        return unquote(self._path.partition(b"?")[0].decode("latin-1"))

    def _asks_for_us(self) -> bool:
        """Whether the client knows more than a stranger: it has shown a key, tries one, or a path of the interface."""
        return self._tries_key() or is_operation(self._where()) or self._where() in self.site.pages

    def _tries_key(self) -> bool:
        return self.connection.known or (bool(self.requests) and any(_credentials(self.requests[-1])))

    def _refuse_stranger(self, error: NodeError) -> None:
        """Refuse a request without a valid key; after many wrong ones, wait before the answer, and read nothing."""
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
        if self._last:
            headers.setRawHeaders(b"Connection", [b"close"])
        lines = [b"%b: %b\r\n" % (name, value) for name, values in headers.getAllRawHeaders() for value in values]
        self.transport.write(b"%b %b %b\r\n%b%b" % (version, code, reason, b"".join(lines), _EVERYWHERE))

    def hold(self) -> None:
        self._last = True

    def finish(self, now: bool, streams: bool) -> bool:
        """End the connection, unless a call is under way: then its reply does.

        A client that has just had a reply may be sending its next request: the channel still answers that one.
        """
        if self._answering:
            return False
        if now or self.connection.rested(self.site.reactor.seconds() - LAST):
            # The channel's own: the transport's would send nothing while this channel is its producer.
            self.loseConnection()
        return self._closing

    def loseConnection(self) -> None:
        """Close after everything is answered; cut a client that neither reads the rest nor closes, at a deadline."""
        self._closing = True
        self.connection.arm(self.site.limits.body_deadline, self.transport.abortConnection)
        # A client that closes before it has read our end resets the connection, and its acknowledgements are lost.
        self.site.deliveries.when_known(self.transport, self._end)

    def _end(self) -> None:
        if not self.connection.over:
            super().loseConnection()

    def _rested(self) -> None:
        """Close after the idle limit. A client that has everything and does not close may lose its place to others."""
        delivered = not queued(tcp(self.transport))
        self.loseConnection()
        if delivered:
            self.connection.arm(self.site.limits.linger, self.transport.abortConnection, idle=True)

    def _respondToBadRequestAndDisconnect(self) -> None:
        self._refuse(InvalidRequest("this is not a valid HTTP/1.1 request"), self.site.limits.linger)

    def _late(self) -> None:
        if not self._heard:  # there may not even be TLS to send an answer by
            self.connection.cut()
            return
        error = RequestTimeout("the request did not arrive in time: its headers or its body are incomplete")
        self._refuse(error, self.site.limits.linger)

    def _refuse(self, error: NodeError, linger: float) -> None:
        """Answer without reading on, then close, first only our direction."""
        if self._closing:
            return
        self._closing = True
        self._answer(error)
        self.requests.clear()  # with the received part of a body
        self._make_room()
        self.clearLineBuffer()
        self.connection.arm(linger, self.transport.abortConnection)
        self.transport.unregisterProducer()
        half_close = self.transport.loseConnection if self.isSecure() else self.transport.loseWriteConnection
        half_close()

    def _answer(self, error: NodeError) -> None:
        headers, body = Headers({b"Connection": [b"close"]}), b""
        if isinstance(error, Unauthenticated) or self._tries_key():
            spoken = dialect(_credentials(self.requests[-1])[1]) if self.requests else Dialect.DOCUMENT
            media_type, body = describe(error, spoken)
            headers.setRawHeaders(b"Content-Type", [media_type])
        else:  # for strangers, as a web server does
            headers.setRawHeaders(b"Date", [http.datetimeToString()])
        headers.setRawHeaders(b"Content-Length", [b"%d" % len(body)])
        if isinstance(error, Crowded):
            headers.setRawHeaders(b"Retry-After", [b"%d" % AGAIN])
        self.writeHeaders(b"HTTP/1.1", b"%d" % error.http, http.RESPONSES[error.http], headers)
        self.write(body)
        self.site.log_refusal(self, error)


class Site(server.Site):
    """Serves `resource` to callers with a key, over HTTP/1.1 alone: over HTTP/2 twisted.web's streams stall.

    `heard` is called with the caller of each admitted request, whatever its outcome.
    """

    noisy = False
    requestFactory = Request  # noqa: N815
    protocol = Channel  # type: ignore[assignment]

    def __init__(
        self,
        resource: IResource,
        authenticator: Authenticator,
        connections: Connections,
        log_requests: bool = False,
        heard: Callable[[Caller], None] = lambda _: None,
        pages: Iterable[Page] = (),
        is_open: Callable[[Page | None, Any], bool] = lambda _, __: False,
    ) -> None:
        """`is_open`: whether a page, or a path without one, needs no key on a connection of this transport."""
        # No timeout: the channel has its own timer.
        super().__init__(resource, reactor=connections.reactor, timeout=None, parsePOSTFormSubmission=False)
        self.authenticator = authenticator
        self.connections = connections
        self.limits = connections.limits
        self.deliveries = connections.deliveries
        self._log_requests = log_requests
        self.heard = heard
        self.pages = {page.path: page for page in pages}
        self.is_open = is_open

    def acceptableProtocols(self) -> list[bytes]:
        return [b"http/1.1"]

    def startFactory(self) -> None:
        """Nothing to open: there is no access log."""

    def log(self, request: http.Request) -> None:
        """Log an answered request, for debugging; never a body or a header."""
        if not self._log_requests:
            return
        method, path = (part.decode("ascii", "backslashreplace") for part in (request.method, request.path))
        ms = round((self.reactor.seconds() - getattr(request, "began", 0.0)) * 1000, 1)
        peer = request.getClientAddress()
        _logger.debug(
            "{method} {path} {status} {ms} ms {peer}", method=method, path=path, status=request.code, ms=ms, peer=peer
        )

    def log_refusal(self, channel: Channel, error: NodeError) -> None:
        """Log a refused request, for debugging alone: strangers must not fill the log."""
        if self._log_requests:
            peer = channel.getPeer()
            _logger.debug("refused {peer}: {status} {code}", peer=peer, status=error.http, code=error.code)


def _credentials(request: http.Request) -> list[list[str]]:
    """Return the values of `Authorization`, and those of `x-api-key`."""
    values = (request.requestHeaders.getRawHeaders(name, []) for name in (b"Authorization", b"X-API-Key"))
    return [[value.decode("utf-8", "surrogateescape") for value in given] for given in values]
