"""The bridge between the reactor and asyncio: results, errors and cancellation, both ways, each on its own thread."""

from __future__ import annotations

import asyncio
import os
import threading
from typing import Any

from twisted.internet import reactor
from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.task import deferLater
from twisted.trial.unittest import TestCase

from node.base.aio import Aio


class AioTests(TestCase):
    timeout = 10

    def setUp(self) -> None:
        self.aio = Aio(reactor)  # type: ignore[arg-type]
        self.aio.start()
        self.addCleanup(self.stop)

    def stop(self) -> None:
        if self.aio.running:
            self.aio.stop()

    async def test_run_gives_the_result(self) -> None:
        """An asyncio coroutine runs on its own thread, and the reactor gets its result."""

        async def work() -> str:
            await asyncio.sleep(0)
            return threading.current_thread().name

        self.assertEqual(await self.aio.run(work()), "aio")

    async def test_run_gives_the_error(self) -> None:
        """An exception of the coroutine is raised on the reactor."""

        async def work() -> None:
            raise KeyError("x")

        with self.assertRaises(KeyError):
            await self.aio.run(work())

    async def test_results_arrive_on_the_reactor(self) -> None:
        """Callbacks of `run` are called on the reactor's thread."""
        thread = await self.aio.run(asyncio.sleep(0)).addCallback(lambda _: threading.current_thread())
        self.assertIs(thread, threading.main_thread())

    async def test_cancelling_run_cancels_the_coroutine(self) -> None:
        """Cancelling the Deferred cancels the coroutine, which can clean up."""
        begun, cancelled = threading.Event(), threading.Event()

        async def work() -> None:
            begun.set()
            try:
                await asyncio.Event().wait()
            finally:
                cancelled.set()

        running = self.aio.run(work())
        await until(begun.is_set)
        running.cancel()
        with self.assertRaises(CancelledError):
            await running
        await until(cancelled.is_set)

    async def test_a_coroutine_that_cancels_itself(self) -> None:
        """A coroutine that ends by cancellation is a cancelled Deferred."""

        async def work() -> None:
            raise asyncio.CancelledError

        with self.assertRaises(CancelledError):
            await self.aio.run(work())

    async def test_call_gives_the_result(self) -> None:
        """A coroutine function runs on the reactor's thread, and asyncio gets its result."""

        async def on_reactor(number: int) -> tuple[int, bool]:
            await deferLater(reactor, 0)
            return number + 1, threading.current_thread() is threading.main_thread()

        self.assertEqual(await self.aio.run(self.aio.call(on_reactor, 1)), (2, True))

    async def test_call_gives_the_error(self) -> None:
        """Its exception is raised in asyncio, before and after its first wait."""

        async def on_reactor(wait: bool) -> None:
            if wait:
                await deferLater(reactor, 0)
            raise KeyError("x")

        for wait in (False, True):
            with self.assertRaises(KeyError):
                await self.aio.run(self.aio.call(on_reactor, wait))

    async def test_cancelling_the_task_cancels_the_deferred(self) -> None:
        """Cancelling the waiting asyncio task cancels the work on the reactor."""
        events: list[str] = []

        async def on_reactor() -> None:
            events.append("begun")
            try:
                await Deferred()
            except CancelledError:
                events.append("cancelled")
                raise

        running = self.aio.run(self.aio.call(on_reactor))
        await until(lambda: events)
        running.cancel()
        with self.assertRaises(CancelledError):
            await running
        await until(lambda: events == ["begun", "cancelled"])

    async def test_a_cancelled_deferred_cancels_the_task(self) -> None:
        """A call that ends by cancellation on the reactor is a cancelled task in asyncio."""

        async def on_reactor() -> None:
            raise CancelledError

        async def work() -> str:
            try:
                await self.aio.call(on_reactor)
            except asyncio.CancelledError:
                return "cancelled"
            return "not cancelled"

        self.assertEqual(await self.aio.run(work()), "cancelled")

    async def test_many_at_once(self) -> None:
        """Calls in both directions at once do not disturb each other."""

        async def on_reactor(number: int) -> int:
            await deferLater(reactor, 0)
            return number

        async def work() -> list[int]:
            return await asyncio.gather(*(self.aio.call(on_reactor, number) for number in range(500)))

        self.assertEqual(await self.aio.run(work()), list(range(500)))

    async def test_open_calls_are_cancelled_at_the_end(self) -> None:
        """When the thread ends, waiting callers are cancelled, and coroutines can clean up."""
        ended: list[str] = []

        async def work() -> None:
            try:
                await asyncio.Event().wait()
            finally:
                ended.append("cleaned up")

        running = self.aio.run(work())
        await self.aio.run(asyncio.sleep(0))
        self.aio.stop()
        self.assertEqual(ended, ["cleaned up"])
        with self.assertRaises(CancelledError):
            await running

    async def test_after_the_end(self) -> None:
        """Without its thread no call is accepted, and no coroutine is left that was never awaited."""
        self.aio.stop()
        work: Any = asyncio.sleep(0)
        with self.assertRaises(RuntimeError):
            self.aio.run(work)
        self.assertIsNone(work.cr_frame)
        self.aio.start()
        self.assertIsNone(await self.aio.run(asyncio.sleep(0)))

    def test_block(self) -> None:
        """Before the reactor runs, `block` returns a coroutine's result, raises its error, or times out."""

        async def work(fault: Exception | None) -> str:
            if fault:
                raise fault
            return "done"

        self.assertEqual(self.aio.block(work(None), 5), "done")
        with self.assertRaises(KeyError):
            self.aio.block(work(KeyError("x")), 5)
        with self.assertRaises(TimeoutError):
            self.aio.block(asyncio.sleep(60), 0.01)

    def test_grpc_leaves_forks_alone(self) -> None:
        """gRPC's fork handlers are off before it is imported: they would kill what Twisted spawns."""
        self.assertEqual(os.environ["GRPC_ENABLE_FORK_SUPPORT"], "0")


async def until(condition: Any) -> None:
    """Wait for the condition on the reactor; the test's own time limit ends it."""
    while not condition():
        await deferLater(reactor, 0.002)
