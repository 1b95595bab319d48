"""A call, whichever transport brought it: bytes in, bytes out, errors of `node.errors`. Runs on the reactor."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Container, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol
from weakref import WeakSet

from google.protobuf.message import DecodeError, Message
from twisted.internet.defer import Deferred
from twisted.python.failure import Failure

from node.api.audit import Audit
from node.api.auth import Caller, Dialect
from node.api.methods import Method
from node.api.readers import GONE, EventReader, LogReader
from node.errors import Internal, InvalidRequest, NodeError, ShuttingDown, Unauthenticated, Unsupported
from node.events.journal import Journal
from node.keyfile import Key, Scope
from node.logs import Logger, LogRing
from node.waiting import fire
from protos.service_pb2 import EventsRequest

# The status of what was done.
OK = 200


class Feed(Protocol):
    """A call whose messages come one by one, each taken as it arrives, answered once at the end."""

    async def feed(self, message: Any) -> None:
        """Take one message. Returns when more may come; raises only what ends the whole call."""

    async def finish(self) -> Message:
        """No more messages: the reply, or the error that sums the call up."""


class Backend(Protocol):
    """What `Calls` needs of the backend, apart from the coroutines that METHODS names."""

    def touch(self) -> None:
        """A controller said something: keep-alive starts anew."""


class Call:
    """One request under way, for whoever answers it: what its caller speaks, and whether the reply is delivered."""

    def __init__(self, method: Method, dialect: Dialect, scope: Scope = Scope.METRICS) -> None:
        """`scope` is what the caller's key may do."""
        self.dialect = dialect
        self.scope = scope
        self.outcome: Deferred[bool] = Deferred()
        # Somebody waits for the outcome.
        self.awaited = False
        self._method = method

    def delivered(self) -> Deferred[bool]:
        """Fires once, on the reactor: whether the reply was delivered whole.

        False: the work failed, the caller hung up, the reply could not be sent, the node stopped. To be asked for
        before the reply is returned, and only where the method is `watched`. What "delivered" means on each transport
        is in docs/interface.md.
        """
        if not watched(self._method):
            raise RuntimeError(f"nothing is known of what becomes of a reply of {self._method.name}")
        self.awaited = True
        return self.outcome


@dataclass(frozen=True)
class Reply:
    """The serialised reply. Where `delivered` is given, somebody waits for it: the transport is to fire it.

    That is done on the reactor, by `node.waiting.fire`: the node's end may have been first.
    """

    body: bytes
    delivered: Deferred[bool] | None = None


class Calls:
    """All of METHODS for the two transports."""

    log = Logger()

    def __init__(
        self,
        backend: Backend,
        ring: LogRing,
        knows: Callable[[Key], bool] = lambda _: True,
        journal: Journal | None = None,
        called: Callable[[str, int, float], None] = lambda *_: None,
    ) -> None:
        """`knows`: whether a key is one still. A request may be long on its way. `journal` has the events.

        `called` is told of each answer: the method, the status in HTTP's words, the seconds that it took.
        """
        self._called = called
        self._backend = backend
        self._knows = knows
        self._journal = journal
        self._ring = ring
        self._audit = Audit(ring)
        self._undelivered: set[Deferred[bool]] = set()
        # Calls, and messages of streams, that are under way.
        self._working = 0
        self._open: WeakSet[OpenFeed | LogReader | EventReader] = WeakSet()

    async def unary(self, method: Method, body: bytes, caller: Caller) -> Reply:
        """Parse, run and serialise one request."""
        with self.timed(method), self.working():
            return await self._unary(method, body, caller)

    @contextmanager
    def working(self) -> Iterator[None]:
        """Inside, something is done for somebody."""
        self._working += 1
        try:
            yield
        finally:
            self._working -= 1

    @contextmanager
    def timed(self, method: Method) -> Iterator[None]:
        """Inside, the call is answered."""
        began, status = time.monotonic(), OK
        try:
            yield
        except BaseException as error:
            status = error.http if isinstance(error, NodeError) else Internal.http
            raise
        finally:
            self._called(method.name, status, time.monotonic() - began)

    async def _unary(self, method: Method, body: bytes, caller: Caller) -> Reply:
        self.admit(method, caller)
        request = parse(method, body)
        self._require_more(method, request, caller)
        handler: Callable[[Any, Call], Awaitable[Message]] = getattr(self._backend, method.call)
        call = Call(method, caller.dialect, caller.key.scope)
        delivered = call.outcome
        self._undelivered.add(delivered)
        try:
            reply = await self._guarded(method, handler(request, call))
        except BaseException:
            fire(delivered, False)
            raise
        finally:
            delivered.addErrback(self._not_done).addBoth(lambda _: self._undelivered.discard(delivered))
        if call.awaited and not delivered.called:
            return Reply(reply, delivered)
        fire(delivered, False)
        return Reply(reply)

    def close(self) -> None:
        """The node ends: what was not delivered by now never will be."""
        for delivered in tuple(self._undelivered):
            fire(delivered, False)

    def open(self, method: Method, caller: Caller) -> OpenFeed:
        """Begin a call whose requests are a stream."""
        self.admit(method, caller)
        self._audit.note(method.name, caller)
        feed = OpenFeed(self, method, getattr(self._backend, method.call)(), caller)
        self._open.add(feed)
        return feed

    def logs(self, method: Method, caller: Caller, last: str = "") -> LogReader:
        """A reader of its own: the ring's tail, or what is behind the last line that was read; then what comes."""
        self.admit(method, caller)
        reader = LogReader(self._ring, caller, last)
        self._open.add(reader)
        return reader

    def events(self, method: Method, request: EventsRequest, caller: Caller) -> EventReader:
        """A reader of its own: what happened behind a number, then what comes."""
        self.admit(method, caller)
        if self._journal is None:
            raise Unsupported("this node keeps no events")
        reader = EventReader(self._journal, request, caller)
        self._open.add(reader)
        return reader

    def admit(self, method: Method, caller: Caller) -> None:
        """Raises `Forbidden` if the key may not call this, `Unauthenticated` if it is none any more.

        A controller's word prolongs the keep-alive.
        """
        if not self._knows(caller.key):
            raise Unauthenticated(GONE)
        caller.require(method.scope)
        self.touch(caller)

    def touch(self, caller: Caller) -> None:
        """Who only looks on keeps no backend alive."""
        if caller.controls:
            self._backend.touch()

    def dismiss(self, gone: Container[Key]) -> None:
        """These keys are none any more: the open streams of whoever has one end."""
        for stream in tuple(self._open):
            if stream.caller.key in gone:
                stream.dismiss(Unauthenticated(GONE))

    def idle(self) -> bool:
        """Whether nothing is being done for anybody. A stream of requests that waits for the next is idle."""
        return not self._working

    def end_readers(self) -> None:
        """Those who read what goes on are told to come again: the node becomes another version of itself."""
        for stream in tuple(self._open):
            if not isinstance(stream, OpenFeed):
                stream.dismiss(ShuttingDown("the node becomes another version of itself; read on by another call"))

    def _require_more(self, method: Method, request: Any, caller: Caller) -> None:
        """A reset takes away what others wait for."""
        reset = watched(method) and request.reset
        if reset:
            caller.require(Scope.ALL)
        if method.name == "ListUsers" and request.credentials and caller.controls:
            self._audit.note(f"{method.name} with credentials", caller)
        if reset or method.scope is Scope.ALL:
            self._audit.note(f"{method.name} with reset" if reset else method.name, caller)

    def _not_done(self, failure: Failure) -> None:
        """The transport that brings the word is not to blame."""
        self.log.failure("what depends on the delivery of a reply was not done", failure)

    async def _guarded(self, method: Method, work: Awaitable[Message]) -> bytes:
        try:
            return (await work).SerializeToString()
        except NodeError:
            raise
        except Exception as error:
            self.log.failure("{method} failed", method=method.name)
            raise Internal(
                f"internal error in {method.name}: {type(error).__name__}; the node's log has more"
            ) from error


class OpenFeed:
    """One stream of requests under way."""

    def __init__(self, calls: Calls, method: Method, feed: Feed, caller: Caller) -> None:
        self.caller = caller
        self._dismissed: NodeError | None = None
        self._calls = calls
        self._method = method
        self._feed = feed

    async def feed(self, body: bytes) -> None:
        """Take one serialised message."""
        self._require_key()
        self._calls.touch(self.caller)
        with self._calls.working():
            await self._feed.feed(parse(self._method, body))

    async def finish(self) -> bytes:
        """The serialised reply."""
        with self._calls.timed(self._method), self._calls.working():
            self._require_key()
            return await self._calls._guarded(self._method, self._feed.finish())

    def dismiss(self, error: NodeError) -> None:
        """With the next message it ends."""
        self._dismissed = error

    def _require_key(self) -> None:
        if self._dismissed is not None:
            raise self._dismissed


def watched(method: Method) -> bool:
    """Whether it becomes known if a reply was delivered: where a request can take something away. It costs a little."""
    return "reset" in method.request.DESCRIPTOR.fields_by_name


def parse(method: Method, body: bytes) -> Message:
    """The request of `method`. Raises `InvalidRequest`."""
    try:
        return method.request.FromString(body)
    except DecodeError as error:
        raise InvalidRequest(f"the body is not a {method.request.DESCRIPTOR.name} message: {error}") from error
