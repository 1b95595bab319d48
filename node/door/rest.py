"""The REST interface: a Klein route for every row of METHODS. Log lines and events are streams without an end.

`node.door.site` has checked authentication, deadlines and the size limit before a request comes here.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from inspect import unwrap
from io import BytesIO
from typing import Any, Generic, Protocol, TypeVar, cast
from urllib.parse import unquote

from google.protobuf.proto import serialize_length_prefixed
from klein import Klein
from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.interfaces import IPushProducer
from twisted.python.failure import Failure
from twisted.web.resource import IResource, Resource
from twisted.web.server import NOT_DONE_YET
from zope.interface import implementer

from node.api.auth import Dialect
from node.api.calls import Calls, Reply, parse
from node.api.methods import METHODS, Kind, Method
from node.api.pages import Answer, Button, Page, answer
from node.api.readers import PlacedReader
from node.base.alarm import Alarm
from node.base.errors import Internal, InvalidRequest, NodeError, UnknownPath, WrongMediaType, WrongVerb
from node.base.logs import Logger
from node.base.slices import a_turn
from node.base.waiting import fire, lasting
from node.door.site import Request
from node.keys.keyfile import Scope
from protos.service_pb2 import Event, EventsRequest

MEDIA_TYPE = "application/x-protobuf"
# Messages of one body that are processed in one reactor turn.
TURN = 256
# Seconds without a line after which a stream carries a comment, so that no proxy on the way closes it as idle.
HEARTBEAT = 15.0
COMMENT = b": heartbeat\n\n"
SSE = "text/event-stream"
LAST = b"Last-Event-ID"
MOST_SEQUENCE = 2**64 - 1

T = TypeVar("T")
Handler = Callable[[Request], Awaitable[bytes]]
Work = Callable[[Calls, Method, Request], Coroutine[Deferred[object], object, bytes]]

_logger = Logger()


def make_app(calls: Calls | None, pages: Iterable[Page] = (), buttons: Iterable[Button] = ()) -> IResource:
    """Make the resource for pages, buttons and, with `calls`, all of METHODS. `node.door.site.Site` serves it."""
    app = Klein()
    for page in pages:
        app.route(page.path, methods=("GET",), endpoint=page.path)(_shower(page))
    for button in buttons:
        app.route(button.path, methods=("POST",), endpoint=f"POST {button.path}")(_presser(button))
    if calls is not None:
        for method in METHODS:
            app.route(method.path, methods=method.verbs, endpoint=method.name)(_handler(calls, method))
    return _Root(app)


def _shower(page: Page) -> Handler:
    async def show(request: Request) -> bytes:
        return _shown(request, await page.answer(_header(request, "Accept"), request.caller.known))

    return show


def _presser(button: Button) -> Handler:
    async def press(request: Request) -> bytes:
        try:
            request.caller.require(Scope.ALL)
        except NodeError as error:
            return _shown(request, answer(error.http, error.text))
        return _shown(request, await button.press(request.content.getvalue()))

    return press


def _shown(request: Request, answer: Answer) -> bytes:
    request.setResponseCode(answer.status)
    request.setHeader(b"Content-Type", answer.media_type)
    request.setHeader(b"Content-Length", b"%d" % len(answer.body))
    return answer.body


class _Root(Resource):
    """Serves the routes of an app. Each is one whole path, so a table finds it: Klein's own search costs more."""

    isLeaf = True  # noqa: N815

    def __init__(self, app: Klein) -> None:
        super().__init__()
        self._routes: dict[str, dict[bytes, Handler]] = {}
        operations = {method.name for method in METHODS}
        for rule in app.url_map.iter_rules():
            # Werkzeug adds HEAD wherever there is a GET.
            verbs = (rule.methods or set()) - ({"HEAD"} if rule.endpoint in operations else set())
            # As it was before Klein made a Deferred of it.
            handler = cast(Handler, unwrap(app.endpoints[rule.endpoint]))
            self._routes.setdefault(rule.rule, {}).update({verb.encode(): handler for verb in sorted(verbs)})

    def render(self, request: Any) -> Any:
        # Before the work, which may end at once.
        ended = request.notifyFinish()
        work = Deferred.fromCoroutine(self._respond(request))
        ended.addErrback(lambda _: None if request.goes_on else work.cancel())
        work.addErrback(lambda failure: _logger.failure("a REST reply could not be written", failure))
        return NOT_DONE_YET

    async def _respond(self, request: Request) -> None:
        try:
            body = await self._handler(request)(request)
        except Exception as error:  # noqa: BLE001 - answered
            if request.channel is None:  # the client is gone
                if not isinstance(error, CancelledError):
                    _translated(Failure())
                return
            body = _failed(request, Failure())
        if request.channel is not None:
            request.write(body)
            request.finish()

    def _handler(self, request: Request) -> Handler:
        """Raises `UnknownPath` and `WrongVerb`."""
        try:
            path = unquote(request.path.decode("latin-1"), errors="strict")
        except UnicodeDecodeError:
            raise UnknownPath("there is no such path: it is not UTF-8") from None
        handlers = self._routes.get(path) or self._routes.get(path.removesuffix("/"))
        if handlers is None:
            raise UnknownPath("there is no such path; the interface has its list")
        if request.method not in handlers:
            request.setHeader(b"Allow", b", ".join(handlers))
            raise WrongVerb("this path takes other HTTP methods: see Allow")
        return handlers[request.method]


def _handler(calls: Calls, method: Method) -> Handler:
    work = {Kind.UNARY: _unary, Kind.FEED: _feed, Kind.LOGS: _logs, Kind.EVENTS: _events}[method.kind]

    async def handle(request: Request) -> bytes:
        _admit(request, method)
        return await work(calls, method, request)

    return handle


def _admit(request: Request, method: Method) -> None:
    # `site` checked the scope at the headers, by the path alone.
    request.caller.require(method.scope)
    media_type = _header(request, "Content-Type").partition(";")[0].strip().lower()
    if request.dialect is Dialect.DOCUMENT and request.content.getbuffer().nbytes and media_type != MEDIA_TYPE:
        found = f"the body's media type is {media_type}" if media_type else "the body has no media type"
        raise WrongMediaType(f"{found}: send {MEDIA_TYPE}")


def _header(request: Request, name: str) -> str:
    try:
        return request.getHeader(name) or ""
    except UnicodeDecodeError:
        raise InvalidRequest(f"the header {name} is not UTF-8")


async def _unary(calls: Calls, method: Method, request: Request) -> bytes:
    request.goes_on = True
    return await _answer(request, await calls.unary(method, request.content.getvalue(), request.caller))


async def _feed(calls: Calls, method: Method, request: Request) -> bytes:
    request.goes_on = True
    feed, reactor = calls.open(method, request.caller), request.site.reactor
    for number, message in enumerate(method.cut(request.content.getvalue()), 1):
        await feed.feed(message)
        if number % TURN == 0:
            await a_turn(reactor)
    return await _answer(request, Reply(await feed.finish()))


async def _logs(calls: Calls, method: Method, request: Request) -> bytes:
    await log_stream(request, calls, method).run()
    return b""


async def _events(calls: Calls, method: Method, request: Request) -> bytes:
    asked = parse(method, request.content.getvalue())
    assert isinstance(asked, EventsRequest)
    if accepts_events(request):
        reader = calls.events(method, resumed(asked, request), request.caller)
        await ServerSentEvents(request, reader).run()
    else:
        await EventStream(request, calls.events(method, asked, request.caller)).run()
    return b""


async def _answer(request: Request, reply: Reply) -> bytes:
    """Return the body to write; if its delivery is watched, write it here and return nothing."""
    request.setHeader(b"Content-Type", MEDIA_TYPE.encode())
    request.setHeader(b"Content-Length", b"%d" % len(reply.body))
    if reply.delivered is None:
        return reply.body
    if request.channel is None:  # the caller has hung up
        fire(reply.delivered, False)
        return b""
    request.site.deliveries.write(request, reply.body, reply.delivered)
    if not request.channel.persistent:
        # TLS's close_notify must not follow at once: it would lie unread when the client closes, and then its kernel
        # would reset the connection instead of acknowledging the reply.
        await lasting(reply.delivered)
    return b""


def _failed(request: Any, failure: Failure) -> bytes:
    error = _translated(failure)
    if request.startedWriting:  # a log stream: a graceful end would mean to the client that the log is over
        request.transport.abortConnection()
        return b""
    body: bytes = request.fail(error)
    return body


def _translated(failure: Failure) -> NodeError:
    fault = failure.value
    if isinstance(fault, NodeError):
        return fault
    _logger.failure("a REST request failed outside any operation; it is answered with 500", failure=failure)
    return Internal(f"internal error: {type(fault).__name__}; the node's log has more")


class Source(Protocol[T]):
    """The reader behind a stream: `next` returns at least one item, or an empty list at the end."""

    @property
    def behind(self) -> bool: ...
    async def next(self) -> list[T]: ...


@implementer(IPushProducer)
class Stream(Generic[T]):
    """Writes what a reader reads to one client.

    While the client takes nothing, the reader is not asked: lines are lost for this client alone.
    """

    media_type = b"text/event-stream; charset=utf-8"
    # Sent in silence; empty where clients would take it for a line.
    heartbeat = COMMENT

    def __init__(self, request: Request, reader: Source[T]) -> None:
        self._request = request
        self._reader = reader
        self._paused: Deferred[None] | None = None
        self._silence = Alarm(request.site.reactor, self._send_heartbeat)

    def framed(self, one: T) -> bytes:
        """Encode one item for the wire."""
        raise NotImplementedError

    async def run(self) -> None:
        """Send the headers at once, then items until the reader ends. Cancelled when the client is gone."""
        self._request.setHeader(b"Content-Type", self.media_type)
        self._request.registerProducer(self, True)
        try:
            self._send_heartbeat() if self.heartbeat else self._request.write(b"")
            while read := await self._read():
                self._write(read)
                if self._reader.behind:
                    # Otherwise the reactor would not get a turn, and the transport could not pause this producer.
                    await a_turn(self._request.site.reactor)
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
        """The connection is lost: the request notifies its resource, which cancels `run`."""

    async def _read(self) -> list[T]:
        if self._paused is not None:
            await self._paused
        return await self._reader.next()

    def _write(self, read: list[T]) -> None:
        self._request.write(b"".join(map(self.framed, read)))
        if self._silence.pending:
            self._silence.set(HEARTBEAT)

    def _send_heartbeat(self) -> None:
        self._silence.set(HEARTBEAT)
        if self._paused is None:
            self._request.write(self.heartbeat)

    def _end(self) -> None:
        self._silence.cancel()
        if self._request.channel is not None:  # None after a lost connection
            self._request.unregisterProducer()


class BareLines(Stream[str]):
    """Log lines as deployed clients parse them: bare, each with a line break."""

    heartbeat = b""

    def framed(self, one: str) -> bytes:
        return one.encode("utf-8", "replace") + b"\n"


class LineEvents(Stream[tuple[str, str]]):
    """Log lines as Server-Sent Events, each with its place as id."""

    def framed(self, one: tuple[str, str]) -> bytes:
        line, place = one
        return b"id: %b\ndata: %b\n\n" % (place.encode(), line.encode("utf-8", "replace"))


def log_stream(request: Request, calls: Calls, method: Method) -> BareLines | LineEvents:
    """Make a stream of the log lines after the client's Last-Event-ID, or of the newest; then of what comes."""
    if request.dialect is Dialect.DEPLOYED:
        return BareLines(request, calls.logs(method, request.caller))
    [last] = request.requestHeaders.getRawHeaders(LAST, [b""])[:1]
    return LineEvents(request, PlacedReader(calls.logs(method, request.caller, last.decode("latin-1"))))


class EventStream(Stream[Event]):
    """Events as messages, each after its length as a varint; in silence an empty message."""

    media_type = b"application/x-protobuf"
    heartbeat = b"\0"

    def framed(self, one: Event) -> bytes:
        body = BytesIO()
        serialize_length_prefixed(one, body)
        return body.getvalue()


class ServerSentEvents(Stream[Event]):
    """Events as Server-Sent Events with JSON; the id is NUMBER@EPOCH."""

    def framed(self, one: Event) -> bytes:
        fields = {
            "sequence": one.sequence,
            "epoch": one.epoch,
            "time": one.time,
            "kind": one.kind,
            "severity": one.severity,
            "text": one.text,
            "fields": dict(one.fields),
        }
        return f"id: {one.sequence}@{one.epoch}\ndata: {json.dumps(fields)}\n\n".encode()


def accepts_events(request: Request) -> bool:
    """Return whether the client accepts Server-Sent Events."""
    accepted = b",".join(request.requestHeaders.getRawHeaders(b"Accept", []))
    return any(word.partition(b";")[0].strip().lower() == SSE.encode() for word in accepted.split(b","))


def resumed(asked: EventsRequest, request: Request) -> EventsRequest:
    """Complete the request of a Server-Sent Events client: all events after its Last-Event-ID, then what comes.

    The id may lack the epoch. Raises `InvalidRequest`.
    """
    asked.follow = True
    for raw in request.requestHeaders.getRawHeaders(LAST, [])[:1]:
        sequence, _, epoch = raw.decode("latin-1").partition("@")
        if not (sequence.isascii() and sequence.isdigit() and len(sequence) <= 20 and int(sequence) <= MOST_SEQUENCE):
            raise InvalidRequest("Last-Event-ID is not the id of an event: send NUMBER or NUMBER@EPOCH")
        asked.since, asked.epoch = int(sequence), epoch
    return asked
