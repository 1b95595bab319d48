"""Backoff of restarts: at once, then later and later, and at once again after the core served for a while."""

from __future__ import annotations

from itertools import islice

from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from node.backend.backoff import LONGEST, STEADY, Backoff, delays


def test_delays() -> None:
    """0, 1, 2, 4, 8, 16 and 30 s, and then 30 s without end."""
    assert list(islice(delays(), 9)) == [0, 1, 2, 4, 8, 16, 30, 30, 30]
    assert next(islice(delays(), 1000, None)) == LONGEST


class BackoffTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.clock = Clock()
        self.clock.advance(1_000_000)
        self.tries: list[float] = []
        self.backoff = Backoff(self.clock)

    def later(self) -> None:
        self.backoff.later(lambda: self.tries.append(self.clock.seconds()))

    def waited(self) -> float:
        """Seconds until the next retry."""
        self.later()
        before, known = self.clock.seconds(), len(self.tries)
        self.clock.pump([0] + [0.25] * 200)
        self.assertEqual(len(self.tries), known + 1)
        self.clock.rightNow = self.tries[-1]
        return self.tries[-1] - before

    def test_later_and_later(self) -> None:
        """Each failed try is followed by a longer wait."""
        self.assertEqual([self.waited() for _ in range(8)], [0, 1, 2, 4, 8, 16, 30, 30])

    def test_steady(self) -> None:
        """A core that served for a while restarts at once; one that dies young waits longer and longer."""
        for delay in (0, 1, 2, 4):
            self.backoff.served()
            self.clock.advance(STEADY / 2)
            self.assertEqual(self.waited(), delay)
        for _ in range(3):
            self.backoff.served()
            self.clock.advance(STEADY)
            self.assertEqual(self.waited(), 0)

    def test_a_core_that_was_replaced(self) -> None:
        """A core that replaced a serving one has not died young."""
        self.waited()
        self.backoff.served()
        self.clock.advance(STEADY)
        self.backoff.served()
        self.assertEqual(self.waited(), 0)

    def test_time_without_a_core(self) -> None:
        """Time without a core does not count as serving."""
        self.waited()
        self.clock.advance(1000)
        self.assertEqual(self.waited(), 1)

    def test_renewed(self) -> None:
        """The first crash of another backend is retried at once."""
        for _ in range(4):
            self.waited()
        self.backoff.renew()
        self.assertEqual(self.waited(), 0)

    def test_cancelled(self) -> None:
        """No retry comes after a cancellation; cancelling nothing is fine."""
        self.backoff.cancel()
        self.later()
        self.backoff.cancel()
        self.clock.advance(1000)
        self.assertEqual(self.tries, [])

    def test_one_try_at_a_time(self) -> None:
        """Scheduled twice, it retries once."""
        self.later()
        self.later()
        self.clock.advance(1000)
        self.assertEqual(len(self.tries), 1)
