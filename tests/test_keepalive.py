"""How long a backend goes on when nobody calls."""

from __future__ import annotations

from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from node.keepalive import KeepAlive


class KeepAliveTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.clock = Clock()
        self.told: list[str] = []
        self.keep_alive = KeepAlive(self.clock, self.told.append)

    def test_it_expires_once(self) -> None:
        """After its time, and not again until somebody was heard of."""
        self.keep_alive.set(10)
        self.clock.advance(9)
        self.assertEqual((self.told, self.keep_alive.left), ([], 1))
        self.clock.advance(100)
        self.assertEqual((self.told, self.keep_alive.left), (["no controller was heard of for 10 s"], None))
        self.keep_alive.touch()
        self.clock.advance(10)
        self.assertEqual(len(self.told), 2)

    def test_each_word_counts(self) -> None:
        """Whoever calls in time keeps it."""
        self.keep_alive.set(10)
        for _ in range(5):
            self.clock.advance(9)
            self.keep_alive.touch()
        self.assertEqual((self.told, self.keep_alive.left), ([], 10))

    def test_never(self) -> None:
        """0 is for ever, and nothing runs after a stop."""
        self.keep_alive.set(0)
        self.keep_alive.touch()
        self.assertEqual((self.keep_alive.left, self.clock.getDelayedCalls()), (None, []))
        self.keep_alive.set(10)
        self.keep_alive.stop()
        self.keep_alive.touch()
        self.assertEqual((self.keep_alive.seconds, self.clock.getDelayedCalls()), (0, []))

    def test_what_was_left(self) -> None:
        """It goes on with what was left of it, never with more; the next word gives all of it again."""
        self.keep_alive.set(10, 3)
        self.assertEqual(self.keep_alive.left, 3)
        self.keep_alive.touch()
        self.assertEqual(self.keep_alive.left, 10)
        self.keep_alive.set(10, 99)
        self.assertEqual(self.keep_alive.left, 10)
