"""When counters are read and rows saved: regularly, on requests, and never without need."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, cast
from unittest.mock import Mock

from google.protobuf.message import Message
from twisted.internet import reactor
from twisted.internet.defer import CancelledError, Deferred, ensureDeferred
from twisted.internet.task import Clock, deferLater
from twisted.logger import capturedLogs
from twisted.trial.unittest import SynchronousTestCase, TestCase

from node.base import proc
from node.base.errors import CoreFailed, UnknownName, Unsupported
from node.base.waiting import Waiters
from node.contract.counters import DIRECTIONS, Asked, Row, Scope, Seen, counter_name
from node.contract.saved import Saved
from node.traffic import polling as traffic_module
from node.traffic.polling import Traffic
from node.traffic.readings import FEW, PATIENCE
from protos.service_pb2 import (
    BaseInfoResponse,
    Inbound,
    Inbounds,
    Outbounds,
    Stat,
    StatRequest,
    StatResponse,
    UsersStat,
    UserStat,
)
from tests.harness.whole import everything

ANN_UP, ANN_DOWN = (counter_name(Scope.USER, "ann", direction) for direction in DIRECTIONS)

# Those above the largest one.
PIDS = itertools.count(2**22 + 1)


def told(reply: Message) -> list[Stat]:
    """The rows that a client finds in a reply."""
    return [*StatResponse.FromString(reply.SerializeToString()).stats]


class Core:
    """A generation that counts, and answers when the test lets it."""

    def __init__(self) -> None:
        # No process has this PID; and the processor time that it would have used.
        self.pid, self.used = next(PIDS), 0.0
        self.counts: dict[str, int] = {}
        self.asked = 0
        self.answer: Callable[[], Deferred[None]] | None = None
        self.uncounted: frozenset[Scope] = frozenset()
        # For each reading whether it may leave out unchanged counters.
        self.unchanged: list[bool] = []

    async def counters(self, seen: Seen | None = None) -> dict[str, int]:
        self.asked += 1
        if seen is not None:
            self.unchanged.append(bool(seen.rows))
            seen.rows = {name.encode() for name in self.counts}
        if self.answer:
            await self.answer()
        return dict(self.counts)


class Choosy(Core):
    """A core that can read the counters of some names only."""

    def __init__(self) -> None:
        super().__init__()
        self.wanted: list[set[str | None]] = []

    async def some_counters(self, names: Iterable[Asked]) -> dict[str, int]:
        self.wanted.append({name for _, name in names})
        if self.answer:
            await self.answer()
        return {ANN_UP: self.counts[ANN_UP]}


class MemoryStore:
    def __init__(self) -> None:
        self.written: list[Row] = []
        self.times = 0
        self.sums: dict[tuple[Scope, str], Row] = {}
        self.disk: Deferred[None] | None = None

    def rows(self, rows: Mapping[tuple[Scope, str], Row]) -> None:
        self.times += bool(rows)
        self.written += rows.values()

    def totals(self, rows: Iterable[Row]) -> None:
        self.sums.update({(row.scope, row.key): row for row in rows})

    async def flush(self) -> None:
        if self.disk:
            await self.disk


class Cores:
    """The runs whose counters are read."""

    def __init__(self, cores: list[Any]) -> None:
        self._cores = cores

    @property
    def counting(self) -> list[Any]:
        return list(self._cores)


class PollingTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.clock: Any = Clock()
        self.core, self.store = Core(), MemoryStore()
        self.cores: list[Any] = [self.core]
        store: Any = self.store
        self.patch(proc, "cpu", lambda pid: next((core.used for core in self.cores if core.pid == pid), None))
        self.traffic = Traffic(self.clock, cast(Any, Cores(self.cores)), lambda name: name == "bob", store, 10)
        self.traffic.start()
        self.outcomes: list[Deferred[bool]] = []

    def tearDown(self) -> None:
        self.traffic.stop()
        self.assertEqual(self.clock.getDelayedCalls(), [])

    def pass_time(self, seconds: float) -> None:
        self.clock.pump([0.5] * int(seconds * 2))

    def delivered(self) -> Deferred[bool]:
        self.outcomes.append(Deferred())
        return self.outcomes[-1]

    def ask(self, kind: Any = UsersStat, name: str = "", reset: bool = False) -> dict[tuple[str, str], int]:
        request = StatRequest(type=kind, name=name, reset=reset)
        reply = self.successResultOf(ensureDeferred(self.traffic.stats(request, self.delivered)))
        return {(stat.name, stat.type): stat.value for stat in told(reply)}

    def test_regular_readings(self) -> None:
        """Every ten seconds, while there is a core, even an idle one."""
        self.pass_time(60)
        self.assertEqual(self.core.asked, 6)
        self.cores.clear()
        self.pass_time(60)
        self.assertEqual(self.core.asked, 6)

    def test_readings_of_a_core_that_works(self) -> None:
        """Every second, and what moved is saved at once: a core or a node that is killed loses no more."""
        for second in range(1, 60):
            self.core.used += 0.001
            self.core.counts[ANN_UP] = second
            self.pass_time(1)
            self.assertEqual(self.core.asked, second)
            self.assertEqual(self.store.written.pop(), Row(Scope.USER, "ann", second, 0))
        self.pass_time(2)
        self.assertEqual(self.core.asked, 60)
        self.core.used += 0.001
        self.pass_time(1)
        self.assertEqual(self.core.asked, 61)

    def test_paused(self) -> None:
        """While the node is being left there are no regular readings: they would change what is left."""
        with self.traffic.paused():
            self.core.used += 0.001
            self.pass_time(20)
            self.assertEqual(self.core.asked, 0)
        self.pass_time(1)
        self.assertEqual(self.core.asked, 1)

    def test_dear_readings(self) -> None:
        """They are as frequent as they may be; `info` tells how frequent."""

        def answer() -> Deferred[None]:
            self.core.used += 0.05
            return Deferred[None].fromCoroutine(nothing())

        async def nothing() -> None:
            pass

        self.core.answer = answer
        for _ in range(60):
            self.core.used += 0.0001
            self.pass_time(1)
        self.assertIn(self.core.asked, (12, 13))
        info = BaseInfoResponse()
        self.traffic.summary(info)
        self.assertEqual((info.traffic_interval, self.traffic.every), (self.traffic.every, self.traffic.every))
        self.assertAlmostEqual(self.traffic.every, 5, delta=0.1)

    def test_a_disk_that_hangs(self) -> None:
        """Readings go on, and what waits for the disk does not pile up."""
        disk = Waiters()
        self.store.flush = disk.wait  # type: ignore[method-assign]
        for second in range(1, 60):
            self.core.used += 0.001
            self.core.counts[ANN_UP] = second
            self.pass_time(1)
        self.assertEqual((self.core.asked, self.store.written[-1].uplink), (59, 59))
        self.assertLessEqual(len(disk), 10)
        self.traffic.stop()
        disk.wake()

    def test_a_request_has_a_reading_of_its_own(self) -> None:
        """A caller gets everything counted until its request, however recent the previous reading is."""
        for count in (5, 7, 7, 8):
            self.core.counts = {ANN_UP: count}
            self.assertEqual(self.ask(), {("ann", "uplink"): count})

    def test_requests_during_a_reading(self) -> None:
        """A reading that began before their requests does not count: such callers share the next one."""
        answers: list[Deferred[None]] = []

        def answer() -> Deferred[None]:
            answers.append(Deferred())
            return answers[-1]

        self.core.answer = answer
        request = StatRequest(type=UsersStat)
        asked = [ensureDeferred(self.traffic.stats(request, self.delivered)) for _ in range(4)]
        self.core.counts = {ANN_UP: 5}
        answers[0].callback(None)
        self.assertEqual(told(self.successResultOf(asked[0]))[0].value, 5)
        self.core.counts = {ANN_UP: 7}
        self.assertNoResult(asked[1])
        answers[1].callback(None)
        self.assertEqual([told(self.successResultOf(reply))[0].value for reply in asked[1:]], [7, 7, 7])
        self.assertEqual(self.core.asked, 2)

    def test_one_name(self) -> None:
        """A core that can is asked for one name only; that does not count as a reading of all."""
        core = Choosy()
        self.cores[:] = [core]
        core.counts = {ANN_UP: 5, ANN_DOWN: 7}
        self.assertEqual(self.ask(UserStat, "Ann"), {("ann", "uplink"): 5, ("ann", "downlink"): 0})
        self.assertEqual((core.asked, core.wanted), (0, [{"Ann"}]))
        self.pass_time(5)
        self.assertEqual((core.asked, len(core.wanted)), (2, 1))

    def test_a_whole_scope(self) -> None:
        """A core that can is asked for the inbounds or outbounds alone; that does not count as a reading of all."""
        core = Choosy()
        self.cores[:] = [core]
        core.counts = {ANN_UP: 5}
        self.ask(Outbounds)
        self.ask(Inbounds)
        self.assertEqual((core.asked, core.wanted), (0, [{None}, {None}]))
        self.ask(UsersStat)
        self.assertEqual((core.asked, len(core.wanted)), (1, 2))

    def test_a_reading_that_was_not_booked(self) -> None:
        """The next one reads all again: what the core reported before may be lost."""
        watcher: Any = Mock()
        self.traffic.watched(watcher)
        self.core.counts = {ANN_UP: 5}
        self.ask()
        self.ask()
        self.assertEqual(self.core.unchanged, [False, True])
        watcher.booked.side_effect = ZeroDivisionError
        self.core.counts = {ANN_UP: 7}
        self.ask()
        self.assertEqual(len(self.flushLoggedErrors(ZeroDivisionError)), 1)
        watcher.booked.side_effect = None
        self.ask()
        self.assertEqual(self.core.unchanged, [False, True, True, False])

    def test_several_names_at_once(self) -> None:
        """Callers that come meanwhile share one request for all their names; for too many, all counters are read."""
        for number, asked in ((FEW, 0), (FEW + 1, 1)):
            core, answer = Choosy(), Deferred[None]()
            self.cores[:] = [core]
            core.counts, core.answer = {ANN_UP: 5}, partial(iter([answer]).__next__)
            requests = [StatRequest(type=UserStat, name="bob")]
            requests += [StatRequest(type=Inbound, name=f"in{number}") for number in range(number)]
            replies = [ensureDeferred(self.traffic.stats(request, self.delivered)) for request in requests]
            core.answer = None
            answer.callback(None)
            self.successResultOf(replies[0])
            for reply in replies[1:]:
                self.failureResultOf(reply, UnknownName)
            self.assertEqual((core.asked, [len(names) for names in core.wanted]), (asked, [1, FEW][: 2 - asked]))

    def test_requests_replace_regular_readings(self) -> None:
        """A controller that asks all the time gets a reading each time; when it is gone, all is as before."""
        for _ in range(9):
            self.ask()
            self.pass_time(1)
        self.assertEqual(self.core.asked, 9)
        self.pass_time(60)
        self.assertIn(self.core.asked, range(15, 17))

    def test_rows_are_recorded(self) -> None:
        """As often as counters are read, and only changes."""
        self.core.counts = {ANN_UP: 5}
        self.pass_time(60)
        self.assertEqual((self.store.times, self.store.written), (1, [Row(Scope.USER, "ann", 5, 0)]))

    def test_delivered_rows_are_saved_at_once(self) -> None:
        """Delivered bytes must not come back after a crash; undelivered ones are as they were."""
        self.core.counts = {ANN_UP: 5}
        self.ask(reset=True)
        self.assertEqual(self.ask(), {})
        self.outcomes.pop().callback(False)
        self.assertEqual(self.ask(), {("ann", "uplink"): 5})
        self.ask(reset=True)
        self.assertEqual(self.store.written, [])
        self.outcomes.pop().callback(True)
        self.assertEqual(self.store.written, [Row(Scope.USER, "ann", 0, 0)])

    def test_the_end_saves_everything(self) -> None:
        """Everything read since the last save is saved."""
        self.core.counts = {ANN_UP: 5}
        self.ask()
        self.traffic.stop()
        self.assertEqual(self.store.written, [Row(Scope.USER, "ann", 5, 0)])

    def test_rows_of_an_earlier_node(self) -> None:
        """They are there, beside new ones, and are not saved again."""
        self.traffic.stop()
        self.traffic.restore(Saved(rows=(Row(Scope.USER, "Ann", 3, 3),)))
        self.traffic.start()
        self.assertEqual(self.ask(), {("Ann", "uplink"): 3, ("Ann", "downlink"): 3})
        self.pass_time(20)
        self.assertEqual(self.store.written, [])
        self.core.counts = {ANN_UP: 1}
        self.pass_time(20)
        self.assertEqual(self.store.written, [Row(Scope.USER, "ann", 4, 3)])

    def test_a_caller_that_gives_up(self) -> None:
        """A reading under way is booked although no caller waits for it any more."""
        answer: Deferred[None] = Deferred()
        self.core.counts, self.core.answer = {ANN_UP: 5}, lambda: answer
        reading = ensureDeferred(self.traffic.read())
        reading.cancel()
        self.failureResultOf(reading)
        answer.callback(None)
        self.assertEqual([*everything(self.traffic).rows.values()], [Row(Scope.USER, "ann", 5, 0)])
        self.assertEqual(self.core.asked, 1)

    def test_a_core_that_does_not_answer(self) -> None:
        """The other runs' bytes are delivered, and the next reading has the rest."""
        silent = Core()

        def fail() -> Deferred[None]:
            raise CoreFailed("no")

        silent.counts, silent.answer = {ANN_DOWN: 2}, fail
        self.core.counts = {ANN_UP: 5}
        self.cores.append(silent)
        self.assertEqual(self.ask(), {("ann", "uplink"): 5})
        silent.answer = None
        self.pass_time(2)
        self.assertEqual(self.ask(), {("ann", "uplink"): 5, ("ann", "downlink"): 2})

    def test_a_core_that_hangs(self) -> None:
        """Callers wait for it once, for some seconds; others' bytes are delivered, and its reading is booked once."""
        answer: Deferred[None] = Deferred()
        hung, ending = Core(), Core()
        hung.counts, hung.answer = {ANN_DOWN: 2}, lambda: answer
        self.core.counts = {ANN_UP: 5}
        self.cores += [hung, ending]
        first = ensureDeferred(self.traffic.stats(StatRequest(type=UsersStat), self.delivered))
        self.pass_time(PATIENCE - 1)
        self.assertNoResult(first)
        end: Any = ending
        self.assertFalse(self.successResultOf(ensureDeferred(self.traffic.read(end))))
        self.pass_time(1.5)
        self.assertEqual(len(told(self.successResultOf(first))), 1)
        self.core.counts = {ANN_UP: 6}
        self.pass_time(2)
        self.assertEqual((self.ask(), hung.asked), ({("ann", "uplink"): 6}, 1))
        self.cores.remove(hung)
        self.pass_time(2)
        hung.answer = None
        answer.callback(None)
        self.assertEqual(self.ask(), {("ann", "uplink"): 6, ("ann", "downlink"): 2})

    def test_no_callers_queue_behind_a_core_that_hangs(self) -> None:
        """A caller that comes after that wait is answered at once, and no waiting callers pile up."""
        self.core.answer = Deferred
        first = ensureDeferred(self.traffic.stats(StatRequest(type=UsersStat), self.delivered))
        self.pass_time(PATIENCE + 2)
        self.successResultOf(first)
        for _ in range(100):
            self.ask()
        batches = [*self.traffic._readings.under_way.values(), *self.traffic._readings._next.values()]
        self.assertLess(sum(len(batch.waiting) for batch in batches), 3)

    def test_whether_there_may_be_more(self) -> None:
        """A failed reading does not mean that an ending core has counted its last byte."""

        def fail() -> Deferred[None]:
            raise CoreFailed("no")

        self.core.counts, self.core.answer = {ANN_UP: 5}, fail
        core: Any = self.core
        found = []
        for answer in (fail, None, None):
            self.core.answer = answer
            found.append(self.successResultOf(ensureDeferred(self.traffic.read(core))))
        self.assertEqual(found, [True, True, False])

    def test_an_internal_error(self) -> None:
        """Whatever the error is: the ledger answers, `info` warns, it is logged once, and the next readings come."""

        def fail() -> Deferred[None]:
            raise CancelledError

        self.core.counts = {ANN_UP: 5}
        self.pass_time(10)
        self.core.answer = fail
        with capturedLogs() as logged:
            self.pass_time(30)
            self.assertEqual(self.ask(), {("ann", "uplink"): 5})
        self.assertEqual(self.core.asked, 32)
        self.assertEqual([event["log_level"].name for event in logged], ["critical"])
        self.assertEqual(self.traffic.warnings, ["counters were not read: internal error: CancelledError"])
        self.flushLoggedErrors(CancelledError)
        self.core.answer, self.core.counts = None, {ANN_UP: 7}
        self.pass_time(10)
        self.assertEqual(self.traffic.warnings, [])
        self.assertEqual(self.ask(), {("ann", "uplink"): 7})

    def test_a_core_that_is_gone_is_no_warning(self) -> None:
        """A failed reading of it does not matter any more."""

        def fail() -> Deferred[None]:
            raise CoreFailed("no")

        self.core.answer = fail
        self.pass_time(10)
        self.assertEqual(self.traffic.warnings, ["counters were not read: no"])
        self.cores.clear()
        self.assertEqual(self.traffic.warnings, [])

    def test_names(self) -> None:
        """A user without bytes has zeros, an unknown one is unknown."""
        self.assertEqual(self.ask(UserStat, "bob"), {("bob", "uplink"): 0, ("bob", "downlink"): 0})
        work = ensureDeferred(self.traffic.stats(StatRequest(type=UserStat, name="ann"), self.delivered))
        self.failureResultOf(work, UnknownName)

    def test_what_cannot_be_counted(self) -> None:
        """Such a request never gets zeros while the newest core cannot count it; a draining one may be of any kind."""
        self.core.uncounted = frozenset({Scope.INBOUND})
        work = ensureDeferred(self.traffic.stats(StatRequest(type=Inbounds), self.delivered))
        self.failureResultOf(work, Unsupported)
        self.cores.insert(0, Core())
        work = ensureDeferred(self.traffic.stats(StatRequest(type=Inbounds), self.delivered))
        self.assertEqual(told(self.successResultOf(work)), [])


class LargeReadings(TestCase):
    """They are booked in parts, with turns of the reactor between."""

    async def test_every_counter_is_booked(self) -> None:
        self.patch(traffic_module, "SLICE", 7)
        core, store = Core(), MemoryStore()
        any_core: Any = core
        any_store: Any = store
        traffic = Traffic(reactor, cast(Any, Cores([any_core])), lambda _: False, any_store, 10)
        for more in (1, 2):
            names = (
                counter_name(Scope.USER, f"{number}", direction) for number in range(50) for direction in DIRECTIONS
            )
            core.counts = {name: place + more for place, name in enumerate(names)}
            self.assertTrue(await traffic.read())
        self.assertFalse(await traffic.read())
        expected = {Row(Scope.USER, f"{number}", 2 * number + 2, 2 * number + 3) for number in range(50)}
        traffic.save_changed()
        while len(store.written) < len(expected):
            await deferLater(reactor, 0)
        self.assertEqual(set(store.written), expected)
        self.assertEqual(set(everything(traffic).rows.values()), expected)
        reply = await traffic.stats(StatRequest(type=UsersStat), Deferred)
        found = {(stat.name, stat.type): stat.value for stat in told(reply)}
        wanted = {(row.name, way): value for row in expected for way, value in zip(DIRECTIONS, row.both, strict=True)}
        self.assertEqual(found, wanted)


class SettledTests(SynchronousTestCase):
    """Totals for metrics: current ones that are on disk, with a bounded wait for anything that hangs."""

    def setUp(self) -> None:
        self.clock: Any = Clock()
        self.core, self.store = Core(), MemoryStore()
        store: Any = self.store
        self.traffic = Traffic(self.clock, cast(Any, Cores([self.core])), lambda name: True, store, 10)
        self.core.counts = {counter_name(Scope.INBOUND, "in", direction): 7 for direction in DIRECTIONS}

    def settled(self) -> Deferred[None]:
        return ensureDeferred(self.traffic.settled(2.0))

    def test_the_sums_are_read_and_on_disk(self) -> None:
        self.successResultOf(self.settled())
        self.assertEqual([*self.traffic.totals(Scope.INBOUND)], [Row(Scope.INBOUND, "in", 7, 7)])
        self.assertEqual([*self.store.sums.values()], [*self.traffic.totals(Scope.INBOUND)])
        self.assertEqual(self.traffic.age, 0)

    def test_a_core_that_hangs_is_waited_for_in_vain_for_two_seconds(self) -> None:
        self.successResultOf(self.settled())
        silence: Deferred[None] = Deferred()
        self.core.answer = lambda: silence
        self.clock.advance(30)
        work = self.settled()
        self.assertNoResult(work)
        self.clock.advance(2)
        self.successResultOf(work)
        self.assertEqual([*self.traffic.totals(Scope.INBOUND)], [Row(Scope.INBOUND, "in", 7, 7)])
        self.assertEqual(self.traffic.age, 32)
        silence.callback(None)
        self.clock.advance(10)

    def test_a_disk_that_hangs_is_waited_for_in_vain_for_two_seconds(self) -> None:
        """Bytes that are not on disk are not reported: the total would decrease if the node was killed now."""
        self.successResultOf(self.settled())
        told = [*self.traffic.totals(Scope.INBOUND)]
        self.store.disk = Deferred()
        self.core.counts = {counter_name(Scope.INBOUND, "in", direction): 9 for direction in DIRECTIONS}
        self.clock.advance(5)
        work = self.settled()
        self.assertNoResult(work)
        self.clock.advance(2)
        self.successResultOf(work)
        self.assertEqual([*self.traffic.totals(Scope.INBOUND)], told)
        self.store.disk.callback(None)

    def test_bytes_counted_during_the_write_are_not_reported(self) -> None:
        self.store.disk = Deferred()
        work = self.settled()
        self.core.counts = {counter_name(Scope.INBOUND, "in", direction): 9 for direction in DIRECTIONS}
        self.successResultOf(ensureDeferred(self.traffic.read()))
        self.store.disk.callback(None)
        self.successResultOf(work)
        self.assertEqual([*self.traffic.totals(Scope.INBOUND)], [Row(Scope.INBOUND, "in", 7, 7)])
