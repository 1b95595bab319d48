"""The client's calls over gRPC: METHODS by their paths, in the asyncio thread of an `Aio`."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Generic, TypeVar

from node.base.aio import Aio  # first: it sets gRPC's environment

# isort: split
import grpc
import grpc.aio
from google.protobuf.message import Message
from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IReactorTime

from node.api.methods import MAX_BODY, SERVICE, Kind, Method
from node.client.failures import StreamEnded, of_grpc
from node.client.target import Target
from node.client.transport import LAST, Inbox, Line
from protos.service_pb2 import Event, Log

# Log lines, or events, that may wait for the reactor's thread.
BATCH = 1_000
T = TypeVar("T")
Metadata = tuple[tuple[str, str], ...]

_OPTIONS = [
    ("grpc.max_receive_message_length", MAX_BODY),
    ("grpc.max_send_message_length", MAX_BODY),
    # Ignore proxies of the environment, as REST does.
    ("grpc.enable_http_proxy", 0),
    # Clients do not share connections.
    ("grpc.use_local_subchannel_pool", 1),
    # Reconnect soon to a node that is back; gRPC's default backoff grows to minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # Notice a node that is gone without closing: a PING after 30 s, closed after 15 s without an answer.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 15_000),
    ("grpc.http2.max_pings_without_data", 0),
]


class RpcTransport:
    """See `Transport`. A feed is one stream. An `aio` that is `owned` is stopped by `close`."""

    def __init__(self, reactor: IReactorTime, target: Target, aio: Aio, owned: bool) -> None:
        self._reactor = reactor
        self._aio = aio
        self._owned = owned
        self._address = target.address
        self._metadata = tuple(target.credentials().items())
        self._credentials = grpc.ssl_channel_credentials(target.certificates())
        named = [("grpc.ssl_target_name_override", target.asked_name)] if target.asked_name else []
        self._options = [*_OPTIONS, *named]
        self._channel: Any = None

    async def call(self, method: Method, messages: Sequence[Message]) -> bytes:
        return await self._aio.run(self._call(method, [message.SerializeToString() for message in messages]))

    async def lines(self, method: Method, last: str) -> Inbox[Line]:
        return await self._stream(method, b"", _line, ((LAST, last),))

    async def events(self, method: Method, request: Message) -> Inbox[Event]:
        return await self._stream(method, request.SerializeToString(), Event.FromString)

    async def _stream(
        self, method: Method, request: bytes, read: Callable[[bytes], T], more: Metadata = ()
    ) -> Inbox[T]:
        stream = await self._aio.run(self._open(method, request, read, more))
        inbox: Inbox[T] = Inbox(self._reactor)
        relay = Deferred.fromCoroutine(self._relay(method, stream, inbox))
        relay.addErrback(inbox.fail)

        def close() -> None:
            relay.cancel()
            self._aio.run(stream.close())

        inbox.close = close
        return inbox

    async def close(self) -> None:
        channel, self._channel = self._channel, None
        if channel is not None:
            await self._aio.run(channel.close())
        if self._owned and self._aio.running:
            self._aio.stop()

    async def _relay(self, method: Method, stream: _Stream[T], inbox: Inbox[T]) -> None:
        while True:
            inbox.put(await self._aio.run(self._answered(method, stream.next())))
            await inbox.room()

    # In the asyncio thread

    async def _call(self, method: Method, bodies: list[bytes]) -> bytes:
        path = f"/{SERVICE.full_name}/{method.name}"
        if method.kind is Kind.FEED:
            call = self._connected().stream_unary(path)(iter(bodies), metadata=self._metadata)
        else:
            (body,) = bodies
            call = self._connected().unary_unary(path)(body, metadata=self._metadata)
        return await self._answered(method, call)

    async def _open(self, method: Method, request: bytes, read: Callable[[bytes], T], more: Metadata) -> _Stream[T]:
        metadata = (*self._metadata, *more)
        call = self._connected().unary_stream(f"/{SERVICE.full_name}/{method.name}")(request, metadata=metadata)
        try:
            await self._answered(method, call.initial_metadata())
            if call.done():
                await self._answered(method, call.read())
        except BaseException:
            call.cancel()
            raise
        return _Stream(call, read)

    async def _answered(self, method: Method, work: Awaitable[T]) -> T:
        """Await the result of a call. Raises the error of its status."""
        try:
            return await work
        except grpc.aio.AioRpcError as error:
            connected = self._channel is not None and self._channel.get_state() is grpc.ChannelConnectivity.READY
            raise of_grpc(method, error.code().name, error.details() or "", connected) from error

    def _connected(self) -> Any:
        if self._channel is None:  # made here, because a channel belongs to the loop that it was made in
            self._channel = grpc.aio.secure_channel(self._address, self._credentials, self._options)
        return self._channel


def _line(body: bytes) -> Line:
    log = Log.FromString(body)
    return Line(log.detail, log.id)


class _Stream(Generic[T]):
    """The messages of one call, parsed by `read`.

    `next` returns all that are there: crossing threads costs most.
    """

    def __init__(self, call: Any, read: Callable[[bytes], T]) -> None:
        self._call = call
        self._parsed = read
        self._lines: list[T] = []
        self._changed = asyncio.Event()
        self._reading = asyncio.ensure_future(self._read())
        self._reading.add_done_callback(lambda _: self._changed.set())

    async def next(self) -> list[T]:
        """Return at least one message. Raises the error that ended the call when all messages were taken."""
        while not self._lines:
            if self._reading.done():
                self._reading.result()
                raise StreamEnded
            self._changed.clear()
            await self._changed.wait()
        lines, self._lines = self._lines, []
        self._changed.set()
        return lines

    async def close(self) -> None:
        self._call.cancel()
        self._reading.cancel()

    async def _read(self) -> None:
        async for body in self._call:
            self._lines.append(self._parsed(body))
            self._changed.set()
            while len(self._lines) >= BATCH:
                self._changed.clear()
                await self._changed.wait()
