"""Streaming responses of REST: log lines and events, for as long as the client listens."""

from __future__ import annotations

import json
from io import BytesIO
from typing import Generic, Protocol, TypeVar

from google.protobuf.proto import serialize_length_prefixed
from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IPushProducer
from zope.interface import implementer

from node.api.auth import Dialect
from node.api.calls import Calls
from node.api.methods import Method
from node.api.readers import PlacedReader
from node.base.alarm import Alarm
from node.base.errors import InvalidRequest
from node.base.slices import a_turn
from node.door.site import Request
from protos.service_pb2 import Event, EventsRequest

# Seconds without a line after which a stream carries a comment, so that no proxy on the way closes it as idle.
HEARTBEAT = 15.0
COMMENT = b": heartbeat\n\n"
SSE = "text/event-stream"
LAST = b"Last-Event-ID"
MOST_SEQUENCE = 2**64 - 1

T = TypeVar("T")


class Source(Protocol[T]):
    """What a stream reads from: `next` returns at least one item, or none at the end."""

    @property
    def behind(self) -> bool: ...
    async def next(self) -> list[T]: ...


@implementer(IPushProducer)
class Stream(Generic[T]):
    """Writes what a reader reads to one client.

    While the client takes nothing, the reader is not asked: lines are lost for this client alone.
    """

    media_type = b"text/event-stream; charset=utf-8"
    # Sent in silence; empty where clients would take it for a line.
    heartbeat = COMMENT

    def __init__(self, request: Request, reader: Source[T]) -> None:
        self._request = request
        self._reader = reader
        self._paused: Deferred[None] | None = None
        self._beating = Alarm(request.site.reactor, self._beat)

    def framed(self, one: T) -> bytes:
        """Encode one item for the wire."""
        raise NotImplementedError

    async def run(self) -> None:
        """Send the headers at once, then items until the reader ends. Cancelled when the client is gone."""
        self._request.setHeader(b"Content-Type", self.media_type)
        self._request.registerProducer(self, True)
        try:
            self._beat() if self.heartbeat else self._request.write(b"")
            while read := await self._read():
                self._write(read)
                if self._reader.behind:
                    # Otherwise the reactor would not get a turn, and the transport could not pause this producer.
                    await a_turn(self._request.site.reactor)
        finally:
            self._end()

    def pauseProducing(self) -> None:
        if self._paused is None:
            self._paused = Deferred()

    def resumeProducing(self) -> None:
        paused, self._paused = self._paused, None
        if paused is not None:
            paused.callback(None)

    def stopProducing(self) -> None:
        """The connection is lost: the request notifies Klein, which cancels `run`."""

    async def _read(self) -> list[T]:
        if self._paused is not None:
            await self._paused
        return await self._reader.next()

    def _write(self, read: list[T]) -> None:
        self._request.write(b"".join(map(self.framed, read)))
        if self._beating.pending:
            self._beating.set(HEARTBEAT)

    def _beat(self) -> None:
        self._beating.set(HEARTBEAT)
        if self._paused is None:
            self._request.write(self.heartbeat)

    def _end(self) -> None:
        self._beating.cancel()
        if self._request.channel is not None:  # None after a lost connection
            self._request.unregisterProducer()


class BareLines(Stream[str]):
    """Log lines as deployed clients parse them: bare, each with a line break."""

    heartbeat = b""

    def framed(self, one: str) -> bytes:
        return one.encode("utf-8", "replace") + b"\n"


class LineEvents(Stream[tuple[str, str]]):
    """Log lines as Server-Sent Events, each with its place as id."""

    def framed(self, one: tuple[str, str]) -> bytes:
        line, place = one
        return b"id: %b\ndata: %b\n\n" % (place.encode(), line.encode("utf-8", "replace"))


def log_stream(request: Request, calls: Calls, method: Method) -> BareLines | LineEvents:
    """Make a stream of the log lines after the client's Last-Event-ID, or of the newest; then of what comes."""
    if request.dialect is Dialect.DEPLOYED:
        return BareLines(request, calls.logs(method, request.caller))
    [last] = request.requestHeaders.getRawHeaders(LAST, [b""])[:1]
    return LineEvents(request, PlacedReader(calls.logs(method, request.caller, last.decode("latin-1"))))


class EventStream(Stream[Event]):
    """Events as messages, each after its length as a varint; in silence an empty message."""

    media_type = b"application/x-protobuf"
    heartbeat = b"\0"

    def framed(self, one: Event) -> bytes:
        body = BytesIO()
        serialize_length_prefixed(one, body)
        return body.getvalue()


class ServerSentEvents(Stream[Event]):
    """Events as Server-Sent Events with JSON; the id is NUMBER@EPOCH."""

    def framed(self, one: Event) -> bytes:
        fields = {
            "sequence": one.sequence,
            "epoch": one.epoch,
            "time": one.time,
            "kind": one.kind,
            "severity": one.severity,
            "text": one.text,
            "fields": dict(one.fields),
        }
        return f"id: {one.sequence}@{one.epoch}\ndata: {json.dumps(fields)}\n\n".encode()


def accepts_events(request: Request) -> bool:
    """Return whether the client accepts Server-Sent Events."""
    accepted = b",".join(request.requestHeaders.getRawHeaders(b"Accept", []))
    return any(word.partition(b";")[0].strip().lower() == SSE.encode() for word in accepted.split(b","))


def resumed(asked: EventsRequest, request: Request) -> EventsRequest:
    """Complete the request of a Server-Sent Events client: all events after its Last-Event-ID, then what comes.

    The id may lack the epoch. Raises `InvalidRequest`.
    """
    asked.follow = True
    for raw in request.requestHeaders.getRawHeaders(LAST, [])[:1]:
        sequence, _, epoch = raw.decode("latin-1").partition("@")
        if not (sequence.isascii() and sequence.isdigit() and len(sequence) <= 20 and int(sequence) <= MOST_SEQUENCE):
            raise InvalidRequest("Last-Event-ID is not the id of an event: send NUMBER or NUMBER@EPOCH")
        asked.since, asked.epoch = int(sequence), epoch
    return asked
