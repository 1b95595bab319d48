"""The gRPC server: METHODS as generic handlers, no generated code. Runs in the asyncio thread.

A stranger is refused by a stream-typed handler before any message is read; a unary one would take the whole body first.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable
from functools import partial
from typing import Any, TypeAlias, TypeVar

from node.aio import Aio  # first: it sets gRPC's environment

# isort: split
import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from node.api.auth import Authenticator, dialect
from node.api.calls import Calls, LogReader, OpenFeed, Reply, watched
from node.api.methods import MAX_BODY, METHODS, SERVICE, Kind, Method
from node.errors import Internal, NodeError, Unauthenticated
from node.logs import Logger
from node.transport.serving import Serving
from node.waiting import fire
from protos.service_pb2 import Log

# Seconds that calls under way may take to end at shutdown.
GRACE = 1.0
# Messages of a stream that may wait to be handed over; then no more are read.
BATCH = 256
BATCH_BYTES = 1024 * 1024
# Connections at once; more are closed unanswered.
MAX_CONNECTIONS = 256
# Seconds for a handshake, and for a connection without calls.
HANDSHAKE = 10
IDLE = 120
_OPTIONS = [
    ("grpc.max_receive_message_length", MAX_BODY),
    ("grpc.max_send_message_length", MAX_BODY),
    # A second server on the port would be an error, not a rival.
    ("grpc.so_reuseport", 0),
    # Half-open clients: ping after 30 s of silence, gone after 20 s without an answer.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.max_concurrent_streams", 1000),
    # Strangers: so many connections, so much time for a handshake and for a connection without calls.
    ("grpc.max_allowed_incoming_connections", MAX_CONNECTIONS),
    ("grpc.server_handshake_timeout_ms", HANDSHAKE * 1000),
    ("grpc.max_connection_idle_ms", IDLE * 1000),
]

_PATHS = {f"/{SERVICE.full_name}/{method.name}": method for method in METHODS}

# grpc.aio.ServicerContext; grpcio has no types.
Context: TypeAlias = Any
T = TypeVar("T")

_logger = Logger()


class RpcServer:
    """Serves METHODS on one port."""

    def __init__(self, aio: Aio, calls: Calls, authenticator: Authenticator) -> None:
        self._aio = aio
        self._serving: Serving | None = None
        self._gate = _Gate(authenticator, partial(aio.tell, calls.touch))
        self._handlers = _Handlers(aio, calls)

    async def start(self, host: str, port: int, credentials: Callable[[], grpc.ServerCredentials]) -> None:
        """Bind and serve, each server with credentials of its own. Raises `OSError` if the port cannot be had."""
        self._serving = Serving(lambda: self._bound(host, port, credentials()))
        await self._serving.start()

    async def stop(self) -> None:
        """Take no more calls, give those under way a moment, end the rest."""
        if self._serving is not None:
            await self._serving.stop(GRACE)

    def _bound(self, host: str, port: int, credentials: grpc.ServerCredentials) -> Any:
        server = grpc.aio.server(options=_OPTIONS, interceptors=(self._gate,))
        server.add_generic_rpc_handlers((self._handlers,))
        _add_official_services(server)
        try:
            server.add_secure_port(_address(host, port), credentials)
        except RuntimeError as error:
            raise OSError(f"gRPC cannot listen on port {port}: {error}") from error
        return server


class _Gate(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Lets callers with the key in, to every service of the server.

    `heard` is called with each request that is none of METHODS: those are told of where they are answered.
    """

    def __init__(self, authenticator: Authenticator, heard: Callable[[], None]) -> None:
        self._authenticator = authenticator
        self._heard = heard

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], details: grpc.HandlerCallDetails
    ) -> grpc.RpcMethodHandler | None:
        authorization, x_api_key = _credentials(details.invocation_metadata)
        try:
            self._authenticator.check(authorization, x_api_key)
        except Unauthenticated as error:
            return grpc.stream_stream_rpc_method_handler(_refusal(error))
        if details.method not in _PATHS:
            self._heard()
        return await continuation(details)


class _Handlers(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Finds the handler of a call."""

    def __init__(self, aio: Aio, calls: Calls) -> None:
        self._aio = aio
        self._calls = calls
        self._by_path = {path: self._handler(method) for path, method in _PATHS.items()}

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        return self._by_path.get(details.method)

    def _handler(self, method: Method) -> grpc.RpcMethodHandler:
        if method.kind is Kind.LOGS:
            return grpc.unary_stream_rpc_method_handler(self._logs)
        if method.kind is Kind.FEED:
            return grpc.stream_unary_rpc_method_handler(partial(self._feed, method))
        if watched(method):
            # A stream of one reply is the same on the wire. It costs a second write, but only its writing can be seen
            # to fail: of a unary reply gRPC says OK, whatever became of it.
            return grpc.unary_stream_rpc_method_handler(partial(self._watched, method))
        return grpc.unary_unary_rpc_method_handler(partial(self._unary, method))

    async def _unary(self, method: Method, body: bytes, context: Context) -> bytes:
        reply = await _answered(_lasting(self._call(method, body, context)), context)
        return reply.body

    async def _watched(self, method: Method, body: bytes, context: Context) -> None:
        work = asyncio.ensure_future(self._call(method, body, context))
        delivered = False
        try:
            reply = await _answered(asyncio.shield(work), context)
            await context.write(reply.body)
            delivered = True
        finally:
            work.add_done_callback(partial(self._tell, delivered))

    def _call(self, method: Method, body: bytes, context: Context) -> Coroutine[Any, Any, Reply]:
        """What was accepted goes on when the caller hangs up: to be shielded."""
        _, x_api_key = _credentials(context.invocation_metadata())
        return self._aio.call(self._calls.unary, method, body, dialect(x_api_key))

    def _tell(self, delivered: bool, work: asyncio.Future[Reply]) -> None:
        """Tell whoever waits for it whether the reply was delivered. Where none was made, they know."""
        waiter = None if work.cancelled() or work.exception() else work.result().delivered
        if waiter is not None:
            self._aio.tell(fire, waiter, delivered)

    async def _feed(self, method: Method, messages: AsyncIterator[bytes], context: Context) -> bytes:
        async def whole() -> bytes:
            feed: OpenFeed = await self._aio.call(_opened, self._calls, method)
            await _carry(messages, lambda batch: self._aio.call(_fed, feed, batch))
            return await _lasting(self._aio.call(feed.finish))

        return await _answered(whole(), context)

    async def _logs(self, _: bytes, context: Context) -> AsyncIterator[bytes]:
        reader: LogReader = await self._aio.call(_reading, self._calls)
        await context.send_initial_metadata(())
        while True:
            for line in await self._aio.call(reader.next):
                yield Log(detail=line).SerializeToString()


async def _reading(calls: Calls) -> LogReader:
    return calls.logs()


async def _opened(calls: Calls, method: Method) -> OpenFeed:
    return calls.open(method)


async def _carry(messages: AsyncIterator[bytes], deliver: Callable[[list[bytes]], Coroutine[Any, Any, None]]) -> None:
    """Hand each message over as it comes; those that come meanwhile go together, for a crossing costs most.

    What was handed over is not called back when the client hangs up.
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
    """Mark the error as retrieved: maybe nobody waits for it any more."""
    if not done.cancelled():
        done.exception()


def _lasting(work: Coroutine[Any, Any, T]) -> Awaitable[T]:
    """Goes on when the caller hangs up; then nobody is left to be told how it ended."""
    task = asyncio.ensure_future(work)
    task.add_done_callback(_seen)
    return asyncio.shield(task)


async def _answered(work: Awaitable[T], context: Context) -> T:
    """The reply, or the error as the status it stands for."""
    try:
        return await work
    except NodeError as fault:
        error = fault
    except Exception as fault:  # noqa: BLE001 - gRPC would keep it to itself
        _logger.failure("gRPC failed outside any operation")
        error = Internal(f"internal error: {type(fault).__name__}; the node's log has more")
    await context.abort(grpc.StatusCode[error.grpc], error.text)
    raise error


def _credentials(metadata: Iterable[tuple[str, str | bytes]]) -> tuple[list[str], list[str]]:
    """The values of `authorization` and of `x-api-key`."""
    pairs = [(key, value) for key, value in metadata or () if isinstance(value, str)]
    return (
        [value for key, value in pairs if key == "authorization"],
        [value for key, value in pairs if key == "x-api-key"],
    )


def _add_official_services(server: Any) -> None:
    """grpc.health.v1 and reflection, behind the same key as everything."""
    servicer = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    names = (SERVICE.full_name, health.SERVICE_NAME, reflection.SERVICE_NAME)
    reflection.enable_server_reflection(names, server)


def _refusal(fault: NodeError) -> Callable[[Any, Context], AsyncIterator[bytes]]:
    async def refuse(_: Any, context: Context) -> AsyncIterator[bytes]:
        await context.abort(grpc.StatusCode[fault.grpc], fault.text)
        yield b""

    return refuse


def _address(host: str, port: int) -> str:
    if not host:
        return f"[::]:{port}"
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
