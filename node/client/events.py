"""A stream of events that reconnects."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable

from twisted.internet.interfaces import IReactorTime

from node.client.failures import NoReply, StreamEnded
from node.client.inbox import Inbox
from node.client.stream import Closed, Stream
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
        super().__init__(reactor, patience)
        self._connect = connect
        self._request = request
        # The last event that was taken.
        self.since, self.epoch = request.since, request.epoch

    async def _connected(self) -> Inbox[Event]:
        return await self._connect(self._request)

    def _deliver(self, items: list[Event]) -> None:
        self._request.since, self._request.epoch = items[-1].sequence, items[-1].epoch
        self._outbox.put(items)

    def _took(self, item: Event) -> None:
        self.since, self.epoch = item.sequence, item.epoch

    async def _resume(self, error: NoReply) -> None:
        if isinstance(error, StreamEnded) and not self._request.follow:
            raise Closed
        await super()._resume(error)
