"""A stream of events that reconnects."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from types import TracebackType
from typing import Self

from twisted.internet.interfaces import IReactorTime

from node.client.again import until_done
from node.client.failures import NoReply, StreamEnded
from node.client.inbox import Inbox
from protos.service_pb2 import Event, EventsRequest


class EventStream:
    """The events of a node after a number, then those that come: each one once, in order.

    An async iterator, for `async with`; or `next`, which returns all that are there. If the connection breaks, the
    stream reconnects for up to `patience` seconds, and goes on after the last event that was taken. `since` and `epoch`
    identify that event, with which another stream can resume later. Events of kind `events.missed` and `events.lost`
    report events that the node no longer has.
    """

    def __init__(
        self,
        reactor: IReactorTime,
        connect: Callable[[EventsRequest], Awaitable[Inbox[Event]]],
        request: EventsRequest,
        patience: float = math.inf,
    ) -> None:
        self._reactor = reactor
        self._connect = connect
        self._request = request
        self._patience = patience
        # The last event that was taken.
        self.since, self.epoch = request.since, request.epoch
        self._ready: deque[Event] = deque()
        self._source: Inbox[Event] | None = None
        self._closed = False

    async def open(self) -> Self:
        """Connect for the first time, without retries. Raises `NodeError`."""
        self._source = await self._connect(self._request)
        return self

    async def next(self, wait: float | None = None) -> Sequence[Event]:
        """Return the next events; none after `wait` seconds, or at the end. Raises the error that ended the stream."""
        events = await self._arrived(wait)
        if events:
            self._took(events[-1])
        return events

    def close(self) -> None:
        """End the stream."""
        self._closed = True
        if self._source is not None:
            self._source.end(StreamEnded())
            self._source.close()

    async def _arrived(self, wait: float | None) -> list[Event]:
        while self._source is not None and not self._closed:
            try:
                events = await self._source.take(wait)
            except NoReply as error:
                if isinstance(error, StreamEnded) and not self._request.follow:
                    self._closed = True
                elif not self._closed:
                    await self._resume(error)
                continue
            if events:
                self._request.since, self._request.epoch = events[-1].sequence, events[-1].epoch
            return events
        return []

    def _took(self, event: Event) -> None:
        self.since, self.epoch = event.sequence, event.epoch

    async def _resume(self, error: NoReply) -> None:
        """Reconnect. Raises the error of the last attempt after `patience` seconds."""
        assert self._source is not None
        self._source.close()
        await until_done(self._reactor, self._reconnect, self._patience, error)
        if self._closed:
            self._source.close()

    async def _reconnect(self) -> None:
        if not self._closed:
            self._source = await self._connect(self._request)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Event:
        while not self._ready:
            self._ready.extend(await self._arrived(None))
            if not self._ready and self._closed:
                raise StopAsyncIteration
        self._took(self._ready[0])
        return self._ready.popleft()

    async def __aenter__(self) -> Self:
        return await self.open()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
