"""The asyncio thread in which gRPC runs, and the calls between it and the reactor's thread.

`run` is called from the reactor, `call` and `tell` from asyncio. `run` and `call` carry results, errors and
cancellation. No other module of the node crosses between these threads.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import CancelledError as FutureCancelled
from typing import Any, TypeVar

# Before any import of grpc: its fork handlers kill the children that Twisted spawns while gRPC's threads run.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
# Otherwise gRPC logs every handshake that a client breaks off, and headers that it cannot read.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
# gRPC's newer event engine passes data between threads: a call on a unix socket takes a tenth more processor time.
os.environ.setdefault(
    "GRPC_EXPERIMENTS", "-event_engine_client,-event_engine_listener,-event_engine_for_all_other_endpoints"
)

from twisted.internet.defer import CancelledError, Deferred, ensureDeferred
from twisted.internet.interfaces import IReactorFromThreads
from twisted.python.failure import Failure

from node.base.part import Part

T = TypeVar("T")


class Aio(Part):
    """One thread with an asyncio loop, started and stopped with the service."""

    title = "the asyncio thread"

    def __init__(self, reactor: IReactorFromThreads) -> None:
        self._reactor = reactor
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    @property
    def running(self) -> bool:
        """Whether the thread runs."""
        return self._loop is not None

    def start(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._main, args=(self._loop,), name="aio", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        loop, thread = self._loop, self._thread
        self._loop = self._thread = None
        if loop is not None and thread is not None:
            loop.call_soon_threadsafe(loop.stop)
            thread.join()

    @staticmethod
    def _main(loop: asyncio.AbstractEventLoop) -> None:
        asyncio.set_event_loop(loop)
        loop.run_forever()
        left = asyncio.all_tasks(loop)
        for task in left:
            task.cancel()
        loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()

    def run(self, coro: Coroutine[Any, Any, T]) -> Deferred[T]:
        """Run an asyncio coroutine from the reactor. Cancelling the Deferred cancels the coroutine."""
        if self._loop is None:
            coro.close()
            raise RuntimeError("the asyncio thread is not running")
        future = asyncio.run_coroutine_threadsafe(coro, self._loop)

        def cancel(_: Deferred[T]) -> None:
            future.cancel()

        result: Deferred[T] = Deferred(cancel)

        def settle() -> None:
            if result.called:
                return
            try:
                result.callback(future.result())
            except FutureCancelled:
                result.errback(CancelledError())
            except Exception:  # noqa: BLE001 - the caller who awaits the result handles it
                result.errback(Failure())

        future.add_done_callback(lambda _: self._reactor.callFromThread(settle))
        return result

    def block(self, coro: Coroutine[Any, Any, T], seconds: float) -> T:
        """Run an asyncio coroutine and block until it ends: only before the reactor runs. Raises `TimeoutError`."""
        assert self._loop is not None
        return asyncio.run_coroutine_threadsafe(coro, self._loop).result(seconds)

    def tell(self, function: Callable[..., None], *args: Any) -> None:
        """Call a function on the reactor from asyncio, without a result. Later calls, by `call` too, run after it."""
        self._reactor.callFromThread(function, *args)

    async def call(self, function: Callable[..., Awaitable[T]], *args: Any) -> T:
        """Call a coroutine function on the reactor from asyncio. Cancelling the task cancels its Deferred."""
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        running: list[Deferred[T]] = []

        def stop() -> None:
            for deferred in running:
                deferred.cancel()

        self._reactor.callFromThread(_start, future, running, function, args)
        try:
            return await future
        except asyncio.CancelledError:
            self._reactor.callFromThread(stop)
            raise

    async def outlast(self, function: Callable[..., Awaitable[T]], *args: Any) -> T:
        """Like `call`, but the function runs to its end when the task is cancelled; its outcome is then dropped."""
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._reactor.callFromThread(_start, future, [], function, args)
        return await future


def _start(
    future: asyncio.Future[T], running: list[Deferred[T]], function: Callable[..., Awaitable[T]], args: tuple[Any, ...]
) -> None:
    """On the reactor: call the function, and pass its outcome to the future."""
    loop = future.get_loop()

    def back(outcome: T | Failure) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(_resolve, future, outcome)

    running.append(ensureDeferred(function(*args)))  # type: ignore[arg-type]
    running[0].addBoth(back)


def _resolve(future: asyncio.Future[T], outcome: T | Failure) -> None:
    if future.done():
        return
    if not isinstance(outcome, Failure):
        future.set_result(outcome)
    elif outcome.check(CancelledError):
        future.cancel()
    elif outcome.value is not None:
        future.set_exception(outcome.value)
