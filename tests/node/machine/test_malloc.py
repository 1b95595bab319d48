"""Memory is returned to the system after a large set of users, once for all requests in that time."""

from __future__ import annotations

from typing import Any, cast

from twisted.internet.task import Clock
from twisted.python.threadpool import ThreadPool
from twisted.trial.unittest import SynchronousTestCase

from drivers.pretended.scripted import MemoryPlan
from node.backend import desired as members
from node.backend.desired import Desired
from node.backend.roster import Roster
from node.machine.malloc import SOON, Memory
from tests.harness.memory import MemoryRecord, person


class PoolClock(Clock):
    """A reactor whose pool does its work at once."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = NoThreads()

    def getThreadPool(self) -> NoThreads:
        return self.pool

    def callFromThread(self, function: object, *args: object) -> None:
        assert callable(function)
        function(*args)


class NoThreads(ThreadPool):
    def callInThreadWithCallback(self, onResult, func, *args, **kw) -> None:  # type: ignore[no-untyped-def]  # noqa: N803
        onResult(True, func(*args, **kw))


class GivingBack(SynchronousTestCase):
    def setUp(self) -> None:
        self.clock = cast(Any, PoolClock())
        self.asked: list[int] = []

    def memory(self, able: bool = True) -> Memory:
        memory = Memory(self.clock)
        self.patch(memory, "_trim", self.asked.append if able else None)
        return memory

    def test_once_for_all(self) -> None:
        """Several requests cause one call, some time after the first."""
        memory = self.memory()
        for _ in range(3):
            memory.give_back_soon()
            self.clock.advance(SOON / 4)
        self.assertEqual(self.asked, [])
        self.clock.advance(SOON / 4)
        self.assertEqual(self.asked, [0])
        self.clock.advance(10 * SOON)
        self.assertEqual(self.asked, [0])

    def test_again(self) -> None:
        """A later request causes another call."""
        memory = self.memory()
        for _ in range(2):
            memory.give_back_soon()
            self.clock.advance(SOON)
        self.assertEqual(self.asked, [0, 0])

    def test_a_library_that_cannot(self) -> None:
        """If the C library has no such function nothing is done."""
        self.memory(able=False).give_back_soon()
        self.assertEqual(self.clock.getDelayedCalls(), [])

    def test_the_real_one(self) -> None:
        """The function of the C library can be called."""
        memory = Memory(self.clock)
        memory.give_back_soon()
        self.clock.advance(SOON)
        self.assertEqual(self.flushLoggedErrors(), [])

    def test_large_sets_alone(self) -> None:
        """A large set of users requests it when it comes and when it goes, a small one does not."""
        self.patch(members, "BUILD_INLINE", 2)
        everybody = Desired(self.clock, cast(Any, MemoryRecord()))
        self.patch(everybody._memory, "_trim", self.asked.append)
        for size, asked in ((2, 0), (3, 1), (3, 2), (0, 3), (0, 3)):
            everybody._install(roster(size))
            self.clock.advance(SOON)
            self.assertEqual(len(self.asked), asked)


def roster(size: int) -> Roster:
    plan = MemoryPlan("", ("a",))
    return Roster.of([person(f"{number}", f"{number}", "a") for number in range(size)], plan.tags, plan.account)[0]
