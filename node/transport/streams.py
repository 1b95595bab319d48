"""Responses that do not end: log lines and events, one client's each, for as long as it listens."""

from __future__ import annotations

import json
from io import BytesIO
from typing import Generic, Protocol, TypeVar

from google.protobuf.proto import serialize_length_prefixed
from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IDelayedCall, IPushProducer
from twisted.internet.task import deferLater
from zope.interface import implementer

from node.api.auth import Dialect
from node.api.calls import Calls
from node.api.methods import Method
from node.api.readers import PlacedReader
from node.errors import InvalidRequest
from node.transport.site import Request
from protos.service_pb2 import Event, EventsRequest

# Seconds without a line after which a stream carries a comment, so that nothing on the way thinks it dead.
HEARTBEAT = 15.0
COMMENT = b": heartbeat\n\n"
SSE = "text/event-stream"
LAST = b"Last-Event-ID"
MOST_SEQUENCE = 2**64 - 1

T = TypeVar("T")


class Source(Protocol[T]):
    """Where what is sent comes from: `next` brings at least one, or none at the end."""

    @property
    def behind(self) -> bool: ...
    async def next(self) -> list[T]: ...


@implementer(IPushProducer)
class Stream(Generic[T]):
    """What a reader reads to one client.

    While it takes nothing the reader is not asked, so what is lost is lost for this client alone.
    """

    media_type = b"text/event-stream; charset=utf-8"
    # What is sent in silence; nothing where clients would take it for something else.
    heartbeat = COMMENT

    def __init__(self, request: Request, reader: Source[T]) -> None:
        self._request = request
        self._reader = reader
        self._paused: Deferred[None] | None = None
        self._beating: IDelayedCall | None = None

    def framed(self, one: T) -> bytes:
        """As it is on the wire."""
        raise NotImplementedError

    async def run(self) -> None:
        """Returns when the reader is at its end; cancelled when the client is gone. Sends the headers at once."""
        self._request.setHeader(b"Content-Type", self.media_type)
        self._request.registerProducer(self, True)
        try:
            self._beat() if self.heartbeat else self._request.write(b"")
            while read := await self._read():
                self._write(read)
                if self._reader.behind:
                    # Else nobody else would have a turn, the transport least of all, which tells when it is full.
                    await deferLater(self._request.site.reactor, 0)
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
        """The connection is lost: the request tells Klein, which cancels `run`."""

    async def _read(self) -> list[T]:
        if self._paused is not None:
            await self._paused
        return await self._reader.next()

    def _write(self, read: list[T]) -> None:
        self._request.write(b"".join(map(self.framed, read)))
        if self._beating is not None:
            self._beating.reset(HEARTBEAT)

    def _beat(self) -> None:
        self._beating = self._request.site.reactor.callLater(HEARTBEAT, self._beat)
        if self._paused is None:
            self._request.write(self.heartbeat)

    def _end(self) -> None:
        if self._beating is not None:
            self._beating.cancel()
        if self._request.channel is not None:  # which a lost connection takes away
            self._request.unregisterProducer()


class BareLines(Stream[str]):
    """Log lines as deployed clients take them."""

    heartbeat = b""

    def framed(self, one: str) -> bytes:
        return one.encode("utf-8", "replace") + b"\n"


class LineEvents(Stream[tuple[str, str]]):
    """Log lines as Server-Sent Events. The id is the line's place."""

    def framed(self, one: tuple[str, str]) -> bytes:
        line, place = one
        return b"id: %b\ndata: %b\n\n" % (place.encode(), line.encode("utf-8", "replace"))


def log_stream(request: Request, calls: Calls, method: Method) -> BareLines | LineEvents:
    """The lines behind the client's Last-Event-ID, or the newest, then what comes."""
    if request.dialect is Dialect.DEPLOYED:
        return BareLines(request, calls.logs(method, request.caller))
    [last] = request.requestHeaders.getRawHeaders(LAST, [b""])[:1]
    return LineEvents(request, PlacedReader(calls.logs(method, request.caller, last.decode("latin-1"))))


class EventStream(Stream[Event]):
    """Events as messages, each behind its length as a varint; in silence one that is empty."""

    media_type = b"application/x-protobuf"
    heartbeat = b"\0"

    def framed(self, one: Event) -> bytes:
        body = BytesIO()
        serialize_length_prefixed(one, body)
        return body.getvalue()


class ServerSentEvents(Stream[Event]):
    """Events as JSON. The id is the number, and the epoch behind it."""

    def framed(self, one: Event) -> bytes:
        told = {
            "sequence": one.sequence,
            "epoch": one.epoch,
            "time": one.time,
            "kind": one.kind,
            "severity": one.severity,
            "text": one.text,
            "fields": dict(one.fields),
        }
        return f"id: {one.sequence}@{one.epoch}\ndata: {json.dumps(told)}\n\n".encode()


def accepts_events(request: Request) -> bool:
    """Whether the client wants Server-Sent Events."""
    accepted = b",".join(request.requestHeaders.getRawHeaders(b"Accept", []))
    return any(word.partition(b";")[0].strip().lower() == SSE.encode() for word in accepted.split(b","))


def resumed(asked: EventsRequest, request: Request) -> EventsRequest:
    """What a client of Server-Sent Events asks for: all behind its Last-Event-ID, and what comes.

    The epoch may be left out of the id. Raises `InvalidRequest`.
    """
    asked.follow = True
    for raw in request.requestHeaders.getRawHeaders(LAST, [])[:1]:
        sequence, _, epoch = raw.decode("latin-1").partition("@")
        if not (sequence.isascii() and sequence.isdigit() and len(sequence) <= 20 and int(sequence) <= MOST_SEQUENCE):
            raise InvalidRequest("Last-Event-ID is none of this stream's: it begins with a number")
        asked.since, asked.epoch = int(sequence), epoch
    return asked
