"""The gRPC server: METHODS as generic handlers, without generated code. Runs in the asyncio thread, on a unix socket.

`node.door` in front of it terminates TLS and enforces limits; each connection here belongs to one client.

A call without a valid key is refused by a stream handler, before any message is read; a unary one would read the whole
body first.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from functools import partial
from typing import Any, TypeVar
from urllib.parse import quote

from node.base.aio import Aio  # first: it sets gRPC's environment

# isort: split
import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from node.api.auth import Authenticator, Caller
from node.api.calls import Calls
from node.api.methods import MAX_BODY, METHODS, SERVICE
from node.base.errors import Forbidden, InvalidRequest, NodeError, Unauthenticated, UnknownPath
from node.base.logs import Logger
from node.door.rpc_calls import Context, Handlers
from node.door.services import Health, add_services
from node.door.serving import Serving
from node.door.upstream import Upstream

# Seconds that calls under way have to end at shutdown.
GRACE = 1.0
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
        self._gate = _Gate(aio, calls, authenticator, upstream)

    async def start(self) -> None:
        """Bind and serve. Raises `OSError` if the socket cannot be bound."""
        await self._health.set(False, *_HEALTH)
        # Any reply means alive.
        await self._health.set(True, "livez")
        self._serving = Serving(self._bound)
        await self._serving.start()

    async def stop(self) -> None:
        """Take no more calls, give those under way a moment, end the rest."""
        if self._serving is not None:
            await self._serving.stop(GRACE)

    def set_ready(self, ready: bool) -> None:
        """Set whether the node is ready. To be called on the reactor."""
        self._aio.run(self._health.set(ready, *_HEALTH)).addErrback(
            lambda failure: _logger.failure("the gRPC health service was not updated; it reports an old state", failure)
        )

    def _bound(self) -> Any:
        server = grpc.aio.server(options=_OPTIONS, interceptors=(self._gate,))
        add_services(server, self._health)
        path = self._upstream.next_path()
        try:
            server.add_insecure_port(f"unix:{quote(str(path))}")
        except RuntimeError as error:
            raise OSError(f"gRPC cannot listen on {path}: {error}") from error
        path.chmod(0o600)
        self._aio.tell(self._upstream.listens, path)
        return server


class _Gate(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Checks the key of each call: any key for the other services, one with the method's scope for METHODS.

    It reports each call with a key that is not in METHODS, or is forbidden; the handlers of METHODS report their calls
    themselves. A call without a valid key is reported before it is answered, which may delay that.
    """

    def __init__(self, aio: Aio, calls: Calls, authenticator: Authenticator, upstream: Upstream) -> None:
        self._aio = aio
        self._calls = calls
        self._authenticator = authenticator
        self._upstream = upstream
        self._handlers = Handlers(aio, calls, upstream)

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
                return _refusal(UnknownPath("Method not found!"), partial(self._heard, caller))
            return self._telling(handler, caller)
        try:
            caller.require(method.scope)
        except Forbidden as error:
            self._authenticator.refused("forbidden")
            return _refusal(error, partial(self._heard, caller))
        return self._handlers.of(method, caller)

    async def _refused(self, peer: str) -> None:
        await self._aio.call(self._note_refusal, peer)

    async def _note_refusal(self, peer: str) -> None:
        self._upstream.client(peer).refused()

    async def _heard(self, caller: Caller, peer: str) -> None:
        self._aio.tell(self._note_caller, caller, peer)

    def _note_caller(self, caller: Caller, peer: str) -> None:
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
            await self._heard(caller, context.peer())
            return await answer(await parsed(request, context), context)

        async def many(request: Any, context: Context) -> AsyncIterator[Any]:
            await self._heard(caller, context.peer())
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


def _credentials(metadata: Iterable[tuple[str, str | bytes]]) -> tuple[list[str], list[str]]:
    """Return the values of `authorization` and of `x-api-key`."""
    pairs = [(key, value) for key, value in metadata or () if isinstance(value, str)]
    return (
        [value for key, value in pairs if key == "authorization"],
        [value for key, value in pairs if key == "x-api-key"],
    )


def _refusal(fault: NodeError, first: Callable[[str], Awaitable[None]]) -> grpc.RpcMethodHandler:
    """Return a handler that answers with this error, after it awaited `first` with the client's peer name."""

    async def refuse(_: Any, context: Context) -> AsyncIterator[bytes]:
        await first(context.peer())
        await context.abort(grpc.StatusCode[fault.grpc], fault.text)
        yield b""

    return grpc.stream_stream_rpc_method_handler(refuse)
