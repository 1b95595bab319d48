"""A runner with the in-memory driver, for tests of the backend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from twisted.internet.defer import Deferred, ensureDeferred
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from drivers.pretended.scripted import MemoryDriver, MemoryGeneration
from node.backend import desired as members
from node.backend.wind_down import CALLER
from node.base.logs import LogRing
from node.contract.driver import Generation
from node.contract.generations import Generations
from protos.service_pb2 import Backend, User
from tests.harness.memory import MemoryRecord, person
from tests.harness.whole import make_runner

GRACE = 30.0
ANN, BOB, CY = person("ann", "one", "a"), person("bob", "two", "a"), person("cy", "three", "a")
WAITING = "core is not started yet"


class RunnerTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.clock = cast(Any, Clock())
        self.driver = MemoryDriver(self.clock)
        self.ring = LogRing(self.clock, 10_000)
        self.readings = self.moving = 0
        self.read: list[list[Generation]] = []
        self.record = MemoryRecord()
        self.generations = Generations()
        self.runner = make_runner(self.clock, self.ring, self.record, self.generations, lambda run: self._count(run))

    def tearDown(self) -> None:
        """Check that no core and no delayed call is left."""
        for gate in (self.driver.reading, self.driver.launching, self.driver.stopping, self.driver.applying):
            gate.open()
        closed = ensureDeferred(self.runner.close())
        self.pass_time(2 * CALLER.answer + 1)
        self.successResultOf(closed)
        self.assertEqual(self.driver.running, [])
        self.assertEqual(self.clock.getDelayedCalls(), [])

    async def _count(self, generation: Generation) -> bool:
        """A reading; the first `moving` ones find new bytes."""
        self.readings += 1
        self.assertIn(generation, self.generations.counting)
        self.read.append([generation])
        self.moving -= 1
        return self.moving >= 0

    def start(self, config: str = "a,b", *users: User, exclude: tuple[str, ...] = ()) -> Deferred[None]:
        request = Backend(config=config, users=users, exclude_inbounds=exclude)
        return ensureDeferred(self.runner.start(self.driver, request))

    def started(self, config: str = "a,b", *users: User) -> MemoryGeneration:
        """Start, which must succeed at once. Returns the core."""
        self.successResultOf(self.start(config, *users))
        return self.core

    def stop(self, grace: float = 0.0) -> Deferred[None]:
        return ensureDeferred(self.runner.stop("a controller asked for it", grace))

    def stopped(self, grace: float = 0.0) -> None:
        self.successResultOf(self.stop(grace))

    def sync_users(self, *users: User) -> Deferred[None]:
        return ensureDeferred(self.runner.users.replace(users))

    def sync_user(self, user: User) -> Deferred[None]:
        async def whole() -> None:
            touched, _ = await self.runner.users.put(user)
            await self.runner.users.settle(touched)

        return ensureDeferred(whole())

    @property
    def core(self) -> MemoryGeneration:
        [core] = self.driver.running
        return core

    def accounts(self, tag: str = "a") -> dict[str, bytes]:
        return dict(self.core.accounts[tag])

    @property
    def told(self) -> str:
        lines, _ = self.ring.read(0)
        return "\n".join(lines)

    def pass_time(self, seconds: float) -> None:
        self.clock.pump([0.0] + [0.125] * int(seconds * 8))

    def slow_pool(self) -> SlowPool:
        """Make the runner build every roster in this pool from now on."""
        self.patch(members, "BUILD_INLINE", 0)
        pool = SlowPool()
        self.clock.getThreadPool = lambda: pool
        self.clock.callFromThread = lambda call, *args: call(*args)
        return pool


class SlowPool:
    """A thread pool that does its work when the test calls `work`."""

    def __init__(self) -> None:
        self._waiting: list[Callable[[], None]] = []

    def callInThreadWithCallback(
        self, done: Callable[[bool, object], None], call: Callable[..., object], *args: object
    ) -> None:
        self._waiting.append(lambda: done(True, call(*args)))

    def work(self) -> None:
        while self._waiting:
            self._waiting.pop(0)()
