"""A call, whichever transport brought it: bytes in, bytes out, errors of `node.errors`. Runs on the reactor."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from google.protobuf.message import DecodeError, Message

from node.api.auth import Dialect
from node.api.methods import Method
from node.errors import Internal, InvalidRequest, NodeError, Unsupported
from node.logs import Logger, LogRing


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


class Call:
    """One request under way, for whoever answers it: what its caller speaks, and what becomes of the reply."""

    log = Logger()

    def __init__(self, method: Method, dialect: Dialect) -> None:
        self.dialect = dialect
        self._method = method
        self._whole: bool | None = None
        self._callbacks: list[Callable[[bool], None]] = []

    @property
    def awaited(self) -> bool:
        """Somebody wants to know what becomes of the reply."""
        return bool(self._callbacks)

    def when_settled(self, callback: Callable[[bool], None]) -> None:
        """Have this called once, on the reactor: whether the reply was handed over whole.

        False: the work failed, the caller hung up, the reply could not be sent, the node stopped. To be called before
        the reply is returned, and only where the method `settles`. What "handed over" means on each transport is in
        docs/interface.md.
        """
        if not settles(self._method):
            raise RuntimeError(f"nothing is known of what becomes of a reply of {self._method.name}")
        if self._whole is None:
            self._callbacks.append(callback)
        else:
            self._tell(callback, self._whole)

    def settle(self, whole: bool) -> None:
        """For the transports: what became of the reply. The first word counts."""
        if self._whole is None:
            self._whole = whole
            callbacks, self._callbacks = self._callbacks, []
            for callback in callbacks:
                self._tell(callback, whole)

    def _tell(self, callback: Callable[[bool], None], whole: bool) -> None:
        try:
            callback(whole)
        except Exception:  # noqa: BLE001 - logged; the transport that brings the word is not to blame
            self.log.failure("what depends on a reply was not done (handed over: {whole})", whole=whole)


@dataclass(frozen=True)
class Reply:
    """The serialised reply. Where `settle` is given, somebody waits to be told, once, whether it was handed over whole.

    `settle` is to be called on the reactor.
    """

    body: bytes
    settle: Callable[[bool], None] | None = None


class Calls:
    """All of METHODS for the two transports."""

    log = Logger()

    def __init__(self, backend: Backend, ring: LogRing) -> None:
        self._backend = backend
        self._ring = ring
        self._unsettled: set[Call] = set()

    async def unary(self, method: Method, body: bytes, dialect: Dialect) -> Reply:
        """Parse, run and serialise one request."""
        self._backend.touch()
        if not method.built:
            raise Unsupported(f"{method.name} is not built yet")
        request = parse(method, body)
        handler: Callable[[Any, Call], Awaitable[Message]] = getattr(self._backend, method.call)
        call = Call(method, dialect)
        self._unsettled.add(call)
        try:
            reply = (await self._guarded(method, handler(request, call))).SerializeToString()
        except BaseException:
            self._settle(call, False)
            raise
        if call.awaited:
            return Reply(reply, partial(self._settle, call))
        self._unsettled.discard(call)
        return Reply(reply)

    def close(self) -> None:
        """The node ends: what was not handed over by now never will be."""
        for call in tuple(self._unsettled):
            self._settle(call, False)

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

    def _settle(self, call: Call, whole: bool) -> None:
        self._unsettled.discard(call)
        call.settle(whole)

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

    @property
    def behind(self) -> bool:
        """`next` will not have to wait."""
        return self._ring.has(self._cursor)

    async def next(self) -> list[str]:
        """The next lines, at least one. Cancelling it is fine."""
        lines, self._cursor = await self._ring.follow(self._cursor)
        return lines


def settles(method: Method) -> bool:
    """Whether it becomes known what became of a reply: where a request can take something away. It costs a little."""
    return "reset" in method.request.DESCRIPTOR.fields_by_name


def parse(method: Method, body: bytes) -> Message:
    """The request of `method`. Raises `InvalidRequest`."""
    try:
        return method.request.FromString(body)
    except DecodeError as fault:
        raise InvalidRequest(f"the body is not a {method.request.DESCRIPTOR.name} message: {fault}") from fault
