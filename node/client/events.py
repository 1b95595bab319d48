"""A stream of events that reconnects."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from typing import Self

from twisted.internet.interfaces import IReactorTime

from node.client.failures import NoReply, StreamEnded
from node.client.inbox import Inbox
from node.client.stream import Stream
from protos.service_pb2 import Event, EventsRequest


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
        super().__init__(reactor, connect, patience)
        self._request = request
        # The last event that was taken.
        self.since, self.epoch = request.since, request.epoch
        self._closed = False

    async def open(self) -> Self:
        """Connect for the first time, without retries. Raises `NodeError`."""
        self._source = await self._connect(self._request)
        return self

    def close(self) -> None:
        """End the stream."""
        self._closed = True
        self._source.end(StreamEnded())
        self._source.close()

    async def _arrived(self, wait: float | None) -> list[Event]:
        while not self._closed:
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

    def _took(self, item: Event) -> None:
        self.since, self.epoch = item.sequence, item.epoch

    async def _reconnect(self) -> None:
        if not self._closed:
            self._source = await self._connect(self._request)
        if self._closed:
            self._source.close()
