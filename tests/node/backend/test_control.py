"""The order of operations: one after another, equal ones joined, all aborted by a Stop, whatever callers do."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from twisted.internet.defer import CancelledError, Deferred, ensureDeferred
from twisted.trial.unittest import SynchronousTestCase

from node.backend.control import Control, Settled
from node.base.errors import Aborted, CoreFailed

Work = Callable[[Settled], Coroutine[Any, Any, None]]


class Steps:
    """Operations that continue when the test lets them; `events` is what they did."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.waiting: dict[str, Deferred[None]] = {}

    def work(self, name: str, settles: bool = False) -> Work:
        """Begin, settle if this one settles early, wait for `end`, end."""

        async def run(settled: Settled) -> None:
            self.events.append(f"{name} begins")
            if settles:
                settled()
            self.waiting[name] = Deferred()
            try:
                await self.waiting[name]
            except CancelledError:
                self.events.append(f"{name} aborted")
                raise
            self.events.append(f"{name} ends")

        return run

    def end(self, name: str, fault: Exception | None = None) -> None:
        if fault:
            self.waiting[name].errback(fault)
        else:
            self.waiting[name].callback(None)


class ControlTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.control = Control()
        self.steps = Steps()
        self.done: list[Deferred[None]] = []

    def tearDown(self) -> None:
        self.control.abort()
        for deferred in self.done:
            deferred.addErrback(lambda _: None)

    def run_core(self, name: str, subject: object = None, settles: bool = False) -> Deferred[None]:
        self.done.append(ensureDeferred(self.control.run(self.steps.work(name, settles), subject, core=True)))
        return self.done[-1]

    def run_users(self, name: str, settles: bool = False) -> Deferred[None]:
        self.done.append(ensureDeferred(self.control.run(self.steps.work(name, settles))))
        return self.done[-1]

    def test_one_after_another(self) -> None:
        """Operations on the core begin in order of arrival, each after the end of the previous one."""
        done = [self.run_core(name) for name in "abc"]
        for name in "abc":
            self.assertEqual(self.steps.events[-1], f"{name} begins")
            self.steps.end(name)
        for deferred in done:
            self.successResultOf(deferred)
        self.assertEqual(len(self.steps.events), 6)

    def test_users_do_not_wait_for_a_core(self) -> None:
        """A change of users begins when the operation before has settled, though its core is still starting."""
        self.run_core("start", settles=True)
        users = self.run_users("sync")
        self.assertEqual(self.steps.events, ["start begins", "sync begins"])
        self.steps.end("sync")
        self.successResultOf(users)

    def test_users_wait_for_an_unsettled_start(self) -> None:
        """Neither a sync nor a single user overtakes a Start that has not settled its users yet."""
        self.run_core("start")
        single = ensureDeferred(self.control.settled())
        self.run_users("sync")
        self.assertNoResult(single)
        self.assertEqual(self.steps.events, ["start begins"])
        self.steps.end("start")
        self.successResultOf(single)
        self.assertEqual(self.steps.events[-1], "sync begins")

    def test_a_core_does_not_wait_for_users_in_force(self) -> None:
        """A Start begins when the sync before it is settled; the sync need not be in force."""
        self.run_users("sync", settles=True)
        self.run_core("start")
        self.assertEqual(self.steps.events, ["sync begins", "start begins"])

    def test_equal_ones_are_one(self) -> None:
        """Equal operations in a row are one, and all callers get its outcome."""
        done = [self.run_core(name, "subject") for name in "abc"]
        self.assertEqual(self.steps.events, ["a begins"])
        self.steps.end("a", CoreFailed("no"))
        for deferred in done:
            self.failureResultOf(deferred, CoreFailed)

    def test_equal_ones_that_wait_are_one(self) -> None:
        """They are joined even before their turn comes."""
        self.run_core("first", "one")
        done = [self.run_core(name, "two") for name in "ab"]
        self.steps.end("first")
        self.steps.end("a")
        for deferred in done:
            self.successResultOf(deferred)
        self.assertNotIn("b begins", self.steps.events)

    def test_nothing_joins_across_another(self) -> None:
        """An operation between two equal ones keeps them apart, whatever it is, even a single user's change."""
        between: dict[str, Callable[[], object]] = {
            "another Start": lambda: self.run_core("other", "other"),
            "a sync": lambda: self.run_users("other"),
            "a single user": lambda: ensureDeferred(self.control.settled()),
        }
        for name, other in between.items():
            self.tearDown()
            self.setUp()
            self.run_core("first", "subject")
            other()
            self.run_core("second", "subject")
            self.steps.end("first")
            if "other" in self.steps.waiting:
                self.steps.end("other")
            self.assertEqual(self.steps.events[-1], "second begins", name)

    def test_nothing_joins_across_an_ended_operation(self) -> None:
        """They stay apart even if the operation between them is over already."""
        self.run_core("start", "subject", settles=True)
        self.run_users("sync")
        self.steps.end("sync")
        self.run_core("again", "subject")
        self.steps.end("start")
        self.assertEqual(self.steps.events[-1], "again begins")

    def test_operations_without_a_subject_never_join(self) -> None:
        """Stops and syncs are never joined."""
        self.run_core("a")
        self.run_core("b")
        self.steps.end("a")
        self.assertEqual(self.steps.events[-1], "b begins")

    def test_an_ended_operation_is_not_joined(self) -> None:
        """An equal operation that comes after the end of the first begins a new one."""
        self.run_core("a", "subject")
        self.steps.end("a")
        self.run_core("b", "subject")
        self.assertEqual(self.steps.events[-1], "b begins")

    def test_abort(self) -> None:
        """Abort ends running and waiting operations and reports it to their callers; later ones are not affected."""
        done = [self.run_core("a", settles=True), self.run_core("b"), self.run_users("sync"), self.run_core("c", "c")]
        self.control.abort()
        for deferred in done:
            self.failureResultOf(deferred, Aborted)
        self.assertEqual(self.steps.events, ["a begins", "a aborted"])
        self.run_core("stop")
        self.assertEqual(self.steps.events[-1], "stop begins")

    def test_operations_after_an_abort_wait_for_the_cleanup(self) -> None:
        """An aborted operation that still cleans up keeps the next one waiting."""
        clearing: Deferred[None] = Deferred()

        async def stubborn(_: Settled) -> None:
            try:
                await Deferred()
            finally:
                await clearing

        aborted = ensureDeferred(self.control.run(stubborn, core=True))
        self.control.abort()
        self.run_core("stop")
        self.assertEqual(self.steps.events, [])
        clearing.callback(None)
        self.failureResultOf(aborted, Aborted)
        self.assertEqual(self.steps.events, ["stop begins"])

    def test_cleanup_is_not_aborted(self) -> None:
        """An aborted operation cleans up once, however many aborts come meanwhile, and later ones wait for it."""
        clearing: list[Deferred[None]] = []

        async def stubborn(_: Settled) -> None:
            try:
                await Deferred()
            finally:
                clearing.append(Deferred())
                await clearing[0]

        aborted = ensureDeferred(self.control.run(stubborn, core=True))
        self.control.abort()
        self.control.abort()
        self.run_core("stop")
        self.assertEqual(self.steps.events, [])
        clearing[0].callback(None)
        self.failureResultOf(aborted, Aborted)
        self.assertEqual((self.steps.events, len(clearing)), (["stop begins"], 1))

    def test_a_final_operation_is_not_aborted(self) -> None:
        """A final operation is not aborted, not even while it waits for its turn."""
        work = [ensureDeferred(self.control.run(self.steps.work(name), core=True, final=True)) for name in "ab"]
        self.control.abort()
        for name, done in zip("ab", work, strict=True):
            self.steps.end(name)
            self.successResultOf(done)

    def test_a_caller_that_hangs_up(self) -> None:
        """A caller that goes away aborts nothing; callers that joined it still get the outcome."""
        gone, patient = self.run_core("a", "subject"), self.run_core("b", "subject")
        waits = ensureDeferred(self.control.settled())
        for deferred in (gone, waits):
            deferred.cancel()
            self.failureResultOf(deferred, CancelledError)
        self.steps.end("a")
        self.successResultOf(patient)
        self.assertEqual(self.steps.events, ["a begins", "a ends"])

    def test_a_fault_is_only_the_callers(self) -> None:
        """A failing operation, foreseen or not, does not keep the next one from beginning."""
        failed = self.run_core("a")
        self.run_core("b")
        self.steps.end("a", KeyError("x"))
        self.failureResultOf(failed, KeyError)
        self.assertEqual(self.steps.events[-1], "b begins")

    def test_internal_changes_wait_for_earlier_operations_only(self) -> None:
        """Later operations do not delay it further, and it is done before they begin."""
        steps = Steps()
        for name in ("first", "second"):
            ensureDeferred(self.control.run(steps.work(name), name))
        quiet = ensureDeferred(self.control.quiet())
        quiet.addCallback(lambda _: steps.events.append("quiet"))
        ensureDeferred(self.control.run(steps.work("third"), "third"))
        steps.end("first")
        self.assertNoResult(quiet)
        steps.end("second")
        self.assertEqual(steps.events[-3:], ["second ends", "quiet", "third begins"])
        ensureDeferred(self.control.run(steps.work("fourth", settles=True), "fourth"))
        steps.end("third")
        self.successResultOf(ensureDeferred(self.control.quiet()))
        steps.end("fourth")


class OvertakenTests(SynchronousTestCase):
    """A Start gives way to the one right behind it."""

    def setUp(self) -> None:
        self.control, self.events = Control(), list[str]()
        self.gates: dict[str, Deferred[None]] = {}
        self.faults: dict[str, CoreFailed] = {}

    def start(self, name: str) -> Deferred[None]:
        async def work(settled: Settled) -> None:
            self.gates[name] = Deferred()
            await self.gates[name]
            if name in self.faults:
                raise self.faults[name]
            if await self.control.overtaken():
                self.events.append(f"{name} gave way")
                return
            self.events.append(f"{name} runs")
            settled()

        return ensureDeferred(self.control.run(work, name, core=True, replaces=True))

    def change(self) -> Deferred[None]:
        return ensureDeferred(self.control.settled()).addCallback(lambda _: self.events.append("users change"))

    def read(self, name: str) -> None:
        """Let this operation finish reading its configuration."""
        self.gates[name].callback(None)

    def test_the_next_one_runs(self) -> None:
        """The first Start, once read, is answered by the outcome of the second, which does not give way itself."""
        done = [self.start(name) for name in "abc"] + [self.change()]
        for name in "abc":
            self.read(name)
        for deferred in done:
            self.successResultOf(deferred)
        self.assertEqual(self.events, ["b runs", "a gave way", "c runs", "users change"])

    def test_one_that_is_refused(self) -> None:
        """If the second one is refused, the first runs, and only the refused one's caller gets that error."""
        first, second = self.start("a"), self.start("b")
        self.faults["b"] = CoreFailed("not that")
        self.read("a")
        self.read("b")
        self.successResultOf(first)
        self.failureResultOf(second, CoreFailed)
        self.assertEqual(self.events, ["a runs"])

    def test_users_between(self) -> None:
        """With a change of users between two Starts the first one runs."""
        first, changed, second = self.start("a"), self.change(), self.start("b")
        self.read("a")
        self.successResultOf(first)
        self.successResultOf(changed)
        self.read("b")
        self.successResultOf(second)
        self.assertEqual(self.events, ["a runs", "users change", "b runs"])

    def test_a_stop(self) -> None:
        """Both are aborted, and neither runs."""
        first, second = self.start("a"), self.start("b")
        self.read("a")
        self.control.abort()
        self.failureResultOf(first, Aborted)
        self.failureResultOf(second, Aborted)
        self.assertEqual(self.events, [])
