"""The ring: every reader gets every line, slow ones are told what they missed."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from twisted.internet.defer import ensureDeferred
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from node.logs import COALESCE, REPLAY, LogRing


class RingTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.clock = Clock()
        self.ring = LogRing(self.clock, size=1000)

    def test_new_reader_gets_the_tail(self) -> None:
        """A reader that comes late is given the newest lines first."""
        self.ring.extend(str(n) for n in range(500))
        lines, cursor = self.ring.read(self.ring.tail())
        self.assertEqual(lines, [str(n) for n in range(500 - REPLAY, 500)])
        self.assertEqual(cursor, 500)

    def test_two_readers_get_every_line(self) -> None:
        """One reader takes nothing away from another."""
        one = ensureDeferred(self.ring.follow(0))
        two = ensureDeferred(self.ring.follow(0))
        self.ring.extend(["a", "b"])
        self.clock.advance(COALESCE)
        self.assertEqual(self.successResultOf(one), (["a", "b"], 2))
        self.assertEqual(self.successResultOf(two), (["a", "b"], 2))

    def test_slow_reader_is_told(self) -> None:
        """A reader that fell behind gets one line with the number of those it lost, then the oldest there is."""
        self.ring.extend(str(n) for n in range(1500))
        lines, _ = self.ring.read(0)
        self.assertIn("500 lines were dropped", lines[0])
        self.assertEqual(lines[1:], [str(n) for n in range(500, 1500)])

    def test_cancelled_reader_leaves_nothing(self) -> None:
        """A reader that goes away while waiting is forgotten."""
        gone = ensureDeferred(self.ring.follow(0))
        gone.cancel()
        self.failureResultOf(gone)
        self.ring.extend(["a"])
        self.assertEqual(self.clock.getDelayedCalls(), [])

    def test_readers_are_woken_together(self) -> None:
        """Lines that come close together wake a reader once."""
        reader = ensureDeferred(self.ring.follow(0))
        self.ring.extend(["a"])
        self.ring.extend(["b"])
        self.assertNoResult(reader)
        self.clock.advance(COALESCE)
        self.assertEqual(self.successResultOf(reader), (["a", "b"], 2))


@given(st.lists(st.lists(st.text(max_size=5), max_size=20), max_size=20), st.integers(1, 30))
def test_nothing_is_lost_unsaid(batches: list[list[str]], size: int) -> None:
    """Whatever is written and whenever it is read: lines read plus lines said to be dropped are all lines."""
    ring = LogRing(Clock(), size)
    cursor, read, dropped = 0, 0, 0
    for number, batch in enumerate(batches):
        ring.extend(batch)
        if number % 3 == 0:
            before = cursor
            lines, cursor = ring.read(cursor)
            lost = max(0, (cursor - before) - min(size, cursor - before))
            dropped += lost
            read += len(lines) - (1 if lost else 0)
    assert read + dropped == cursor
