"""A call, whichever transport brought it: bytes in, bytes out, errors of `node.errors`. Runs on the reactor."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from google.protobuf.message import DecodeError, Message
from twisted.logger import Logger

from node.auth import Dialect
from node.errors import Internal, InvalidRequest, NodeError, Unsupported
from node.logs import LogRing
from node.methods import Method


class Feed(Protocol):
    """A call whose messages come one by one, each taken as it arrives, answered once at the end."""

    async def feed(self, message: Any) -> None:
        """Take one message. Returns when more may come; raises only what ends the whole call."""

    async def finish(self) -> Message:
        """No more messages: the reply, or the error that sums the call up."""


class Backend(Protocol):
    """What `Calls` needs of the backend, besides the coroutines that METHODS names."""

    def touch(self) -> None:
        """A controller said something: keep-alive starts anew."""


class Calls:
    """All of METHODS for the two transports."""

    log = Logger()

    def __init__(self, backend: Backend, ring: LogRing) -> None:
        self._backend = backend
        self._ring = ring

    async def unary(self, method: Method, body: bytes, dialect: Dialect) -> bytes:
        """Parse, run and serialise one request."""
        self._backend.touch()
        if not method.built:
            raise Unsupported(f"{method.name} is not built yet")
        request = parse(method, body)
        handler: Callable[[Any, Dialect], Awaitable[Message]] = getattr(self._backend, method.call)
        reply = await self._guarded(method, handler(request, dialect))
        return reply.SerializeToString()

    def open(self, method: Method) -> OpenFeed:
        """Begin a call whose requests are a stream."""
        self._backend.touch()
        return OpenFeed(self, method, getattr(self._backend, method.call)())

    def logs(self) -> LogReader:
        """A reader of its own: the ring's tail, then what comes."""
        self._backend.touch()
        return LogReader(self._ring)

    def touch(self) -> None:
        self._backend.touch()

    async def _guarded(self, method: Method, work: Awaitable[Message]) -> Message:
        try:
            return await work
        except NodeError:
            raise
        except Exception as fault:
            self.log.failure("{method} failed", method=method.name)
            raise Internal(
                f"internal error in {method.name}: {type(fault).__name__}; the node's log has more"
            ) from fault


class OpenFeed:
    """One stream of requests under way."""

    def __init__(self, calls: Calls, method: Method, feed: Feed) -> None:
        self._calls = calls
        self._method = method
        self._feed = feed

    async def feed(self, body: bytes) -> None:
        """Take one serialised message."""
        self._calls.touch()
        await self._feed.feed(parse(self._method, body))

    async def finish(self) -> bytes:
        """The serialised reply."""
        reply = await self._calls._guarded(self._method, self._feed.finish())
        return reply.SerializeToString()


class LogReader:
    """A cursor into the ring."""

    def __init__(self, ring: LogRing) -> None:
        self._ring = ring
        self._cursor = ring.tail()

    async def next(self) -> list[str]:
        """The next lines, at least one. Cancelling it is fine."""
        lines, self._cursor = await self._ring.follow(self._cursor)
        return lines


def parse(method: Method, body: bytes) -> Message:
    """The request of `method`. Raises `InvalidRequest`."""
    try:
        return method.request.FromString(body)
    except DecodeError as fault:
        raise InvalidRequest(f"the body is not a {method.request.DESCRIPTOR.name} message: {fault}") from fault
