"""The REST interface: a Klein route for every row of METHODS, and nothing that a row does not say.

Authentication, deadlines and the limit of size are behind us here: see `node.transport.site`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any
from urllib.parse import unquote

from klein import Klein
from klein.resource import KleinResource
from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IDelayedCall, IPushProducer
from twisted.internet.task import deferLater
from twisted.python.failure import Failure
from twisted.web.resource import IResource
from werkzeug.exceptions import HTTPException, MethodNotAllowed
from zope.interface import implementer

from node.api.auth import Dialect
from node.api.calls import Calls, LogReader, Reply
from node.api.methods import METHODS, Kind, Method
from node.api.pages import Page
from node.errors import Internal, InvalidRequest, NodeError, UnknownPath, WrongMediaType, WrongVerb
from node.logs import Logger
from node.transport.site import Request
from node.waiting import fire, lasting

MEDIA_TYPE = "application/x-protobuf"
# Seconds without a line after which a log stream carries a comment, so that nothing on the way thinks it dead.
HEARTBEAT = 15.0
# Messages of one body that are taken before others have their turn.
TURN = 256

Work = Callable[[Calls, Method, Request], Coroutine[Deferred[object], object, bytes]]

_logger = Logger()


def make_app(calls: Calls, pages: Iterable[Page] = ()) -> IResource:
    """All of METHODS over `calls`. To be served by `node.transport.site.Site`, whose requests know their caller."""
    app = _app_of(pages)
    for method in METHODS:
        route = app.route(method.path, methods=method.verbs, endpoint=method.name, strict_slashes=False)
        route(_handler(calls, method))
    return _Root(app)


def make_pages(pages: Iterable[Page]) -> IResource:
    """Nothing but these."""
    return _Root(_app_of(pages))


def _app_of(pages: Iterable[Page]) -> Klein:
    app = Klein()
    for page in pages:
        app.route(page.path, methods=("GET",), endpoint=page.path, strict_slashes=False)(_shower(page))
    app.handle_errors(Exception)(_failed)
    return app


def _shower(page: Page) -> Callable[[Request], Awaitable[bytes]]:
    async def show(request: Request) -> bytes:
        answer = await page.answer(_header(request, "Accept"), request.caller.known)
        request.setResponseCode(answer.status)
        request.setHeader(b"Content-Type", answer.media_type)
        request.setHeader(b"Content-Length", b"%d" % len(answer.body))
        return answer.body

    return show


class _Root(KleinResource):
    def render(self, request: Any) -> Any:
        try:
            b"/".join(request.postpath).decode()
        except UnicodeDecodeError:
            return request.fail(UnknownPath("there is no such path: it is not UTF-8"))
        return super().render(request)


def _handler(calls: Calls, method: Method) -> Callable[[Request], Awaitable[bytes]]:
    work = {Kind.UNARY: _unary, Kind.FEED: _feed, Kind.LOGS: _logs}[method.kind]

    async def handle(request: Request) -> bytes:
        _admit(request, method)
        return await work(calls, method, request)

    return handle


def _admit(request: Request, method: Method) -> None:
    # At the headers it was asked for by the path alone.
    request.caller.require(method.scope)
    if request.method == b"HEAD":  # werkzeug adds it wherever there is a GET
        raise WrongVerb("HEAD is not an operation of this node")
    media_type = _media_type(request)
    if request.dialect is Dialect.DOCUMENT and request.content.getbuffer().nbytes and media_type != MEDIA_TYPE:
        raise WrongMediaType(f"the body is {media_type or 'of no media type'}: send it as {MEDIA_TYPE}")


def _media_type(request: Request) -> str:
    return _header(request, "Content-Type").partition(";")[0].strip().lower()


def _header(request: Request, name: str) -> str:
    try:
        return request.getHeader(name) or ""
    except UnicodeDecodeError:
        raise InvalidRequest(f"the {name} is not UTF-8")


async def _unary(calls: Calls, method: Method, request: Request) -> bytes:
    body = request.content.getvalue()
    return await _answer(request, await _accepted(calls.unary(method, body, request.caller)))


async def _feed(calls: Calls, method: Method, request: Request) -> bytes:
    return await _answer(request, await _accepted(_fed(calls, method, request)))


async def _fed(calls: Calls, method: Method, request: Request) -> Reply:
    feed, reactor = calls.open(method, request.caller), request.site.reactor
    for number, message in enumerate(method.cut(request.content.getvalue()), 1):
        await feed.feed(message)
        if number % TURN == 0:
            await deferLater(reactor, 0)
    return Reply(await feed.finish())


async def _logs(calls: Calls, method: Method, request: Request) -> bytes:
    await LogStream(request, calls.logs(method, request.caller)).run()
    return b""


def _accepted(work: Coroutine[Deferred[object], object, Reply]) -> Deferred[Reply]:
    """The outcome of work that goes on when the caller hangs up, which cancels what is returned here."""
    outcome: Deferred[Reply] = Deferred()

    def answer(reply: Reply) -> None:
        if outcome.called and reply.delivered is not None:  # there is nobody to have it any more
            fire(reply.delivered, False)
        outcome.callback(reply)

    done = Deferred.fromCoroutine(work).addErrback(lambda failure: Failure(_translated(failure)))
    done.addCallbacks(answer, outcome.errback)
    return outcome


async def _answer(request: Request, reply: Reply) -> bytes:
    """What is still to be written of a response: its body, unless it has to be watched on its way."""
    request.setHeader(b"Content-Type", MEDIA_TYPE.encode())
    request.setHeader(b"Content-Length", b"%d" % len(reply.body))
    if reply.delivered is None:
        return reply.body
    request.site.deliveries.write(request, reply.body, reply.delivered)
    if not request.channel.persistent:
        # The client has its reply. TLS's farewell behind it would lie unread there when it closes, and its kernel would
        # reset the connection instead of acknowledging what it read.
        await lasting(reply.delivered)
    return b""


def _failed(request: Any, failure: Failure) -> bytes:
    error = _translated(failure)
    if request.startedWriting:  # a log stream: an orderly end would tell the client that the log is over
        request.transport.abortConnection()
        return b""
    if isinstance(error, WrongVerb):
        request.setHeader(b"Allow", ", ".join(_verbs(unquote(request.path.decode()))).encode())
    body: bytes = request.fail(error)
    return body


def _translated(failure: Failure) -> NodeError:
    fault = failure.value
    if isinstance(fault, NodeError):
        return fault
    if isinstance(fault, MethodNotAllowed):
        return WrongVerb("this path takes other HTTP methods: see Allow")
    if isinstance(fault, HTTPException):
        return UnknownPath("there is no such path; the interface has its list")
    _logger.failure("REST failed outside any operation", failure=failure)
    return Internal(f"internal error: {type(fault).__name__}; the node's log has more")


def _verbs(path: str) -> list[str]:
    return [verb for method in METHODS if method.path == path.rstrip("/") for verb in method.verbs]


@implementer(IPushProducer)
class LogStream:
    """Lines to one client for as long as it listens.

    While it takes nothing the reader is not asked, so what is lost is lost in the ring and for this client alone.
    """

    def __init__(self, request: Request, reader: LogReader) -> None:
        self._request = request
        self._reader = reader
        self._sse = request.dialect is Dialect.DOCUMENT
        self._paused: Deferred[None] | None = None
        self._heartbeat: IDelayedCall | None = None

    async def run(self) -> None:
        """Never returns: it is cancelled when the client is gone. The headers are sent at once."""
        self._request.setHeader(b"Content-Type", b"text/event-stream; charset=utf-8")
        self._request.registerProducer(self, True)
        try:
            self._beat() if self._sse else self._request.write(b"")
            while True:
                await self._writable()
                self._write(await self._reader.next())
                if self._reader.behind:
                    # Else nobody else would have a turn, the transport least of all, which tells when it is full.
                    await deferLater(self._request.site.reactor, 0)
        finally:
            self._end()

    def pauseProducing(self) -> None:
        if self._paused is None:
            self._paused = Deferred()

    def resumeProducing(self) -> None:
        paused, self._paused = self._paused, None
        if paused is not None:
            paused.callback(None)

    def stopProducing(self) -> None:
        """The connection is lost: the request tells Klein, which cancels `run`."""

    async def _writable(self) -> None:
        if self._paused is not None:
            await self._paused

    def _write(self, lines: list[str]) -> None:
        self._request.write(b"".join(map(self._framed, lines)))
        if self._heartbeat is not None:
            self._heartbeat.reset(HEARTBEAT)

    def _framed(self, line: str) -> bytes:
        text = line.encode("utf-8", "replace")
        return b"data: %b\n\n" % text if self._sse else text + b"\n"

    def _beat(self) -> None:
        self._heartbeat = self._request.site.reactor.callLater(HEARTBEAT, self._beat)
        if self._paused is None:
            self._request.write(b": heartbeat\n\n")

    def _end(self) -> None:
        if self._heartbeat is not None:
            self._heartbeat.cancel()
        if self._request.channel is not None:  # which a lost connection takes away
            self._request.unregisterProducer()
