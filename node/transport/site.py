"""The bounded HTTP/1.1 site in front of the REST interface.

A stranger is answered at the headers, before any body is read. Every request has absolute deadlines and a limit of
size, every body stays in memory, and a client that is gone is noticed. twisted.web alone limits neither the size nor
the time of a request (Twisted issues 4898 and 10191) and puts bodies over 100 kB, here users' secrets, into files.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from io import BytesIO
from typing import Any
from urllib.parse import unquote

from twisted.internet.interfaces import IReactorTime
from twisted.python.failure import Failure
from twisted.web import http, server
from twisted.web.http_headers import Headers
from twisted.web.resource import IResource

from node.api.auth import Authenticator, Caller, Dialect, dialect
from node.api.methods import MAX_BODY, scope_of
from node.door import connections
from node.door.connections import Connection, Connections
from node.door.delivery import queued, tcp
from node.errors import Forbidden, Internal, InvalidRequest, NodeError, RequestTimeout, TooLarge, Unauthenticated
from node.keyfile import Scope
from node.logs import Logger

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

    def handleContentChunk(self, data: bytes) -> None:
        if self.content.tell() + len(data) <= self.channel.site.limits.max_body:
            self.content.write(data)
        else:
            self.channel.refuse_body()

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

    def connectionMade(self) -> None:
        super().connectionMade()
        self.connection = self.site.connections.enter(self.transport)
        self.connection.arm_instead(self._late)

    def connectionLost(self, reason: Failure) -> None:  # type: ignore[override]
        self.connection.leave()
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
            caller = self.site.authenticator.check(*_credentials(request))
        except Unauthenticated as error:
            self._refuse_stranger(error)
            return
        request.caller, request.dialect = replace(caller, address=self.connection.address), caller.dialect
        self.connection.known = True
        try:
            request.caller.require(self._scope())
        except Forbidden as error:
            self._refuse(error, limits.linger)
            return
        self.site.heard(request.caller)
        self.connection.arm(limits.body_deadline, self._late)
        if self.length is not None and self.length > limits.max_body:
            self.refuse_body()
        else:
            super().allHeadersReceived()

    def allContentReceived(self) -> None:
        if not self._closing:
            self.connection.disarm()
            super().allContentReceived()

    def requestDone(self, request: http.Request) -> None:
        self.connection.rest(self._rested)
        super().requestDone(request)

    def refuse_body(self) -> None:
        """It is over the limit. The caller is no stranger: what comes is thrown away until the body's deadline."""
        error = TooLarge(f"a body may have {self.site.limits.max_body} bytes at most: send less at a time")
        self._refuse(error, self.site.limits.body_deadline)

    def _scope(self) -> Scope:
        """What the request takes, by its path, which nobody has taken apart yet."""
        path = self._path.partition(b"?")[0]
        return scope_of(self._command.decode("latin-1"), unquote(path.decode("latin-1")))

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
        self.writeHeaders(b"HTTP/1.1", b"%d" % error.http, http.RESPONSES[error.http], headers)
        self.write(body)
        self.site.log_refusal(self, error)


class Site(server.Site):
    """Serves `resource` to those who know the key, over HTTP/1.1 alone: over HTTP/2 twisted.web's streams stall.

    `heard` is called with each request that carries the key, whatever becomes of it.
    """

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
    ) -> None:
        # No timeout: the channel has its own timer.
        super().__init__(resource, reactor=reactor, timeout=None, parsePOSTFormSubmission=False)
        self.authenticator = authenticator
        self.limits = limits or Limits()
        self.connections = Connections(reactor, self.limits)
        self.deliveries = self.connections.deliveries
        self._log_requests = log_requests
        self.heard = heard

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
