"""The journal: numbers are never used twice, old events are dropped, and readers learn of both."""

from __future__ import annotations

import tracemalloc
from collections.abc import Sequence
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from twisted.internet.defer import Deferred
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from node.api.auth import Caller
from node.api.readers import KINDS, LONGEST_KIND, EventReader
from node.base.errors import InvalidRequest, Unauthenticated
from node.contract.saved import Margins, Packed, Saved
from node.events import journal as journal_module
from node.events.journal import BYTES, EVENTS, MAX_FIELD, MAX_TEXT, READ, RESERVED, Journal
from node.events.kinds import Kind, fits
from node.events.users import NAMED, TOGETHER, UserEvents
from node.keys.keyfile import Key, Scope
from protos.service_pb2 import Event, EventsRequest
from tests.harness.whole import everything

CALLER = Caller(Key("test", Scope.READ, b""))


class Disk:
    """A fake state file. While `away`, nothing is written."""

    def __init__(self) -> None:
        self.margins: Margins | None = None
        self.events: dict[int, bytes] = {}
        self.waiting: list[tuple[Margins, Packed | None]] = []
        self.away = False

    def event(self, margins: Margins, event: Packed | None = None) -> None:
        self.waiting.append((margins, event))

    def commit(self, journal: Journal) -> None:
        """Write what is queued."""
        waiting, self.waiting = self.waiting, []
        for margins, event in waiting if not self.away else []:
            self.margins = margins
            if event:
                self.events[event.sequence] = event.body
            self.events = {number: body for number, body in self.events.items() if number >= margins.first}
            journal.stored(margins)

    def anew(self, journal: Journal) -> None:
        """The disk works again: write everything."""
        self.away, self.waiting = False, []
        kept = everything(journal)
        assert kept.margins is not None
        self.margins = kept.margins
        self.events = {packed.sequence: packed.body for packed in kept.events}
        journal.stored(kept.margins)
        journal.disk("")
        self.commit(journal)

    def begun(self, clock: Clock) -> Journal:
        """Start a node's journal on this disk."""
        journal = Journal(clock, self.event, now=lambda: 1.5)
        events = tuple(Packed(number, body) for number, body in sorted(self.events.items()))
        journal.restore(Saved(margins=self.margins, events=events))
        return journal


def request(since: int = 0, epoch: str = "", kinds: Sequence[str] = (), follow: bool = False) -> EventsRequest:
    return EventsRequest(since=since, epoch=epoch, kinds=kinds, follow=follow)


class JournalCase(SynchronousTestCase):
    def setUp(self) -> None:
        self.clock = Clock()
        self.journal = Journal(self.clock)

    def all(self, reader: EventReader) -> list[Event]:
        """Read until there is nothing more."""
        found: list[Event] = []
        while more := self.successResultOf(Deferred.fromCoroutine(reader.next())):
            found += more
        return found

    def asked(self, journal: Journal | None = None, **asked: Any) -> list[Event]:
        return self.all(EventReader(journal or self.journal, request(**asked), CALLER))

    def numbers(self, journal: Journal | None = None, **asked: Any) -> list[int]:
        return [event.sequence for event in self.asked(journal, **asked)]


class JournalTests(JournalCase):
    """Readers get what is reported."""

    def test_a_reader_names_few_kinds(self) -> None:
        """Each event is compared with them on the reactor, and they last as long as the reader."""
        for kinds in (["core"] * (KINDS + 1), ["x" * (LONGEST_KIND + 1)]):
            self.assertRaises(InvalidRequest, self.asked, kinds=kinds)
        self.journal.tell(Kind.CORE_EXITED, "it went")
        self.assertEqual(self.numbers(kinds=["x" * LONGEST_KIND] * (KINDS - 1) + ["core"]), [1])

    def test_an_event_has_all_that_was_reported(self) -> None:
        """Number, epoch, time, kind with its severity, text and fields."""
        journal = Journal(self.clock, now=lambda: 12.3456)
        journal.tell(Kind.CORE_EXITED, "it ended", reason="it ended", pid=7)
        [event] = self.asked(journal)
        expected = Event(
            sequence=1,
            epoch=journal.epoch,
            time=12.346,
            kind="core.exited",
            severity="error",
            text="it ended",
            fields={"reason": "it ended", "pid": "7"},
        )
        self.assertEqual(event, expected)

    def test_texts_from_outside(self) -> None:
        """They are shortened, keep their line breaks, and their control characters are escaped."""
        self.journal.tell(Kind.CORE_EXITED, "a\nb\x1b[2J" + "x" * 10_000, reason="\r" + "y" * 10_000)
        [event] = self.asked()
        self.assertTrue(event.text.startswith("a\nb\\x1b[2Jxx"))
        self.assertLess(len(event.text), MAX_TEXT + 10)
        self.assertTrue(event.fields["reason"].startswith("\\ry"))
        self.assertLess(len(event.fields["reason"]), MAX_FIELD + 10)

    def test_a_reader_resumes(self) -> None:
        """It gets the events after its number; without a number all."""
        for _ in range(READ + 5):
            self.journal.tell(Kind.RUNNING, "it runs")
        self.assertEqual(self.numbers(), list(range(1, READ + 6)))
        self.assertEqual(self.numbers(since=READ), list(range(READ + 1, READ + 6)))
        self.assertEqual(self.numbers(since=READ + 5, epoch=self.journal.epoch), [])

    def test_a_reader_of_some_kinds(self) -> None:
        """Whole kinds, or their dotted prefixes."""
        for kind in (Kind.RUNNING, Kind.CORE_EXITED, Kind.CORE_STARTED, Kind.KEYS_LOADED):
            self.journal.tell(kind, "it happened")
        self.assertEqual(self.numbers(kinds=["core"]), [2, 3])
        self.assertEqual(self.numbers(kinds=["core.exited", "keys."]), [2, 4])
        self.assertEqual(self.numbers(kinds=["cor"]), [])
        self.assertFalse(fits("core.exited", ("core.exit",)))

    def test_a_reader_that_follows(self) -> None:
        """It waits, is woken once for all new events, and may be cancelled."""
        reader = EventReader(self.journal, request(follow=True, kinds=["core"]), CALLER)
        waiting = Deferred.fromCoroutine(reader.next())
        self.journal.tell(Kind.RUNNING, "not this one")
        self.clock.advance(0)
        self.assertNoResult(waiting)
        self.journal.tell(Kind.CORE_HUNG, "this one")
        self.journal.tell(Kind.CORE_ENDED, "and this one")
        self.clock.advance(0)
        self.assertEqual([event.sequence for event in self.successResultOf(waiting)], [2, 3])
        waiting = Deferred.fromCoroutine(reader.next())
        waiting.cancel()
        self.failureResultOf(waiting)
        self.assertEqual((len(self.journal._waiters), self.clock.getDelayedCalls()), (0, []))

    def test_a_reader_whose_key_was_revoked(self) -> None:
        """It ends at once, and again at its next read."""
        reader = EventReader(self.journal, request(follow=True), CALLER)
        waiting = Deferred.fromCoroutine(reader.next())
        reader.dismiss(Unauthenticated())
        self.failureResultOf(waiting, Unauthenticated)
        self.failureResultOf(Deferred.fromCoroutine(reader.next()), Unauthenticated)

    def test_old_events_are_dropped(self) -> None:
        """The oldest go, by number or by bytes; a reader who wants them learns which ones it missed."""
        for number in range(EVENTS + 10):
            self.journal.tell(Kind.RUNNING, str(number))
        self.assertEqual(self.journal.first, 11)
        missed, first, *_ = self.asked(since=5)
        self.assertEqual((missed.kind, missed.sequence), ("events.missed", 10))
        self.assertEqual(dict(missed.fields), {"first": "6", "last": "10"})
        self.assertEqual(first.sequence, 11)
        self.assertEqual(self.numbers()[0], 11)
        self.assertEqual(self.numbers(since=10)[0], 11)
        for _ in range(400):
            self.journal.tell(Kind.RUNNING, "x" * MAX_TEXT)
        self.assertLessEqual(sum(len(packed.body) for packed in everything(self.journal).events), BYTES)
        self.assertGreater(self.journal.first, EVENTS)

    def test_a_slow_reader(self) -> None:
        """It learns what it missed, and goes on after that."""
        self.journal.tell(Kind.RUNNING, "first")
        reader = EventReader(self.journal, request(follow=True), CALLER)
        self.successResultOf(Deferred.fromCoroutine(reader.next()))
        for number in range(EVENTS + 10):
            self.journal.tell(Kind.RUNNING, str(number))
        [missed] = self.successResultOf(Deferred.fromCoroutine(reader.next()))
        self.assertEqual((missed.kind, dict(missed.fields)), ("events.missed", {"first": "2", "last": "11"}))
        [first, *_] = self.successResultOf(Deferred.fromCoroutine(reader.next()))
        self.assertEqual(first.sequence, 12)


class DiskTests(JournalCase):
    """The journal across restarts of the node."""

    def test_an_orderly_end(self) -> None:
        """The next node continues with the next number, and has all events."""
        disk = Disk()
        first = disk.begun(self.clock)
        first.tell(Kind.NODE_STARTED, "it is up")
        first.stop()
        disk.commit(first)
        second = Journal(self.clock, disk.event)
        second.restore(Saved(margins=disk.margins, events=(Packed(1, disk.events[1]),)))
        self.assertTrue(second._clean)
        second.tell(Kind.NODE_STARTED, "it is up again")
        disk.commit(second)
        self.assertEqual(self.numbers(second, since=1, epoch=first.epoch), [2])

    def test_events_are_visible_when_their_number_is_reserved(self) -> None:
        """A new node's first event waits for the disk; then the others come at once."""
        disk = Disk()
        journal = disk.begun(self.clock)
        journal.tell(Kind.NODE_STARTED, "it is up")
        self.assertEqual(self.numbers(journal), [])
        disk.commit(journal)
        journal.tell(Kind.RUNNING, "it runs")
        self.assertEqual(self.numbers(journal), [1, 2])

    def test_a_killed_node(self) -> None:
        """Numbers that readers saw but that are not on disk are not used again."""
        disk = Disk()
        first = disk.begun(self.clock)
        first.tell(Kind.NODE_STARTED, "it is up")
        disk.commit(first)
        first.tell(Kind.RUNNING, "it runs")
        self.assertEqual(self.numbers(first), [1, 2])
        second = Journal(self.clock, disk.event)
        events = tuple(Packed(*event) for event in disk.events.items())
        second.restore(Saved(margins=disk.margins, events=events))
        self.assertFalse(second._clean)
        second.tell(Kind.NODE_STARTED, "it is up again")
        disk.commit(second)
        [told] = self.asked(second, since=2, epoch=first.epoch)
        self.assertGreater(told.sequence, RESERVED)

    def test_a_lost_state(self) -> None:
        """A reader with a number of an old epoch learns of it, and gets all events."""
        self.journal.tell(Kind.NODE_STARTED, "it is up")
        for since, epoch in ((57, ""), (1, "another")):
            lost, first = self.asked(since=since, epoch=epoch)
            self.assertEqual((lost.kind, lost.sequence, lost.epoch), ("events.lost", 0, self.journal.epoch))
            self.assertEqual(first.sequence, 1)
        self.assertEqual(self.numbers(epoch="another"), [1])

    def test_a_disk_in_trouble(self) -> None:
        """Events are read from memory, and written when the disk works again; readers do not notice."""
        disk = Disk()
        journal = disk.begun(self.clock)
        journal.tell(Kind.NODE_STARTED, "it is up")
        disk.commit(journal)
        epoch, disk.away = journal.epoch, True
        journal.disk("it is full")
        for _ in range(10):
            journal.tell(Kind.RUNNING, "it runs")
        self.assertEqual(self.numbers(journal), list(range(1, 13)))
        disk.anew(journal)
        self.assertEqual((journal.epoch, len(disk.events)), (epoch, 13))
        self.assertEqual(self.numbers(disk.begun(self.clock)), list(range(1, 14)))

    def test_more_than_was_reserved(self) -> None:
        """If the disk does not come back a new epoch begins: the next node would use the numbers again."""
        disk = Disk()
        journal = disk.begun(self.clock)
        journal.tell(Kind.NODE_STARTED, "it is up")
        disk.commit(journal)
        epoch, disk.away = journal.epoch, True
        journal.disk("it is full")
        for _ in range(RESERVED + 1):
            journal.tell(Kind.RUNNING, "it runs")
        self.assertNotEqual(journal.epoch, epoch)
        self.assertEqual(self.numbers(journal)[-1], RESERVED + 3)
        disk.anew(journal)
        assert disk.margins is not None
        self.assertEqual(disk.margins.epoch, journal.epoch)

    @given(st.lists(st.sampled_from(["tell", "commit", "away", "back", "kill", "end"]), max_size=60))
    def test_no_number_twice(self, steps: list[str]) -> None:
        """Whatever the disk does and whenever the node is killed: a number in an epoch is one event, for ever."""
        disk, seen = Disk(), dict[tuple[str, int], Event]()
        reserved, journal_module.RESERVED = journal_module.RESERVED, 4
        try:
            journal = disk.begun(self.clock)
            for number, step in enumerate(steps):
                if step == "tell":
                    journal.tell(Kind.RUNNING, str(number))
                elif step == "commit":
                    disk.commit(journal)
                elif step == "away" and not disk.away:
                    disk.away, disk.waiting = True, []
                    journal.disk("away")
                elif step == "back" and disk.away:
                    disk.anew(journal)
                elif step in ("kill", "end"):
                    if step == "end":
                        journal.stop()
                        disk.commit(journal)
                    disk.waiting = []
                    journal = disk.begun(self.clock)
                    if disk.away:
                        journal.disk("away")
                for event in self.asked(journal):
                    self.assertEqual(seen.setdefault((event.epoch, event.sequence), event).text, event.text)
        finally:
            journal_module.RESERVED = reserved


class UserTests(JournalCase):
    """Events about many users."""

    def setUp(self) -> None:
        super().setUp()
        self.users = UserEvents(self.journal, self.clock)

    def test_the_first_user_at_once_the_others_together(self) -> None:
        """One event for the first, one for those of the next seconds, with the first names and a number."""
        self.users.cut(["ann"])
        for number in range(1000):
            self.users.cut([f"user {number}"])
        self.assertEqual(len(self.asked()), 1)
        self.clock.advance(TOGETHER)
        _, others = self.asked()
        self.assertEqual(others.fields["count"], "1000")
        self.assertEqual(len(others.fields["names"].split(", ")), NAMED)
        self.assertIn("995 others", others.text)
        self.clock.advance(TOGETHER)
        self.users.cut(["bert"])
        self.assertEqual(len(self.asked()), 3)
        self.assertEqual(self.clock.getDelayedCalls(), [])

    def test_names_and_reasons_are_bounded(self) -> None:
        """What waits for the next event is bounded, whatever the names, and all that an event names fits in."""
        tracemalloc.start()
        self.addCleanup(tracemalloc.stop)
        for number in range(100):
            self.users.refused([(f"{number} " + "x" * 1_000_000, f"{number} " + "y" * 1_000_000)])
        self.assertLess(tracemalloc.get_traced_memory()[0], 1_000_000)
        self.users.close()
        _, others = self.asked()
        self.assertIn("and 94 others", others.text)
        self.assertIn("5 xxx", others.fields["names"])

    def test_a_repeated_refusal_is_not_reported(self) -> None:
        """For the same reason, and for a while."""
        for _ in range(100):
            self.users.refused([("ann", "the password is missing")])
        [event] = self.asked()
        self.assertEqual(event.fields["reason"], "the password is missing")
        self.users.refused([("ann", "another reason")])
        self.users.close()
        self.assertEqual((len(self.asked()), self.clock.getDelayedCalls()), (2, []))
