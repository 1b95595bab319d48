"""Read the body of a REST response: whole, line by line, or event by event."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any, Generic, TypeVar

from google.protobuf.message import DecodeError
from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IReactorTime
from twisted.internet.protocol import Protocol, connectionDone
from twisted.python.failure import Failure
from twisted.web.client import ResponseDone
from twisted.web.iweb import IResponse

from node.api.framing import arrived
from node.api.methods import MAX_BODY
from node.base.alarm import Alarm
from node.base.errors import InvalidRequest
from node.client.failures import NoReply, StreamEnded, UnexpectedReply, Unreachable
from node.client.transport import Inbox, Line
from protos.service_pb2 import Event

T = TypeVar("T")
Split = Callable[[bytes], tuple[Iterable[T], bytes]]

# Seconds without a byte after which a stream counts as broken; the node sends a heartbeat every 15.
SILENCE = 45.0
# Bytes of a line or an event; the node's lines have at most 64 Ki characters.
MAX_LINE = 1024 * 1024


class Body(Protocol):
    """Passes data to `take`, which may raise `NoReply`. `done` fires at the end; cancelling it ends the connection."""

    transport: Any

    def __init__(self, take: Callable[[bytes], object]) -> None:
        self.done: Deferred[None] = Deferred(lambda _: self.transport.loseConnection())
        self._take = take

    def dataReceived(self, data: bytes) -> None:
        try:
            if not self.done.called:
                self._take(data)
        except NoReply as error:
            self.transport.loseConnection()
            self.done.errback(error)

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        if self.done.called:
            return
        if reason.check(ResponseDone):
            self.done.callback(None)
        else:
            self.done.errback(reason)


async def whole(response: IResponse) -> bytes:
    """Read a whole body. Raises `UnexpectedReply` if it is longer than any reply may be."""
    found = bytearray()

    def take(data: bytes) -> None:
        found.extend(data)
        if len(found) > MAX_BODY:
            raise UnexpectedReply(f"the reply is larger than {MAX_BODY} bytes")

    body = Body(take)
    response.deliverBody(body)
    await body.done
    return bytes(found)


class StreamBody(Generic[T]):
    """Reads an endless body into `inbox`. `beats`: the node sends heartbeats, and silence means that it is gone.

    `split` takes the received data apart into complete items and the incomplete rest. It raises `UnexpectedReply`.
    """

    def __init__(self, reactor: IReactorTime, response: IResponse, split: Split[T], beats: bool = True) -> None:
        self._split = split
        self._beats = beats
        self._tail = b""
        self._silence = Alarm(reactor, self._silent)
        self._body = Body(self._take)
        self.inbox: Inbox[T] = Inbox(reactor, self._body.done.cancel)
        self._body.done.addCallbacks(self._over, self._broken)
        response.deliverBody(self._body)
        self._listen()

    def _take(self, data: bytes) -> None:
        found, self._tail = self._split(self._tail + data)
        if len(self._tail) > MAX_LINE:
            raise UnexpectedReply(f"a log line or an event is larger than {MAX_LINE} bytes")
        self.inbox.put(found)
        self._listen()
        if self.inbox.full:
            self._silence.cancel()
            self._body.transport.pauseProducing()
            self.inbox.room().addCallback(self._go_on)

    def _go_on(self, _: None) -> None:
        self._listen()
        self._body.transport.resumeProducing()

    def _listen(self) -> None:
        """Restart the timer that ends the stream if no heartbeat comes."""
        if self._beats and not self._body.done.called:
            self._silence.set(SILENCE)

    def _silent(self) -> None:
        self.inbox.end(Unreachable(f"nothing came from the node for {SILENCE:g} s"))
        self._body.done.cancel()

    def _over(self, _: None) -> None:
        self._silence.cancel()
        self.inbox.end(StreamEnded())

    def _broken(self, failure: Failure) -> None:
        self._silence.cancel()
        error = failure.value
        self.inbox.end(error if isinstance(error, NoReply) else Unreachable(f"the stream broke: {error}"))


def plain_lines(data: bytes) -> tuple[Iterable[Line], bytes]:
    """Split off the log lines of a body without places."""
    head, ended, tail = data.replace(b"\r\n", b"\n").rpartition(b"\n")
    return map(Line, head.decode("utf-8", "replace").split("\n") if ended else ()), tail


def placed_lines(data: bytes) -> tuple[Iterable[Line], bytes]:
    """Split off the log lines of Server-Sent Events, with their places; heartbeats are comments."""
    # An event ends with an empty line.
    head, ended, tail = data.replace(b"\r\n", b"\n").rpartition(b"\n\n")
    return chain.from_iterable(map(_lines, head.decode("utf-8", "replace").split("\n\n") if ended else ())), tail


def _lines(event: str) -> Iterator[Line]:
    """Return the line of one event; a comment has none."""
    fields = [line.partition(":") for line in event.split("\n")]
    place = next((value.removeprefix(" ") for name, _, value in fields if name == "id"), "")
    return (Line(value.removeprefix(" "), place) for name, _, value in fields if name == "data")


def split_events(data: bytes) -> tuple[Iterable[Event], bytes]:
    """Split off the events, each after its length; empty ones are heartbeats. Raises `UnexpectedReply`."""
    try:
        bodies, rest = arrived(data)
        found = [Event.FromString(body) for body in bodies]
    except (InvalidRequest, DecodeError) as error:
        raise UnexpectedReply(f"the reply is not a stream of events: {error}") from error
    return [event for event in found if event.kind], rest
