"""Periodic work: no failure ends it, and each is reported."""

from __future__ import annotations

from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.task import Clock
from twisted.logger import capturedLogs, formatEvent
from twisted.trial.unittest import SynchronousTestCase

from node.base.errors import CoreFailed
from node.base.periodic import CUT, Periodic


class PeriodicTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.clock = Clock()
        self.done = 0
        self.result: Exception | Deferred[None] | None = None
        self.task = Periodic("looking", self.work, 10, self.clock)

    def tearDown(self) -> None:
        self.task.stop()
        self.assertEqual(self.clock.getDelayedCalls(), [])
        self.flushLoggedErrors()

    def work(self) -> Deferred[None] | None:
        self.done += 1
        if isinstance(self.result, Exception):
            raise self.result
        return self.result

    def times(self, number: int) -> list[str]:
        """Return the levels that are logged while it runs this many times."""
        with capturedLogs() as logged:
            self.clock.pump([10] * number)
        return [event["log_level"].name for event in logged]

    def test_periods(self) -> None:
        """Not at once, then every ten seconds; nothing is logged."""
        self.task.start()
        self.assertEqual(self.done, 0)
        self.assertEqual(self.times(5), [])
        self.assertEqual((self.done, self.task.warnings), (5, []))

    def test_it_fails(self) -> None:
        """It is tried again; logged once for each change, with a warning until it works."""
        self.task.start()
        self.result = ValueError("a\nb")
        self.assertEqual(self.times(3), ["critical"])
        self.assertEqual(self.task.warnings, ["looking failed: ValueError: a b; the node's log has more"])
        self.result = OSError("other")
        self.assertEqual(self.times(3), ["critical"])
        self.result = None
        self.assertEqual(self.times(3), ["info"])
        self.assertEqual((self.done, self.task.warnings), (9, []))

    def test_a_core_ends_meanwhile(self) -> None:
        """An expected error is logged by its text, without a traceback."""
        self.task.start()
        self.result = CoreFailed("the core has ended")
        with capturedLogs() as logged:
            self.clock.advance(10)
        [event] = logged
        self.assertEqual(event["log_level"].name, "error")
        self.assertEqual(formatEvent(event), "looking failed; the node tries again: the core has ended")
        self.assertNotIn("log_failure", event)

    def test_any_exception(self) -> None:
        """Also of a coroutine, and a cancellation from elsewhere."""

        async def work() -> None:
            self.done += 1
            raise CancelledError

        task = Periodic("looking", work, 10, self.clock)
        task.start()
        self.times(3)
        self.assertEqual((self.done, len(task.warnings)), (3, 1))
        task.stop()

    def test_work_that_takes_its_time(self) -> None:
        """The next run waits for it; a late failure counts."""
        self.task.start()
        self.result = Deferred()
        self.assertEqual(self.times(5), [])
        self.assertEqual(self.done, 1)
        late, self.result = self.result, None
        late.errback(ValueError("late"))
        self.assertEqual(len(self.task.warnings), 1)
        self.times(2)
        self.assertEqual((self.done, self.task.warnings), (3, []))

    def test_its_end(self) -> None:
        """The run under way is cancelled, which is no failure; it may be stopped again, and started again."""
        self.task.stop()
        self.task.start()
        cancelled: list[object] = []
        self.result = Deferred(cancelled.append)
        self.times(1)
        with capturedLogs() as logged:
            self.task.stop()
            self.task.stop()
        self.assertEqual((logged, len(cancelled), self.task.warnings), ([], 1, []))
        self.result = None
        self.task.start()
        self.times(2)
        self.assertEqual(self.done, 3)

    def test_a_long_text(self) -> None:
        """A warning is one line of limited length."""
        self.task.start()
        self.result = ValueError("x" * 10 * CUT)
        self.times(1)
        self.assertLess(len(self.task.warnings[0]), 2 * CUT)
