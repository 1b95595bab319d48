"""What is on its way from a stream to its reader, on the reactor: lines, or events."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IReactorTime
from twisted.python.failure import Failure

T = TypeVar("T")

# Lines that wait to be taken; whoever puts more is asked to wait.
ROOM = 5_000


class Inbox(Generic[T]):
    """Lines that came and were not taken yet. Its one reader may give up waiting at any time, and loses nothing by it.

    `close` tells whoever fills it that no more are wanted.
    """

    def __init__(self, reactor: IReactorTime, close: Callable[[], None] = lambda: None) -> None:
        self.close = close
        self._reactor = reactor
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
        """No more will come. What is here can still be taken, and then the reader has the error."""
        if self._error is None:
            self._error = error
            self._wake_reader()

    def fail(self, failure: Failure) -> None:
        """The same for a Deferred."""
        assert failure.value is not None
        self.end(failure.value)

    def room(self) -> Deferred[None]:
        """Fires when there is room again. One writer waits at a time."""
        writer: Deferred[None] = Deferred()
        if self.full:
            self._writer = writer
        else:
            writer.callback(None)
        return writer

    async def take(self, wait: float | None = None) -> list[T]:
        """All lines that are here, else the next ones; none if none come within `wait` seconds. Raises the error."""
        if not self._lines and self._error is None:
            await self._arrival(wait)
        lines, self._lines = self._lines, []
        self._wake_writer()
        if not lines and self._error is not None:
            raise self._error
        return lines

    async def _arrival(self, wait: float | None) -> None:
        self._reader = Deferred()
        patience = None if wait is None else self._reactor.callLater(wait, self._wake_reader)
        try:
            await self._reader
        finally:
            self._reader = None
            if patience is not None and patience.active():
                patience.cancel()

    def _wake_reader(self) -> None:
        reader, self._reader = self._reader, None
        if reader is not None:
            # Not at once: the reader may close, and so end whoever is just putting lines here.
            self._reactor.callLater(0, reader.callback, None)

    def _wake_writer(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.callback(None)
