"""Traffic from a stream of connections that omits most events, as on a busy machine."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
from twisted.internet.task import deferLater

from drivers.sing_box.api import DAEMON, Api
from drivers.sing_box.config import ApiAddress
from drivers.sing_box.table import Detours
from drivers.sing_box.tally import CLOSED
from protos.sing_box_pb2 import Connection, ConnectionEvent, ConnectionEvents, Status, Subscription
from scripts.staging import background
from scripts.staging.ports import free_port
from tests.harness.rpc_server import Loop, serving

# Ended connections that the core lists, and what each carries.
REMEMBERED, EACH = 300, 100
USER = "user>>>a>>>traffic>>>uplink"


class Daemon:
    """Like sing-box's: a subscriber receives all open connections and the last that ended, then events.

    But of all that happens it tells `told` of a hundred.
    """

    def __init__(self, told: int) -> None:
        self.ended: deque[str] = deque(maxlen=REMEMBERED)
        self.count = self.lists = 0
        self._told = told
        self._queues: set[asyncio.Queue[ConnectionEvent]] = set()

    def end(self, count: int) -> None:
        """Begin this many connections, count their bytes, and end them."""
        for _ in range(count):
            self.count += 1
            self.ended.append(str(self.count))
            if self.count % 100 < self._told:
                for queue in self._queues:
                    queue.put_nowait(_event(str(self.count), CLOSED))

    async def connections(self, _: Subscription, __: Any) -> AsyncIterator[ConnectionEvents]:
        queue: asyncio.Queue[ConnectionEvent] = asyncio.Queue()
        self._queues.add(queue)
        self.lists += 1
        try:
            yield ConnectionEvents(events=[_event(id, 0) for id in self.ended], reset=True)
            while True:
                yield ConnectionEvents(events=[await queue.get()])
        finally:
            self._queues.discard(queue)

    async def status(self, _: Subscription, __: Any) -> AsyncIterator[Status]:
        yield Status(uplink_total=EACH * self.count)


def _event(id: str, type: int) -> ConnectionEvent:
    connection = Connection(id=id, user="a", inbound="in", uplink_total=EACH, closed_at=1)
    return ConnectionEvent(id=id, type=type, connection=connection)


def with_daemon(told: int, scenario: Callable[[Daemon, Api, Loop], Awaitable[None]]) -> None:
    daemon, port = Daemon(told), free_port()
    streams = {"SubscribeConnections": daemon.connections, "SubscribeStatus": daemon.status}
    handlers = {
        name: grpc.unary_stream_rpc_method_handler(
            handler,
            request_deserializer=Subscription.FromString,
            response_serializer=lambda message: message.SerializeToString(),
        )
        for name, handler in streams.items()
    }

    async def main(loop: Loop) -> None:
        api = Api(background.reactor, ApiAddress(port, "secret"), [], Detours({}))
        try:
            api.begin()
            await scenario(daemon, api, loop)
        finally:
            await api.close()

    with serving(f"127.0.0.1:{port}", DAEMON, handlers) as loop:
        background.run(lambda: main(loop))


def test_lists_make_up_for_omitted_events() -> None:
    """Far more connections end than the core remembers: the node lists them before it forgets them."""

    async def scenario(daemon: Daemon, api: Api, loop: Loop) -> None:
        for _ in range(10):
            lists = daemon.lists
            loop.call(lambda: daemon.end(250))
            deadline = background.reactor.seconds() + 5
            while daemon.lists == lists:
                assert background.reactor.seconds() < deadline
                await deferLater(background.reactor, 0.01)
        counters, lacking = await api.counters()
        assert (counters[USER], lacking) == (EACH * daemon.count, 0)

    with_daemon(50, scenario)


def test_lost_bytes_are_reported() -> None:
    """More connections end at once than the core remembers: the node knows how many bytes it lacks."""

    async def scenario(daemon: Daemon, api: Api, loop: Loop) -> None:
        loop.call(lambda: daemon.end(REMEMBERED + 70))
        counters, lacking = await api.counters()
        assert (counters[USER], lacking) == (EACH * REMEMBERED, EACH * 70)

    with_daemon(0, scenario)
