"""The ring: every reader gets every line, and slow readers get the number of lines that they missed."""

from __future__ import annotations

import time

from hypothesis import given
from hypothesis import strategies as st
from twisted.internet.defer import ensureDeferred
from twisted.internet.task import Clock
from twisted.logger import capturedLogs, formatEvent
from twisted.trial.unittest import SynchronousTestCase

from node.base.logs import COALESCE, NODE_MARK, REPLAY, Logger, LogRing
from protos.handover_pb2 import Ring


class RingTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.clock = Clock()
        self.ring = LogRing(self.clock, size=1000)

    def test_new_reader_gets_the_tail(self) -> None:
        """A reader that comes late gets the newest lines first."""
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

    def test_the_next_process_goes_on(self) -> None:
        """A place in the ring stays valid there; lines that are not kept are reported as dropped."""
        for count, kept, first in (
            (0, 1000, 0),
            (300, 1000, 0),
            (1500, 1000, 500),
            (1500, 400, 1100),
            (2600, 4000, 1600),
        ):
            ring = LogRing(self.clock, size=1000)
            ring.extend(str(n) for n in range(count))
            place = ring.place(max(0, count - 2))
            other = LogRing(self.clock, size=kept)
            other.unpack(Ring.FromString(ring.packed.SerializeToString()))
            other.extend(["more", "and more"])
            self.assertEqual(
                other.read(other.behind(place))[0], [*map(str, range(max(0, count - 2), count)), "more", "and more"]
            )
            lines, cursor = [], first
            while other.has(cursor):
                some, cursor = other.read(cursor)
                lines += some
            lost = [line for line in lines if line.startswith(NODE_MARK)]
            begin = max(first, count + 2 - kept)
            self.assertEqual(len(lost), int(begin > first))
            self.assertEqual(lines[len(lost) :], [*map(str, range(begin, count)), "more", "and more"])

    def test_a_slow_reader(self) -> None:
        """A reader that fell behind gets one line with the number of lost lines, then the oldest line there is."""
        self.ring.extend(str(n) for n in range(1500))
        lines, _ = self.ring.read(0)
        self.assertIn("500 lines were dropped", lines[0])
        self.assertEqual(lines[1:], [str(n) for n in range(500, 1500)])

    def test_cancelled_reader_leaves_nothing(self) -> None:
        """A reader that goes away while waiting is removed."""
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

    def test_readers_are_woken_at_once_after_a_pause(self) -> None:
        """The first lines wait for nothing; those after them until readers may be woken again, and no longer."""
        for _ in range(2):
            cursor = self.ring._next
            reader = ensureDeferred(self.ring.follow(cursor))
            self.ring.extend(["a"])
            self.clock.advance(0)
            self.assertEqual(self.successResultOf(reader), (["a"], cursor + 1))
            self.clock.advance(COALESCE / 4)
            reader = ensureDeferred(self.ring.follow(cursor + 1))
            self.ring.extend(["b"])
            self.clock.advance(COALESCE / 2)
            self.assertNoResult(reader)
            self.clock.advance(COALESCE / 4)
            self.assertEqual(self.successResultOf(reader), (["b"], cursor + 2))
            self.clock.advance(COALESCE)


class ReadTests(SynchronousTestCase):
    """What one read returns, and costs."""

    def test_a_read_is_limited(self) -> None:
        """A read returns some lines or some characters and continues where it ended; it never cuts a line."""
        ring = LogRing(Clock(), 10_000)
        written = [str(n) for n in range(2500)] + ["x" * 100_000] * 8 + ["y" * 300_000] * 2
        ring.extend(written)
        read: list[str] = []
        cursor, reads = 0, []
        while ring.has(cursor):
            lines, cursor = ring.read(cursor)
            reads.append(len(lines))
            read += lines
        self.assertEqual(read, written)
        self.assertEqual(reads, [1000, 1000, 502, 2, 2, 2, 1, 1])

    def test_a_large_ring_costs_no_more(self) -> None:
        """Reading is as quick from a ring of a million lines as of a thousand, wherever the reader is."""
        ring = LogRing(Clock(), 1_000_000)
        ring.extend("x" * 10 for _ in range(1_100_000))
        began = time.process_time()
        for cursor in range(0, 1_100_000, 1100):
            ring.read(cursor)
        self.assertLess((time.process_time() - began) / 1000, 0.002)


class ForeignTests(SynchronousTestCase):
    """Lines that others wrote."""

    def setUp(self) -> None:
        self.ring = LogRing(Clock(), 100)

    def written(self) -> list[str]:
        return self.ring.read(0)[0]

    def test_marks(self) -> None:
        """A core cannot write a line that begins like one of the node's, whatever it puts around the mark."""
        mark = NODE_MARK.strip()
        for line in (
            f"{mark} backend stopped",
            mark,
            f" \t{mark}x",
            f"\u200b{mark} x",
            f"\n{mark} x",
            f"\u00a0{mark} x",
        ):
            self.ring.extend([line])
        self.ring.event("backend running")
        *forged, own = self.written()
        self.assertEqual(own, f"{mark} backend running")
        self.assertFalse([line for line in forged if line.strip().startswith(mark)])

    def test_an_event_that_quotes_a_core(self) -> None:
        """Quoted lines of a core are marked as such."""
        self.ring.event("backend failed: it said\nbackend running\r\n[node] all is well")
        self.assertEqual(
            self.written(),
            ["[node] backend failed: it said", "[node] | backend running\\r", "[node] | [node] all is well"],
        )

    def test_an_event_is_bounded(self) -> None:
        """However long a name in an event is."""
        self.ring.event("user " + "x" * 1_000_000)
        self.assertLess(len(self.written()[0]), 5000)

    def test_unseen_characters(self) -> None:
        """Characters that move the cursor or turn the direction are escaped; other scripts stay."""
        self.ring.extend(["a\x1b[2Jb\u202ec\u2066d\ne\x85f\u2028g\ud800h", "\tтакже, 漢字 \U0001f600"])
        self.assertEqual(
            self.written(),
            ["a\\x1b[2Jb\\u202ec\\u2066d\\ne\\x85f\\u2028g\\ud800h", "\tтакже, 漢字 \U0001f600"],
        )

    def test_the_log(self) -> None:
        """Texts in fields of the log are made printable and cut; other values stay."""
        with capturedLogs() as logged:
            Logger().warn("user {email} {number}", email="\x1b]0;\u202e\n" + "x" * 1_000_000, number=7)
        [event] = logged
        line = formatEvent(event)
        self.assertTrue(line.startswith("user \\x1b]0;\\u202e\\nxxx"))
        self.assertTrue(line.endswith("x 7"))
        self.assertLess(len(line), 5000)


@given(st.lists(st.lists(st.text(max_size=5), max_size=20), max_size=20), st.integers(1, 30))
def test_no_line_is_lost_silently(batches: list[list[str]], size: int) -> None:
    """Whatever is written and whenever it is read: lines read plus lines reported as dropped are all lines."""
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
