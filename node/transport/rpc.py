"""The gRPC server: METHODS as generic handlers, without generated code. Runs in the asyncio thread, on a unix socket.

`node.door` in front of it terminates TLS and enforces limits; each connection here belongs to one client.

A call without a valid key is refused by a stream handler, before any message is read; a unary one would read the whole
body first.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, TypeAlias, TypeVar
from urllib.parse import quote

from node.base.aio import Aio  # first: it sets gRPC's environment

# isort: split
import grpc
import grpc.aio
from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2, health_pb2_grpc

from node.api.auth import Authenticator, Caller
from node.api.calls import Calls, OpenFeed, Reply, parse, watched
from node.api.methods import MAX_BODY, METHODS, SERVICE, Kind, Method
from node.api.readers import EventReader, LogReader, PlacedReader
from node.base.errors import Forbidden, Internal, InvalidRequest, NodeError, Unauthenticated, UnknownPath
from node.base.logs import Logger
from node.base.waiting import fire
from node.door.bundles import BUNDLED, bundle
from node.door.upstream import Upstream
from node.transport.health import Health
from node.transport.reflection import Reflection
from node.transport.serving import Serving
from protos.service_pb2 import EventsRequest, Log

# Seconds that calls under way have to end at shutdown.
GRACE = 1.0
# The metadata with which a client asks for log lines with ids.
LAST = "last-event-id"
# Messages of a stream that may wait for the reactor's thread; then no more are read.
BATCH = 256
BATCH_BYTES = 1024 * 1024
_OPTIONS = [
    ("grpc.max_receive_message_length", MAX_BODY),
    ("grpc.max_send_message_length", MAX_BODY),
    # Half-open connections: a PING after 30 s of silence, closed after 20 s without an answer.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    # The door limits PINGs: gRPC's own limits differ from the documented ones.
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.max_concurrent_streams", 1000),
]

# The names of the health service: the whole server, the service, and the readiness check.
_HEALTH = ("", SERVICE.full_name, "readyz")
_PATHS = {f"/{SERVICE.full_name}/{method.name}": method for method in METHODS}

# grpc.aio.ServicerContext; grpcio has no types.
Context: TypeAlias = Any
T = TypeVar("T")

_logger = Logger()


class RpcServer:
    """Serves METHODS to the clients that the door admits."""

    def __init__(self, aio: Aio, calls: Calls, authenticator: Authenticator, upstream: Upstream) -> None:
        self._aio = aio
        self._upstream = upstream
        self._serving: Serving | None = None
        # Reports what /readyz does, for each server that is started.
        self._health = Health()
        heard, refused = partial(aio.tell, self._heard, calls, upstream), partial(aio.call, self._refused, upstream)
        self._gate = _Gate(authenticator, _Handlers(aio, calls, upstream), heard, refused)

    async def start(self) -> None:
        """Bind and serve. Raises `OSError` if the socket cannot be bound."""
        await self._set_health(_serving(False))
        # Any reply means alive.
        self._health.set(_serving(True), "livez")
        self._serving = Serving(self._bound)
        await self._serving.start()

    async def stop(self) -> None:
        """Take no more calls, give those under way a moment, end the rest."""
        if self._serving is not None:
            await self._serving.stop(GRACE)

    def set_ready(self, ready: bool) -> None:
        """Set whether the node is ready. To be called on the reactor."""
        self._aio.run(self._set_health(_serving(ready))).addErrback(
            lambda failure: _logger.failure("the gRPC health service was not updated; it reports an old state", failure)
        )

    async def _set_health(self, state: Any) -> None:
        self._health.set(state, *_HEALTH)

    def _bound(self) -> Any:
        server = grpc.aio.server(options=_OPTIONS, interceptors=(self._gate,))
        _add_official_services(server, self._health)
        path = self._upstream.next_path()
        try:
            server.add_insecure_port(f"unix:{quote(str(path))}")
        except RuntimeError as error:
            raise OSError(f"gRPC cannot listen on {path}: {error}") from error
        path.chmod(0o600)
        self._aio.tell(self._upstream.listens, path)
        return server

    @staticmethod
    def _heard(calls: Calls, upstream: Upstream, peer: str, caller: Caller) -> None:
        upstream.show_key(peer)
        calls.touch(caller)

    @staticmethod
    async def _refused(upstream: Upstream, peer: str) -> None:
        upstream.refused(peer)


class _Gate(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Checks the key of each call: any key for the other services, one with the method's scope for METHODS.

    `heard` is called for each call with a key that is not in METHODS, or is forbidden; the handlers of METHODS report
    their calls themselves. `refused` is awaited before a call without a valid key is answered, and may delay that.
    """

    def __init__(
        self,
        authenticator: Authenticator,
        handlers: _Handlers,
        heard: Callable[[str, Caller], None],
        refused: Callable[[str], Awaitable[None]],
    ) -> None:
        self._authenticator = authenticator
        self._handlers = handlers
        self._heard = heard
        self._refused = refused

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], details: grpc.HandlerCallDetails
    ) -> grpc.RpcMethodHandler | None:
        try:
            caller = self._authenticator.check(*_credentials(details.invocation_metadata))
        except Unauthenticated as error:
            return _refusal(error, self._refused)
        method = _PATHS.get(details.method)
        if method is None:
            # For health and reflection any key does.
            handler = await continuation(details)
            if handler is None:
                return _refusal(UnknownPath("Method not found!"), self._hears(caller))
            return self._telling(handler, caller)
        try:
            caller.require(method.scope)
        except Forbidden as error:
            self._authenticator.refused("forbidden")
            return _refusal(error, self._hears(caller))
        return self._handlers.of(method, caller)

    def _hears(self, caller: Caller) -> Callable[[str], Awaitable[None]]:
        async def hear(peer: str) -> None:
            self._heard(peer, caller)

        return hear

    def _telling(self, handler: grpc.RpcMethodHandler, caller: Caller) -> grpc.RpcMethodHandler:
        """Return a handler that first reports its caller: only the context has the peer's name.

        It parses the request itself: gRPC would report a body that is not a message as an error of the server.
        """
        kinds = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")
        (kind,) = (kind for kind in kinds if getattr(handler, kind) is not None)
        answer = getattr(handler, kind)
        parsed = partial(_stream if handler.request_streaming else _one, handler.request_deserializer)

        async def one(request: Any, context: Context) -> Any:
            self._heard(context.peer(), caller)
            return await answer(await parsed(request, context), context)

        async def many(request: Any, context: Context) -> AsyncIterator[Any]:
            self._heard(context.peer(), caller)
            async for reply in answer(await parsed(request, context), context):
                yield reply

        return handler._replace(
            request_deserializer=None, **{kind: many if inspect.isasyncgenfunction(answer) else one}
        )


async def _one(parse: Callable[[bytes], T], body: bytes, context: Context) -> T:
    try:
        return parse(body)
    except DecodeError as fault:
        error = InvalidRequest(f"the body is not a message of this call: {fault}")
    await context.abort(grpc.StatusCode[error.grpc], error.text)
    raise error


async def _stream(parse: Callable[[bytes], T], bodies: AsyncIterator[bytes], context: Context) -> AsyncIterator[T]:
    async def messages() -> AsyncIterator[T]:
        async for body in bodies:
            yield await _one(parse, body, context)

    return messages()


class _Handlers:
    """Makes the handler for a call of METHODS, with its caller."""

    def __init__(self, aio: Aio, calls: Calls, upstream: Upstream) -> None:
        self._aio = aio
        self._calls = calls
        self._upstream = upstream

    def of(self, method: Method, caller: Caller) -> grpc.RpcMethodHandler:
        if method.kind is Kind.LOGS:
            return grpc.unary_stream_rpc_method_handler(partial(self._logs, method, caller))
        if method.kind is Kind.EVENTS:
            return grpc.unary_stream_rpc_method_handler(partial(self._events, method, caller))
        if method.kind is Kind.FEED:
            return grpc.stream_unary_rpc_method_handler(partial(self._feed, method, caller))
        if watched(method):
            # A stream of one reply is the same on the wire, and costs a second write. But only for a stream a failed
            # write can be noticed: after a unary reply gRPC reports OK in any case.
            return grpc.unary_stream_rpc_method_handler(partial(self._watched, method, caller))
        return grpc.unary_unary_rpc_method_handler(partial(self._unary, method, caller))

    async def _unary(self, method: Method, caller: Caller, body: bytes, context: Context) -> bytes:
        reply: Reply = await _answered(self._aio.outlast(*self._call(method, caller, body, context)), context)
        return reply.body

    async def _watched(self, method: Method, caller: Caller, body: bytes, context: Context) -> None:
        work = asyncio.ensure_future(self._aio.call(*self._call(method, caller, body, context)))
        try:
            reply = await _answered(asyncio.shield(work), context)
            await context.write(reply.body)
        except BaseException:
            work.add_done_callback(self._undelivered)
            raise
        if reply.delivered is not None:
            # Before the end of the call is sent: after it, the client may close before the watch begins.
            self._aio.tell(self._upstream.watch, context.peer(), reply.delivered)

    def _call(self, method: Method, caller: Caller, body: bytes, context: Context) -> tuple[Any, ...]:
        """The function and arguments of a unary call, for the reactor."""
        return self._unary_of, context.peer(), method, body, caller

    async def _unary_of(self, peer: str, method: Method, body: bytes, caller: Caller) -> Reply:
        return await self._calls.unary(method, body, self._known(peer, caller))

    def _known(self, peer: str, caller: Caller) -> Caller:
        """Tell the door that the client has a key; return the caller with the client's address."""
        self._upstream.show_key(peer)
        return replace(caller, address=self._upstream.address(peer))

    def _undelivered(self, work: asyncio.Future[Reply]) -> None:
        """Report that the reply was not delivered, if there is one and somebody waits for it."""
        waiter = None if work.cancelled() or work.exception() else work.result().delivered
        if waiter is not None:
            self._aio.tell(fire, waiter, False)

    async def _feed(self, method: Method, caller: Caller, messages: AsyncIterator[bytes], context: Context) -> bytes:
        async def whole() -> bytes:
            feed: OpenFeed = await self._aio.call(self._opened_by, context.peer(), method, caller)
            await _carry(messages, lambda batch: self._aio.call(_fed, feed, batch))
            return await self._aio.outlast(feed.finish)

        return await _answered(whole(), context)

    async def _opened_by(self, peer: str, method: Method, caller: Caller) -> OpenFeed:
        return self._calls.open(method, self._known(peer, caller))

    async def _logs(self, method: Method, caller: Caller, _: bytes, context: Context) -> AsyncIterator[bytes]:
        last = _last(context.invocation_metadata())
        reader, bundles = await self._aio.call(self._read_by, context.peer(), method, caller, last or "")
        await context.send_initial_metadata(())
        if bundles:
            yield BUNDLED
        placed = PlacedReader(reader)
        messages: Iterable[bytes]
        while True:
            if last is None:
                lines = tuple(await _answered(self._aio.call(reader.next), context))
                messages = (_bundled(lines),) if bundles else _messages(lines)
            else:
                found = await _answered(self._aio.call(placed.next), context)
                messages = [Log(detail=line, id=place).SerializeToString() for line, place in found]
                messages = (bundle(messages),) if bundles else messages
            for message in messages:
                yield message

    async def _read_by(self, peer: str, method: Method, caller: Caller, last: str) -> tuple[LogReader, bool]:
        return self._calls.logs(method, self._known(peer, caller), last), self._upstream.takes_bundles(peer)

    async def _events(self, method: Method, caller: Caller, body: bytes, context: Context) -> AsyncIterator[bytes]:
        opening = self._aio.call(self._followed_by, context.peer(), method, caller, body)
        reader: EventReader = await _answered(opening, context)
        await context.send_initial_metadata(())
        while events := await _answered(self._aio.call(reader.next), context):
            for event in events:
                yield event.SerializeToString()

    async def _followed_by(self, peer: str, method: Method, caller: Caller, body: bytes) -> EventReader:
        asked = parse(method, body)
        assert isinstance(asked, EventsRequest)
        return self._calls.events(method, asked, self._known(peer, caller))


async def _carry(messages: AsyncIterator[bytes], deliver: Callable[[list[bytes]], Coroutine[Any, Any, None]]) -> None:
    """Hand messages over to the reactor as they come, batched while a batch is under way: crossing threads costs most.

    A batch that was handed over is not cancelled when the client hangs up.
    """
    waiting: list[bytes] = []
    under_way: asyncio.Future[None] | None = None

    async def run() -> None:
        while waiting:
            batch = waiting[:]
            waiting.clear()
            await deliver(batch)

    async for message in messages:
        waiting.append(message)
        if under_way is None or under_way.done():
            if under_way is not None:
                under_way.result()
            under_way = asyncio.ensure_future(run())
            under_way.add_done_callback(_seen)
        elif len(waiting) >= BATCH or sum(map(len, waiting)) >= BATCH_BYTES:
            await asyncio.shield(under_way)
    if under_way is not None:
        await asyncio.shield(under_way)


async def _fed(feed: OpenFeed, batch: list[bytes]) -> None:
    for message in batch:
        await feed.feed(message)


def _seen(done: asyncio.Future[Any]) -> None:
    """Mark the error as retrieved: no task may be waiting for it any more."""
    if not done.cancelled():
        done.exception()


async def _answered(work: Awaitable[T], context: Context) -> T:
    """Await the reply; abort the call with the status of an error."""
    try:
        return await work
    except NodeError as fault:
        error = fault
    except Exception as fault:  # noqa: BLE001 - gRPC would not log it
        _logger.failure("a gRPC call failed outside any operation; it is answered with INTERNAL")
        error = Internal(f"internal error: {type(fault).__name__}; the node's log has more")
    await context.abort(grpc.StatusCode[error.grpc], error.text)
    raise error


def _credentials(metadata: Iterable[tuple[str, str | bytes]]) -> tuple[list[str], list[str]]:
    """Return the values of `authorization` and of `x-api-key`."""
    pairs = [(key, value) for key, value in metadata or () if isinstance(value, str)]
    return (
        [value for key, value in pairs if key == "authorization"],
        [value for key, value in pairs if key == "x-api-key"],
    )


def _last(metadata: Iterable[tuple[str, str | bytes]]) -> str | None:
    """Return the id of the last log line that a client read, empty for none; None if it does not ask for ids."""
    return next((value for key, value in metadata or () if key == LAST and isinstance(value, str)), None)


@lru_cache(maxsize=1)
def _bundled(lines: tuple[str, ...]) -> bytes:
    """Make a bundle of lines, once for all readers at the same place, as readers that keep up are."""
    return bundle(_messages(lines))


def _messages(lines: Iterable[str]) -> list[bytes]:
    return [Log(detail=line).SerializeToString() for line in lines]


def _serving(ready: bool) -> Any:
    states = health_pb2.HealthCheckResponse
    return states.SERVING if ready else states.NOT_SERVING


def _add_official_services(server: Any, servicer: Any) -> None:
    """Add grpc.health.v1 and reflection; they need a key, too."""
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    names = [service.full_name for service in (SERVICE, *health_pb2.DESCRIPTOR.services_by_name.values())]
    server.add_generic_rpc_handlers((Reflection(names),))


def _refusal(fault: NodeError, first: Callable[[str], Awaitable[None]]) -> grpc.RpcMethodHandler:
    """Return a handler that answers with this error, after it awaited `first` with the client's peer name."""

    async def refuse(_: Any, context: Context) -> AsyncIterator[bytes]:
        await first(context.peer())
        await context.abort(grpc.StatusCode[fault.grpc], fault.text)
        yield b""

    return grpc.stream_stream_rpc_method_handler(refuse)
