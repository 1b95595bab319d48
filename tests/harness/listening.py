"""A listener to the events of a node, with the product's client; it survives lost connections."""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Any, Self

from twisted.internet.defer import Deferred

from node.base.errors import NodeError
from node.client import Client, EventStream
from protos.service_pb2 import Event
from scripts.staging import background
from scripts.staging.controller import RestController, RpcController
from scripts.staging.wait import until


class Listener:
    """Collects `events` until the end of the `with` block. The client resumes a lost stream."""

    def __init__(self, controller: RestController | RpcController, **asked: Any) -> None:
        self.events: list[Event] = []
        self.error: Exception | None = None
        self._over = threading.Event()
        self._asked = asked
        self._controller = controller

    def find(self, kind: str, behind: int = 0, timeout: float = 20.0) -> Event:
        """Wait for the first event of this kind with a sequence number over `behind`."""
        found = until(lambda: self._first(kind, behind), timeout, f"an event {kind}")
        assert found
        return found

    def _first(self, kind: str, behind: int) -> Event | None:
        return next((event for event in self.events if event.kind == kind and event.sequence > behind), None)

    @property
    def last(self) -> int:
        """The highest sequence number so far."""
        return max((event.sequence for event in self.events), default=0)

    def __enter__(self) -> Self:
        self._stream: EventStream = background.run(self._open)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        background.reactor.callFromThread(self._stream.close)
        assert self._over.wait(5), "the stream of events did not end within 5 s of its close"

    async def _open(self) -> EventStream:
        owner = self._controller._client()
        client: Client = await owner.__aenter__()
        stream = await client.events(**self._asked).open()
        Deferred.fromCoroutine(self._read(owner, stream))
        return stream

    async def _read(self, owner: Any, stream: EventStream) -> None:
        try:
            async for event in stream:
                self.events.append(event)
        except NodeError as error:
            self.error = error
        await owner.__aexit__(None, None, None)
        self._over.set()
