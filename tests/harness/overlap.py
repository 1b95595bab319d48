"""A backend on the in-memory driver whose runs share their ports, for tests of overlapping runs."""

from __future__ import annotations

from typing import Any, cast

from twisted.internet.defer import Deferred, ensureDeferred
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from drivers.pretended.scripted import SharedGeneration, SharingDriver
from node.backend import drain
from node.backend.options import BackendOptions
from node.base.logs import LogRing
from node.contract.driver import Generation
from node.contract.generations import Generations
from protos.service_pb2 import Backend, User
from tests.harness.memory import MemoryRecord, person
from tests.harness.whole import make_runner

GRACE = 30.0
ANN, BOB, CY = person("ann", "one", "a"), person("bob", "two", "a"), person("cy", "three", "a")


class OverlapTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.clock = cast(Any, Clock())
        self.driver = SharingDriver(self.clock)
        self.ring, self.generations, self.record = LogRing(self.clock, 1000), Generations(), MemoryRecord()
        limits = BackendOptions(drain_timeout=60.0, drain_generations=2)
        self.runner = make_runner(self.clock, self.ring, self.record, self.generations, self.read, limits)
        self.patch(drain, "available", lambda: 1 << 40)

    def tearDown(self) -> None:
        for gate in (self.driver.launching, self.driver.stopping, self.driver.proving):
            gate.open()
        closed = ensureDeferred(self.runner.close())
        self.pass_time(3)
        self.successResultOf(closed)
        self.assertEqual((self.driver.running, self.clock.getDelayedCalls()), ([], []))

    async def read(self, _: Generation) -> bool:
        return False

    def start(self, config: str, *users: User) -> Deferred[None]:
        return ensureDeferred(self.runner.start(self.driver, Backend(config=config, users=users)))

    def started(self, config: str, *users: User) -> SharedGeneration:
        self.successResultOf(self.start(config, *users))
        return self.current

    def remove(self, name: str) -> Deferred[None]:
        return ensureDeferred(self.runner.users.update([User(email=name)]))

    def sync(self, *users: User) -> Deferred[None]:
        return ensureDeferred(self.runner.users.replace(users))

    def pass_time(self, seconds: float) -> None:
        self.clock.pump([0.0] + [0.125] * int(seconds * 8))

    @property
    def current(self) -> SharedGeneration:
        assert isinstance(self.generations.current, SharedGeneration)
        return self.generations.current

    def names(self, run: Generation) -> set[str]:
        return {key for accounts in run.accounts.values() for key in accounts}

    @property
    def state(self) -> tuple[str, str]:
        return str(self.runner.status.state), self.runner.status.reason
