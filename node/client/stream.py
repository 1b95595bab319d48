"""Streams of log lines and of events: they reconnect, with backoff."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from itertools import chain, count
from typing import Any, Generic, Self, TypeVar

from twisted.application.internet import backoffPolicy
from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IReactorTime
from twisted.internet.task import deferLater

from node.base.errors import NodeError
from node.base.logs import NODE_MARK, REPLAY, TOO_SLOW
from node.client.failures import NoReply, StreamEnded
from node.client.transport import Inbox, Line
from protos.service_pb2 import Event, EventsRequest

# The type that a connection reads, and the type that the stream yields.
S = TypeVar("S")
T = TypeVar("T")

# Seconds before the next attempt to connect, by its number.
_delay = backoffPolicy(initialDelay=0.1, maxDelay=10.0, factor=2.0)
# Seconds without a line after which the first lines of a new connection are complete, and seconds after which they
# count as complete in any case.
QUIET, SETTLED = 0.3, 2.0
# Begins lines that the client itself adds.
CLIENT_MARK = "[client] "
# Added where lines may be missing.
GAP = f"{CLIENT_MARK}the connection broke: lines may be missing here"


class Closed(Exception):
    """The reader has closed the stream, or it has ended as it was to."""


class Stream(Generic[S, T]):
    """An async iterator, for `async with`; or `next`, which returns all items that are there.

    If the connection breaks, the stream reconnects for up to `patience` seconds.
    """

    def __init__(self, reactor: IReactorTime, patience: float, connected: Callable[[], Awaitable[Inbox[S]]]) -> None:
        self._reactor = reactor
        self._patience = patience
        # Connects after the last item that was read.
        self._connected = connected
        self._source: Inbox[S] = Inbox(reactor)
        self._outbox: Inbox[T] = Inbox(reactor)
        self._ready: deque[T] = deque()
        self._following: Deferred[None] | None = None
        # The error that the reader got: with the next call the stream tries again.
        self._failed: NodeError | None = None

    async def open(self) -> Self:
        """Connect for the first time, without retries. Raises `NodeError`."""
        self._source = await self._connected()
        self._begin(self._follow())
        return self

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        self._following = Deferred.fromCoroutine(work)
        self._following.addErrback(self._outbox.fail)

    async def next(self, wait: float | None = None) -> list[T]:
        """Return the next items; none after `wait` seconds, or at the end.

        Raises the error of the last attempt to reconnect; another call tries again.
        """
        items = await self._arrived(wait)
        if items:
            self._took(items[-1])
        return items

    def close(self) -> None:
        """End the stream. Items that were read can still be taken."""
        self._outbox.end(Closed())
        following, self._following = self._following, None
        if following is not None:
            following.cancel()
            self._source.close()

    def _deliver(self, items: list[S]) -> None:
        """Put what was read into the outbox."""
        raise NotImplementedError

    def _took(self, item: T) -> None:
        """Note that all items up to this one were taken."""

    async def _arrived(self, wait: float | None) -> list[T]:
        if self._failed is not None:
            error, self._failed = self._failed, None
            self._outbox = Inbox(self._reactor)
            self._begin(self._again(error))
        try:
            return await self._outbox.take(wait)
        except Closed:
            return []
        except NodeError as error:
            self._failed = error
            raise

    async def _again(self, error: NodeError) -> None:
        """Reconnect and go on, after this error had ended that."""
        await self._resume(error if isinstance(error, NoReply) else NoReply(error.text))
        await self._follow()

    async def _follow(self) -> None:
        while True:
            try:
                self._deliver(await self._source.take())
            except NoReply as error:
                await self._resume(error)
            await self._outbox.room()

    async def _reconnect(self) -> None:
        """Make one attempt to reconnect. Raises `NoReply`."""
        self._source = await self._connected()

    async def _resume(self, error: NoReply) -> None:
        """Reconnect after this error. Raises the error of the last attempt after `patience` seconds."""
        self._source.close()
        end = self._reactor.seconds() + self._patience
        for number in count():
            left = end - self._reactor.seconds()
            if left <= 0:
                raise error
            await deferLater(self._reactor, min(left, _delay(number)))
            try:
                await self._reconnect()
            except NoReply as again:
                error = again
            else:
                break

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T:
        if not self._ready:
            self._ready.extend(await self._arrived(None))
        if not self._ready:
            raise StopAsyncIteration
        self._took(self._ready[0])
        return self._ready.popleft()

    async def __aenter__(self) -> Self:
        return await self.open()

    async def __aexit__(self, *_: object) -> None:
        self.close()


class EventStream(Stream[Event, Event]):
    """The events of a node after a number, then those that come: each one once, in order.

    If the connection breaks, the stream goes on after the last event that was read. `since` and `epoch` identify the
    last event that was taken, with which another stream can resume later. Events of kind `events.missed` and
    `events.lost` report events that the node no longer has.
    """

    def __init__(
        self,
        reactor: IReactorTime,
        connect: Callable[[EventsRequest], Awaitable[Inbox[Event]]],
        request: EventsRequest,
        patience: float = math.inf,
    ) -> None:
        super().__init__(reactor, patience, lambda: connect(request))
        self._request = request
        # The last event that was taken.
        self.since, self.epoch = request.since, request.epoch

    def _deliver(self, items: list[Event]) -> None:
        self._request.since, self._request.epoch = items[-1].sequence, items[-1].epoch
        self._outbox.put(items)

    def _took(self, item: Event) -> None:
        self.since, self.epoch = item.sequence, item.epoch

    async def _resume(self, error: NoReply) -> None:
        if isinstance(error, StreamEnded) and not self._request.follow:
            raise Closed
        await super()._resume(error)


class LogStream(Stream[Line, str]):
    """The node's log lines, in order: those that it sends a new reader, then those that come.

    If the connection breaks, the stream goes on after the last line that was read. The node sends the place of each
    line, so that no line is missing, and none comes twice. If more lines came meanwhile than the node keeps, a line
    says how many are lost; lines that it had not sent when it ended are lost, too: `GAP` marks that.

    Older nodes, and all nodes in the deployed dialect, send no places. Then the first lines of a new connection, the
    newest REPLAY lines of the ring, are matched with the lines that were read last. This has limits:

    - If more than REPLAY lines came meanwhile, those before the newest REPLAY are lost. `GAP` marks that.
    - If identical lines repeat, one may be taken for another, and be missing or come twice. Lines of cores have a
      time stamp; those of the node itself do not.
    - After a reconnect, the first lines may come SETTLED seconds late.
    """

    def __init__(
        self, reactor: IReactorTime, connect: Callable[[str], Awaitable[Inbox[Line]]], patience: float = math.inf
    ) -> None:
        super().__init__(reactor, patience, lambda: connect(self._last.place))
        # The last line that was read.
        self._last = Line("")
        self._seen: deque[str] = deque(maxlen=REPLAY)

    async def _reconnect(self) -> None:
        await super()._reconnect()
        if not self._last.place:
            try:
                self._go_on(await self._beginning())
            except NoReply:
                self._source.close()
                raise

    async def _beginning(self) -> list[Line]:
        """Read the first lines of a new connection, or more."""
        lines: list[Line] = []
        end = self._reactor.seconds() + SETTLED
        while len(lines) < REPLAY and self._reactor.seconds() < end and (more := await self._source.take(QUIET)):
            lines += more
        return lines

    def _go_on(self, lines: list[Line]) -> None:
        known = overlap(list(self._seen), [line.text for line in lines[:REPLAY]])
        if known is None:
            self._seen.clear()
        self._put(lines[known or 0 :], [GAP] if known is None else [])

    def _deliver(self, items: list[Line]) -> None:
        self._put(items, [] if items[0].log == self._last.log or not self._last.log else [GAP])

    def _put(self, lines: list[Line], before: Sequence[str]) -> None:
        for text, _ in lines:
            if text.startswith(NODE_MARK) and text.endswith(TOO_SLOW):
                self._seen.clear()  # lines are missing here, so the earlier ones do not precede the next
            else:
                self._seen.append(text)
        self._last = lines[-1] if lines else self._last
        self._outbox.put([*before, *(text for text, _ in lines)])


def overlap(seen: Sequence[str], beginning: Sequence[str]) -> int | None:
    """Count the lines at the beginning of a new stream that were read before; None if the last ones are not there.

    The longest overlap counts; if all of `seen` occurs more than once, the first occurrence.
    """
    size = len(seen)
    whole = (end for end in range(size, len(beginning) + 1) if beginning[end - size : end] == seen)
    parts = (end for end in range(min(size, len(beginning)), 0, -1) if beginning[:end] == seen[size - end :])
    return next(chain(whole, parts), None)
