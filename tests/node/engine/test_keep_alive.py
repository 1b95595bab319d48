"""The keep-alive of a backend: how long it goes on without calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from twisted.internet.defer import Deferred, ensureDeferred
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from drivers.pretended.scripted import MemoryDriver
from node.api.auth import Dialect
from node.api.calls import Call
from node.api.methods import METHODS
from node.base.errors import CoreFailed
from node.base.logs import LogRing
from node.contract.saved import Changes, Saved
from node.engine.keep_alive import Countdown
from protos import service_pb2
from protos.service_pb2 import XRAY, Empty
from tests.harness.memory import MemoryRecord
from tests.harness.whole import Whole


class CountdownTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.clock = Clock()
        self.told: list[str] = []
        self.keep_alive = Countdown(self.clock, self.told.append)

    def test_it_expires_once(self) -> None:
        """It expires after its time, and not again until a controller calls."""
        self.keep_alive.set(10)
        self.clock.advance(9)
        self.assertEqual((self.told, self.keep_alive.left), ([], 1))
        self.clock.advance(100)
        self.assertEqual((self.told, self.keep_alive.left), (["no controller has called for 10 s"], None))
        self.keep_alive.touch()
        self.clock.advance(10)
        self.assertEqual(len(self.told), 2)

    def test_each_call_counts(self) -> None:
        """A call in time resets it."""
        self.keep_alive.set(10)
        for _ in range(5):
            self.clock.advance(9)
            self.keep_alive.touch()
        self.assertEqual((self.told, self.keep_alive.left), ([], 10))

    def test_never(self) -> None:
        """0 is without end, and nothing expires after a stop."""
        self.keep_alive.set(0)
        self.keep_alive.touch()
        self.assertEqual((self.keep_alive.left, self.clock.getDelayedCalls()), (None, []))
        self.keep_alive.set(10)
        self.keep_alive.stop()
        self.keep_alive.touch()
        self.assertEqual((self.keep_alive.seconds, self.clock.getDelayedCalls()), (0, []))

    def test_what_was_left(self) -> None:
        """It continues with the remaining time, never with more; the next call gives all of it again."""
        self.keep_alive.set(10, 3)
        self.assertEqual(self.keep_alive.left, 3)
        self.keep_alive.touch()
        self.assertEqual(self.keep_alive.left, 10)
        self.keep_alive.set(10, 99)
        self.assertEqual(self.keep_alive.left, 10)

    def test_nothing_is_left(self) -> None:
        """A negative rest, from a node that was too busy to check the time, counts as none."""
        self.keep_alive.set(10, -3)
        self.assertEqual(self.keep_alive.left, 0)
        self.clock.rightNow += 5
        self.assertEqual(self.keep_alive.left, 0)
        self.clock.advance(0)
        self.assertEqual(len(self.told), 1)


class Kept(MemoryRecord):
    """A state file in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.warnings: list[str] = []
        self.everything: Callable[[], Changes] = Changes

        self.left: float | None = None

    def accept(self, request: bytes, routing: bytes = b"") -> None:
        """A backend that runs has all of its keep-alive."""
        super().accept(request, routing)
        self.left = None

    def keep_alive(self, left: float) -> None:
        """What the next node would have left."""
        self.left = left

    def totals(self, rows: object) -> None:
        pass

    def rows(self, rows: object) -> None:
        """There is no traffic."""

    def days(self, records: object) -> None:
        """The bill is not kept."""


class BackendTests(SynchronousTestCase):
    """Each backend ends when its own keep-alive is over, however it came to run."""

    def setUp(self) -> None:
        self.clock = cast(Any, Clock())
        self.driver = MemoryDriver(self.clock)
        self.kept = Kept()
        store, ring = cast(Any, self.kept), LogRing(self.clock, 1000)
        self.backend = Whole(self.clock, ring, {XRAY: self.driver}, store)
        self.call = Call(next(method for method in METHODS if method.name == "Start"), Dialect.DOCUMENT)
        self.saved = Saved()

    def tearDown(self) -> None:
        self.driver.launching.open()
        ensureDeferred(self.backend.close())
        self.clock.pump([1] * 30)
        self.assertEqual(self.clock.getDelayedCalls(), [])

    def start(self, config: str, keep_alive: int) -> Deferred[Any]:
        request = service_pb2.Backend(type=XRAY, config=config, keep_alive=keep_alive)
        return ensureDeferred(self.backend.start(request, self.call))

    def begin(self, keep_alive: int = 0, left: float | None = None) -> None:
        """A node starts; the backend before it had this much of its keep-alive left."""
        request = service_pb2.Backend(type=XRAY, config="a", keep_alive=keep_alive).SerializeToString()
        self.backend.begin(Saved(request if keep_alive else b"", left))

    def lives(self, seconds: float) -> None:
        """Have cores live for so long from now on, and then start no more."""
        self.clock.pump([0.25] * int(4 * seconds - 1))
        self.assertEqual(len(self.driver.running), 1)
        self.clock.pump([0.25, 0, 0])
        self.assertEqual(self.driver.running, [])

    def test_after_a_resume(self) -> None:
        """The remaining time goes on when the core is back, at once or after some retries."""
        for faults in (0, 2):
            self.driver.faults = [CoreFailed("no")] * faults
            self.begin(10, 4)
            self.clock.pump([0] + [0.25] * 4 * (faults - 1))
            self.lives(4)
            self.tearDown()
            self.setUp()
        self.begin()

    def test_a_node_that_dies_after_a_resume(self) -> None:
        """The next node has no more time than this one had: no controller has called."""
        self.begin(10, 4)
        self.clock.advance(0)
        self.assertEqual(self.kept.left, 4)
        self.lives(4)

    def test_a_controller_called_meanwhile(self) -> None:
        """A controller that called before the core was back has given it all of its time."""
        self.driver.faults = [CoreFailed("no")] * 2
        self.begin(10, 4)
        self.backend.touch()
        self.clock.pump([0, 0, 1])
        self.lives(10)

    def test_nothing_was_left(self) -> None:
        """It expires at once."""
        self.begin(10, -0.25)
        self.clock.advance(0)
        self.assertEqual(self.driver.running, [])

    def test_after_a_failed_start(self) -> None:
        """A backend that runs again, at once or after some retries, has all of its time: a controller has called."""
        self.begin()
        for faults in (1, 3):
            self.successResultOf(self.start("a", 10))
            self.clock.advance(5)
            self.driver.faults = [CoreFailed("no")] * faults
            self.failureResultOf(self.start("b", 0), CoreFailed)
            self.clock.pump([0, 0, 1] if faults > 1 else [0])
            self.lives(9 if faults > 1 else 10)

    def test_after_an_unforeseen_fault(self) -> None:
        """The same after an internal error."""
        self.begin()
        self.successResultOf(self.start("a", 10))
        self.driver.prepare = None  # type: ignore[assignment, method-assign]
        self.failureResultOf(self.start("b", 0), TypeError)
        self.lives(10)

    def test_while_starts_are_under_way(self) -> None:
        """Nothing expires meanwhile, even if one of them has ended; afterwards the newest backend's time counts."""
        self.begin()
        first = self.start("a", 1)
        self.driver.launching.shut = True
        second = self.start("b", 10)
        self.successResultOf(first)
        self.clock.pump([0.25] * 20)
        self.driver.launching.open()
        self.successResultOf(second)
        self.lives(10)

    def test_after_a_stop(self) -> None:
        """There is no keep-alive then, whatever fails, and nothing is stopped later."""
        self.begin()
        self.successResultOf(self.start("a", 10))
        self.successResultOf(ensureDeferred(self.backend.stop(Empty(), self.call)))
        self.driver.faults = [CoreFailed("no")]
        self.failureResultOf(self.start("b", 10), CoreFailed)
        self.successResultOf(self.start("c", 0))
        self.backend.touch()
        self.clock.pump([1] * 60)
        self.assertEqual(len(self.driver.running), 1)
