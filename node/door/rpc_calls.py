"""The calls of METHODS for gRPC's server: each handler runs in the asyncio thread, and its work on the reactor.

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

from node.base.aio import Aio  # first: it sets gRPC's environment

# isort: split
import grpc
import grpc.aio
from google.protobuf.message import DecodeError
from twisted.internet.defer import Deferred

from node.api.auth import Authenticator, Caller
from node.api.calls import Calls, OpenFeed, Reply, parse, watched
from node.api.methods import METHODS, SERVICE, Kind, Method
from node.api.readers import EventReader, LogReader, PlacedReader
from node.base.errors import Forbidden, Internal, InvalidRequest, NodeError, Unauthenticated, UnknownPath
from node.base.logs import Logger
from node.base.waiting import fire
from node.door.bundles import BUNDLED, bundle
from node.door.upstream import Upstream
from protos.service_pb2 import EventsRequest, Log

_PATHS = {f"/{SERVICE.full_name}/{method.name}": method for method in METHODS}
# The metadata with which a client asks for log lines with ids.
LAST = "last-event-id"
# Messages of a stream that may wait for the reactor's thread; then no more are read.
BATCH = 256
BATCH_BYTES = 1024 * 1024

# grpc.aio.ServicerContext; grpcio has no types.
Context: TypeAlias = Any
T = TypeVar("T")

_logger = Logger()


class Gate(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Checks the key of each call: any key for the other services, one with the method's scope for METHODS.

    It reports each call with a key that is not in METHODS, or is forbidden; the handlers of METHODS report their calls
    themselves. A call without a valid key is reported before it is answered, which may delay that.
    """

    def __init__(self, aio: Aio, calls: Calls, authenticator: Authenticator, upstream: Upstream) -> None:
        self._aio = aio
        self._calls = calls
        self._authenticator = authenticator
        self._upstream = upstream

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], details: grpc.HandlerCallDetails
    ) -> grpc.RpcMethodHandler | None:
        try:
            caller = self._authenticator.check(*_credentials(details.invocation_metadata))
        except Unauthenticated as error:
            return self._refusal(error, self._note_refusal)
        method = _PATHS.get(details.method)
        if method is None:
            # For health and reflection any key does.
            handler = await continuation(details)
            if handler is None:
                return self._refusal(UnknownPath("Method not found!"), partial(self._note_caller, caller))
            return self._telling(handler, caller)
        try:
            caller.require(method.scope)
        except Forbidden as error:
            self._authenticator.refused("forbidden")
            return self._refusal(error, partial(self._note_caller, caller))
        return self._handler(method, caller)

    def _refusal(self, fault: NodeError, note: Callable[[str], Awaitable[None]]) -> grpc.RpcMethodHandler:
        """Return a handler that answers with this error, after `note` has the client's peer name, on the reactor."""

        async def refuse(_: Any, context: Context) -> AsyncIterator[bytes]:
            await self._aio.call(note, context.peer())
            await context.abort(grpc.StatusCode[fault.grpc], fault.text)
            yield b""

        return grpc.stream_stream_rpc_method_handler(refuse)

    async def _note_refusal(self, peer: str) -> None:
        self._upstream.client(peer).refused()

    async def _note_caller(self, caller: Caller, peer: str) -> None:
        self._upstream.client(peer).show_key()
        self._calls.touch(caller)

    def _telling(self, handler: grpc.RpcMethodHandler, caller: Caller) -> grpc.RpcMethodHandler:
        """Return a handler that first reports its caller: only the context has the peer's name.

        It parses the request itself: gRPC would report a body that is not a message as an error of the server.
        """
        kinds = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")
        (kind,) = (kind for kind in kinds if getattr(handler, kind) is not None)
        answer = getattr(handler, kind)
        parsed = partial(_stream if handler.request_streaming else _one, handler.request_deserializer)

        async def one(request: Any, context: Context) -> Any:
            await self._aio.call(self._note_caller, caller, context.peer())
            return await answer(await parsed(request, context), context)

        async def many(request: Any, context: Context) -> AsyncIterator[Any]:
            await self._aio.call(self._note_caller, caller, context.peer())
            async for reply in answer(await parsed(request, context), context):
                yield reply

        return handler._replace(
            request_deserializer=None, **{kind: many if inspect.isasyncgenfunction(answer) else one}
        )

    def _handler(self, method: Method, caller: Caller) -> grpc.RpcMethodHandler:
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
        reply: Reply = await _answered(self._aio.outlast(self._unary_of, context.peer(), method, caller, body), context)
        return reply.body

    async def _watched(self, method: Method, caller: Caller, body: bytes, context: Context) -> None:
        work = asyncio.ensure_future(self._aio.call(self._unary_of, context.peer(), method, caller, body))
        try:
            reply = await _answered(asyncio.shield(work), context)
            await context.write(reply.body)
        except BaseException:
            work.add_done_callback(self._undelivered)
            raise
        if reply.delivered is not None:
            # Before the end of the call is sent: after it, the client may close before the watch begins.
            self._aio.tell(self._watch, context.peer(), reply.delivered)

    def _watch(self, peer: str, delivered: Deferred[bool]) -> None:
        self._upstream.client(peer).watch(delivered)

    async def _unary_of(self, peer: str, method: Method, caller: Caller, body: bytes) -> Reply:
        reply = await self._calls.unary(method, body, self._known(peer, caller))
        if reply.delivered is not None:
            self._upstream.client(peer).expect(reply.delivered)
        return reply

    def _known(self, peer: str, caller: Caller) -> Caller:
        """Tell the door that the client has a key; return the caller with the client's address."""
        client = self._upstream.client(peer)
        client.show_key()
        return replace(caller, address=client.address)

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
        return self._calls.logs(method, self._known(peer, caller), last), self._upstream.client(peer).takes_bundles

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
    raise await _refused(error, context)


async def _refused(error: NodeError, context: Context) -> NodeError:
    """End the call with this error, which the handler then raises."""
    await context.abort(grpc.StatusCode[error.grpc], error.text)
    return error


def _last(metadata: Iterable[tuple[str, str | bytes]]) -> str | None:
    """Return the id of the last log line that a client read, empty for none; None if it does not ask for ids."""
    return next((value for key, value in metadata or () if key == LAST and isinstance(value, str)), None)


@lru_cache(maxsize=1)
def _bundled(lines: tuple[str, ...]) -> bytes:
    """Make a bundle of lines, once for all readers at the same place, as readers that keep up are."""
    return bundle(_messages(lines))


def _messages(lines: Iterable[str]) -> list[bytes]:
    return [Log(detail=line).SerializeToString() for line in lines]


async def _one(parse: Callable[[bytes], T], body: bytes, context: Context) -> T:
    try:
        return parse(body)
    except DecodeError as fault:
        error = InvalidRequest(f"the body is not a message of this call: {fault}")
    raise await _refused(error, context)


async def _stream(parse: Callable[[bytes], T], bodies: AsyncIterator[bytes], context: Context) -> AsyncIterator[T]:
    async def messages() -> AsyncIterator[T]:
        async for body in bodies:
            yield await _one(parse, body, context)

    return messages()


def _credentials(metadata: Iterable[tuple[str, str | bytes]]) -> tuple[list[str], list[str]]:
    """Return the values of `authorization` and of `x-api-key`."""
    pairs = [(key, value) for key, value in metadata or () if isinstance(value, str)]
    return (
        [value for key, value in pairs if key == "authorization"],
        [value for key, value in pairs if key == "x-api-key"],
    )
