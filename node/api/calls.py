"""Run the calls of both transports: bytes in, bytes out, errors of `node.base.errors`. Runs on the reactor."""

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

from node.api.auth import Caller, Dialect
from node.api.methods import Method
from node.api.readers import GONE, EventReader, LogReader
from node.base.errors import Internal, InvalidRequest, NodeError, ShuttingDown, Unauthenticated, Unsupported
from node.base.logs import Logger, LogRing
from node.base.waiting import fire
from node.events.journal import Journal
from node.keys.keyfile import Key, Scope
from protos.service_pb2 import EventsRequest

# The HTTP status of success.
OK = 200
# Calls that are logged each time, and in the ring, too.
_EVENTS = {"Start", "Stop"}
# How many pairs of method and caller are remembered; then the node forgets all, and logs each again.
_REMEMBERED = 1000


class Feed(Protocol):
    """A call with a stream of requests: each message is processed as it arrives, and one reply sent at the end."""

    async def feed(self, message: Any) -> None:
        """Process one message. Returns when the next may come. Raises only errors that end the whole call."""

    async def finish(self) -> Message:
        """End the call after the last message. Returns the reply, or raises the error that sums the call up."""


class Backend(Protocol):
    """The part of the backend that `Calls` needs, apart from the coroutines that METHODS names."""

    def touch(self) -> None:
        """A controller has called: restart the keep-alive."""


class Call:
    """One request under way, for its handler: the caller's dialect and scope, and the delivery of the reply."""

    def __init__(self, method: Method, dialect: Dialect, scope: Scope = Scope.METRICS) -> None:
        """`scope` is that of the caller's key."""
        self.dialect = dialect
        self.scope = scope
        self.outcome: Deferred[bool] = Deferred()
        # The handler has asked for the outcome.
        self.awaited = False
        self._method = method

    def delivered(self) -> Deferred[bool]:
        """Return a Deferred that fires once, on the reactor, with whether the whole reply was delivered.

        False: the work failed, the caller hung up, the reply could not be sent, or the node stopped. To be called
        before the reply is returned, and only if the method is `watched`. docs/interface.md says what "delivered" means
        on each transport.
        """
        if not watched(self._method):
            raise RuntimeError(f"the delivery of {self._method.name} replies is not watched")
        self.awaited = True
        return self.outcome


@dataclass(frozen=True)
class Reply:
    """The serialised reply. The transport must fire `delivered`, if given.

    It does so on the reactor, with `node.base.waiting.fire`: the node's end may have fired it before.
    """

    body: bytes
    delivered: Deferred[bool] | None = None


class Audit:
    """Logs each Start and Stop; of frequent calls, the first one of each key from each address."""

    log = Logger()

    def __init__(self, ring: LogRing) -> None:
        self._ring = ring
        self._logged: set[tuple[str, str]] = set()

    def note(self, what: str, caller: Caller) -> None:
        """Log that this caller makes this call."""
        if what in _EVENTS:
            self._ring.event(f"{what} by {caller}")
            self.log.info("{what} by {caller}", what=what, caller=str(caller))
        elif (what, str(caller)) not in self._logged:
            if len(self._logged) >= _REMEMBERED:
                self._logged.clear()
            self._logged.add((what, str(caller)))
            self.log.info("{what} by {caller}; further such calls are not logged", what=what, caller=str(caller))


class Calls:
    """Runs all of METHODS for the two transports."""

    log = Logger()

    def __init__(
        self,
        backend: Backend,
        ring: LogRing,
        knows: Callable[[Key], bool] = lambda _: True,
        journal: Journal | None = None,
        called: Callable[[str, int, float], None] = lambda *_: None,
    ) -> None:
        """`knows`: whether a key is still valid, which may change during a request. `journal` has the events.

        `called` is called after each answer, with the method, the HTTP status and the seconds it took.
        """
        self._called = called
        self._backend = backend
        self._knows = knows
        self._journal = journal
        self._ring = ring
        self._audit = Audit(ring)
        self._undelivered: set[Deferred[bool]] = set()
        # The number of calls, and of messages of streams, under way.
        self._working = 0
        self._open: WeakSet[OpenFeed | LogReader | EventReader] = WeakSet()

    async def unary(self, method: Method, body: bytes, caller: Caller) -> Reply:
        """Parse, run and serialise one request."""
        with self.timed(method), self.working():
            return await self._unary(method, body, caller)

    @contextmanager
    def working(self) -> Iterator[None]:
        """Count a call as under way while inside."""
        self._working += 1
        try:
            yield
        finally:
            self._working -= 1

    @contextmanager
    def timed(self, method: Method) -> Iterator[None]:
        """Measure the call answered inside, and report its status and time to `called`."""
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
        """The node ends: report all replies that are not delivered yet as not delivered."""
        for delivered in tuple(self._undelivered):
            fire(delivered, False)

    def open(self, method: Method, caller: Caller) -> OpenFeed:
        """Begin a call with a stream of requests."""
        self.admit(method, caller)
        self._audit.note(method.name, caller)
        feed = OpenFeed(self, method, getattr(self._backend, method.call)(), caller)
        self._open.add(feed)
        return feed

    def logs(self, method: Method, caller: Caller, last: str = "") -> LogReader:
        """Open a reader of log lines: from the ring's tail, or after the place `last`; then what comes."""
        self.admit(method, caller)
        reader = LogReader(self._ring, caller, last)
        self._open.add(reader)
        return reader

    def events(self, method: Method, request: EventsRequest, caller: Caller) -> EventReader:
        """Open a reader of events: those after a number, then what comes."""
        self.admit(method, caller)
        if self._journal is None:
            raise Unsupported("events are not available on this node: it has no journal")
        reader = EventReader(self._journal, request, caller)
        self._open.add(reader)
        return reader

    def admit(self, method: Method, caller: Caller) -> None:
        """Check the key, and prolong the keep-alive for a controller.

        Raises `Unauthenticated` if the key is no longer valid, `Forbidden` if it may not call this method.
        """
        if not self._knows(caller.key):
            raise Unauthenticated(GONE)
        caller.require(method.scope)
        self.touch(caller)

    def touch(self, caller: Caller) -> None:
        """Restart the keep-alive if the caller is a controller; observers do not keep a backend alive."""
        if caller.controls:
            self._backend.touch()

    def dismiss(self, gone: Container[Key]) -> None:
        """End the open streams of callers with these keys, which are no longer valid."""
        for stream in tuple(self._open):
            if stream.caller.key in gone:
                stream.dismiss(Unauthenticated(GONE))

    def idle(self) -> bool:
        """Return whether no call is under way. A stream of requests that waits for the next message is idle."""
        return not self._working

    @property
    def settled(self) -> bool:
        """Whether it is known of each reply whether it was delivered."""
        return not self._undelivered

    def end_readers(self) -> None:
        """End all readers with an error that asks them to call again: another node process takes over."""
        for stream in tuple(self._open):
            if not isinstance(stream, OpenFeed):
                stream.dismiss(ShuttingDown("the node becomes another version of itself; read on by another call"))

    def _require_more(self, method: Method, request: Any, caller: Caller) -> None:
        """Require scope ALL for a reset, which takes counters away from other readers; log what the audit needs."""
        reset = watched(method) and request.reset
        if reset:
            caller.require(Scope.ALL)
        if method.name == "ListUsers" and request.credentials and caller.controls:
            self._audit.note(f"{method.name} with credentials", caller)
        if reset or method.scope is Scope.ALL:
            self._audit.note(f"{method.name} with reset" if reset else method.name, caller)

    def _not_done(self, failure: Failure) -> None:
        """Log an error of a delivery callback, instead of raising it in the transport that fired it."""
        self.log.failure("a delivery callback failed; what depends on the delivery of this reply was not done", failure)

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
    """One stream of requests under way, with its key checked at each message."""

    def __init__(self, calls: Calls, method: Method, feed: Feed, caller: Caller) -> None:
        self.caller = caller
        self._dismissed: NodeError | None = None
        self._calls = calls
        self._method = method
        self._feed = feed

    async def feed(self, body: bytes) -> None:
        """Process one serialised message."""
        self._require_key()
        self._calls.touch(self.caller)
        with self._calls.working():
            await self._feed.feed(parse(self._method, body))

    async def finish(self) -> bytes:
        """End the stream. Returns the serialised reply."""
        with self._calls.timed(self._method), self._calls.working():
            self._require_key()
            return await self._calls._guarded(self._method, self._feed.finish())

    def dismiss(self, error: NodeError) -> None:
        """End the stream with this error, at its next message."""
        self._dismissed = error

    def _require_key(self) -> None:
        if self._dismissed is not None:
            raise self._dismissed


def watched(method: Method) -> bool:
    """Return whether the delivery of a method's replies is watched: if its request has `reset`. It costs a little."""
    return "reset" in method.request.DESCRIPTOR.fields_by_name


def parse(method: Method, body: bytes) -> Message:
    """Parse the request of `method`. Raises `InvalidRequest`."""
    try:
        return method.request.FromString(body)
    except DecodeError as error:
        raise InvalidRequest(f"the body is not a {method.request.DESCRIPTOR.name} message: {error}") from error
