"""A gRPC channel to one run of a core. Everything here runs in the asyncio thread."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import Message

from node.errors import CoreFailed, Unsupported

_OPTIONS = [
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),
    # A core that is starting is asked again at once, not after gRPC's second.
    ("grpc.initial_reconnect_backoff_ms", 20),
    # Which is also what a connection may take to come up: on a machine that is busy it needs more than a moment.
    ("grpc.min_reconnect_backoff_ms", 2000),
    ("grpc.max_reconnect_backoff_ms", 200),
]

# What a core did not do that was asked.
COUNTERS = "the core did not give its counters"
ONLINE = "the core did not say who is online"
LATENCY = "the core did not say what it measured"
ROUTING = "the core did not answer about its routing"
USERS = "the core did not list its users"
# Deployed controllers know how this text begins, and leave a node that says it alone.
FIGURES = "failed to get sys stats"

_SILENT = (None, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE)


class ApiFailed(Exception):
    """A call that the core refused or did not answer; the text is the core's, or says why there is no answer."""

    def __init__(self, text: str, code: grpc.StatusCode | None = None) -> None:
        super().__init__(text)
        # The core has no such call, did not answer, or has nothing of that name.
        self.unsupported = code is grpc.StatusCode.UNIMPLEMENTED
        self.silent = code in _SILENT
        self.unknown = not self.unsupported and (code is grpc.StatusCode.NOT_FOUND or "not found" in str(self))


@contextmanager
def asking(what: str, unsupported: str = "") -> Iterator[None]:
    """Raises `CoreFailed` with this for what a core does not answer, or `Unsupported` for what it never does."""
    try:
        yield
    except ApiFailed as error:
        if error.unsupported and unsupported:
            raise Unsupported(unsupported) from error
        raise CoreFailed(f"{what}: {error}") from error


class Channel:
    """Calls by path. `metadata` goes with each of them."""

    def __init__(self, target: str, metadata: Sequence[tuple[str, str]] = ()) -> None:
        self._target = target
        self._metadata = tuple(metadata)
        self._channel: grpc.aio.Channel | None = None
        self._calls: dict[str, Callable[..., Awaitable[Any]]] = {}

    async def close(self) -> None:
        if self._channel is not None:
            await self._channel.close()

    async def call(self, path: str, request: Message | bytes, reply: type[Any], seconds: float) -> Any:
        """The reply to one request. Raises `ApiFailed`."""
        call = self._calls.get(path)
        if call is None:
            call = self._open().unary_unary(path, _serialize, reply.FromString)
            self._calls[path] = call
        with _failing():
            return await call(request, timeout=seconds, metadata=self._metadata)

    async def stream(
        self, path: str, request: Message, reply: type[Any], seconds: float | None = None
    ) -> AsyncGenerator[Any, None]:
        """The replies to one request, until the core or the reader ends it. Raises `ApiFailed`."""
        with _failing():
            call = self._open().unary_stream(path, _serialize, reply.FromString)(
                request, timeout=seconds, metadata=self._metadata
            )
            try:
                async for message in call:
                    yield message
            finally:
                call.cancel()

    def _open(self) -> grpc.aio.Channel:
        if self._channel is None:
            # Here, because a channel belongs to the loop it was made in.
            self._channel = grpc.aio.insecure_channel(self._target, options=_OPTIONS)
        return self._channel


@contextmanager
def _failing() -> Iterator[None]:
    """Raises `ApiFailed` for whatever gRPC ends a call with.

    When a run of the core ends its channel is closed: calls under way look cancelled then, and later ones are refused
    as a mistake of the caller's. But a task that was itself cancelled ends as such.
    """
    try:
        yield
    except grpc.aio.AioRpcError as error:
        raise ApiFailed(error.details() or error.code().name, error.code()) from error
    except grpc.aio.UsageError as error:
        raise ApiFailed(f"the core's run is over: {error}") from error
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise ApiFailed("the core's run ended before it answered") from error


def _serialize(message: Message | bytes) -> bytes:
    return message if isinstance(message, bytes) else message.SerializeToString()
