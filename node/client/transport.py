"""The interface between `Client` and its transports, and the buffer between a stream and its reader. On the reactor."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Generic, NamedTuple, Protocol, TypeVar

from google.protobuf.message import Message
from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IReactorTime
from twisted.python.failure import Failure

from node.api.methods import Method
from node.base.alarm import Alarm
from protos.service_pb2 import Event

T = TypeVar("T")

# Items that may wait to be taken; then the writer should wait.
ROOM = 5_000
# The header, or the metadata, with the place of the line after which a stream resumes.
LAST = "last-event-id"


class Inbox(Generic[T]):
    """Items that came and were not taken yet. Its one reader may cancel waiting at any time, and loses nothing.

    `close` tells the writer that no more items are wanted.
    """

    def __init__(self, reactor: IReactorTime, close: Callable[[], None] = lambda: None) -> None:
        self.close = close
        self._reactor = reactor
        self._patience = Alarm(reactor, self._wake_reader)
        self._lines: list[T] = []
        self._error: BaseException | None = None
        self._reader: Deferred[None] | None = None
        self._writer: Deferred[None] | None = None

    @property
    def full(self) -> bool:
        return len(self._lines) >= ROOM

    def put(self, lines: Iterable[T]) -> None:
        self._lines.extend(lines)
        if self._lines:
            self._wake_reader()

    def end(self, error: BaseException) -> None:
        """Put no more items. Those that are here can still be taken, then the reader gets the error."""
        if self._error is None:
            self._error = error
            self._wake_reader()

    def fail(self, failure: Failure) -> None:
        """Like `end`, as the errback of a Deferred."""
        assert failure.value is not None
        self.end(failure.value)

    def room(self) -> Deferred[None]:
        """Return a Deferred that fires when there is room. One writer waits at a time."""
        writer: Deferred[None] = Deferred()
        if self.full:
            self._writer = writer
        else:
            writer.callback(None)
        return writer

    async def take(self, wait: float | None = None) -> list[T]:
        """Take all items, or wait for the next ones; none after `wait` seconds. Raises the error at the end."""
        if not self._lines and self._error is None:
            await self._arrival(wait)
        lines, self._lines = self._lines, []
        self._wake_writer()
        if not lines and self._error is not None:
            raise self._error
        return lines

    async def _arrival(self, wait: float | None) -> None:
        self._reader = Deferred()
        if wait is not None:
            self._patience.set(wait)
        try:
            await self._reader
        finally:
            self._reader = None
            self._patience.cancel()

    def _wake_reader(self) -> None:
        reader, self._reader = self._reader, None
        if reader is not None:
            # Not at once: the reader may close the stream, while its writer is still in `put`.
            self._reactor.callLater(0, reader.callback, None)

    def _wake_writer(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.callback(None)


class Line(NamedTuple):
    """The text of a log line, and its place in the node's log; older nodes send no places."""

    text: str
    place: str = ""

    @property
    def log(self) -> str:
        """The name of the log that the place belongs to: each start of a node begins another one."""
        return self.place.partition("@")[2]


class Transport(Protocol):
    """Sends calls to one node. All methods raise `NodeError`; cancelling a call ends it on this side."""

    async def call(self, method: Method, messages: Sequence[Message]) -> bytes:
        """Call a method with one message, or with a feed of them. Returns the serialised reply."""

    async def lines(self, method: Method, last: str) -> Inbox[Line]:
        """Open a stream of log lines, from after the place `last` if the node knows places.

        The inbox ends with the error that ended the stream.
        """

    async def events(self, method: Method, request: Message) -> Inbox[Event]:
        """Open a stream of events, as above."""

    async def close(self) -> None:
        """End all connections."""
