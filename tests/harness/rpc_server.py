"""A gRPC server that stands for a core's API, in its own thread; tests call it from the reactor."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

from node.base import aio  # noqa: F401 - first: it sets gRPC's environment

# isort: split
import grpc
import grpc.aio

T = TypeVar("T")


class Loop:
    """The server's thread."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def run(self, work: Callable[[], Awaitable[T]]) -> T:
        """Run a coroutine in the server's thread, and wait for it."""

        async def whole() -> T:
            return await work()

        return asyncio.run_coroutine_threadsafe(whole(), self._loop).result(20)

    def call(self, work: Callable[[], object]) -> None:
        """Run a function in the server's thread, and wait for it."""

        async def whole() -> None:
            work()

        self.run(whole)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


@contextmanager
def serving(address: str, service: str, handlers: Mapping[str, grpc.RpcMethodHandler]) -> Iterator[Loop]:
    """Serve these methods on a unix socket or a port."""
    loop = Loop()

    async def start() -> Any:
        server = grpc.aio.server(options=[("grpc.max_receive_message_length", -1)])
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service.strip("/"), dict(handlers)),))
        server.add_insecure_port(address)
        await server.start()
        return server

    server = loop.run(start)
    try:
        yield loop
    finally:
        loop.run(lambda: server.stop(None))
        loop.close()
