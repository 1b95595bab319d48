"""The order of control: one after another, equal ones together, all ended by a Stop, and no caller matters."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from twisted.internet.defer import CancelledError, Deferred, ensureDeferred
from twisted.trial.unittest import SynchronousTestCase

from node.backend.control import Control, Settled
from node.errors import Aborted, CoreFailed

Work = Callable[[Settled], Coroutine[Any, Any, None]]


class Steps:
    """Operations that go on when the test says so; `events` is what they did."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.waiting: dict[str, Deferred[None]] = {}

    def work(self, name: str, settles: bool = False) -> Work:
        """Begins, settles if it is one of those who do so early, waits for `end`, ends."""

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
        """Operations on the core begin in order of arrival, each after the end of the one before."""
        done = [self.run_core(name) for name in "abc"]
        for name in "abc":
            self.assertEqual(self.steps.events[-1], f"{name} begins")
            self.steps.end(name)
        for deferred in done:
            self.successResultOf(deferred)
        self.assertEqual(len(self.steps.events), 6)

    def test_users_do_not_wait_for_a_core(self) -> None:
        """What changes users begins when what came before has settled its own, while that core is still on its way."""
        self.run_core("start", settles=True)
        users = self.run_users("sync")
        self.assertEqual(self.steps.events, ["start begins", "sync begins"])
        self.steps.end("sync")
        self.successResultOf(users)

    def test_users_wait_for_what_is_not_settled(self) -> None:
        """Neither a sync nor a single user overtakes a Start that has not said yet who its users are."""
        self.run_core("start")
        single = ensureDeferred(self.control.settled())
        self.run_users("sync")
        self.assertNoResult(single)
        self.assertEqual(self.steps.events, ["start begins"])
        self.steps.end("start")
        self.successResultOf(single)
        self.assertEqual(self.steps.events[-1], "sync begins")

    def test_a_core_does_not_wait_for_users_in_force(self) -> None:
        """A Start begins when a sync before it is settled; it need not be in force."""
        self.run_users("sync", settles=True)
        self.run_core("start")
        self.assertEqual(self.steps.events, ["sync begins", "start begins"])

    def test_equal_ones_are_one(self) -> None:
        """Operations on one subject that follow each other are one, and all callers are told how it ended."""
        done = [self.run_core(name, "subject") for name in "abc"]
        self.assertEqual(self.steps.events, ["a begins"])
        self.steps.end("a", CoreFailed("no"))
        for deferred in done:
            self.failureResultOf(deferred, CoreFailed)

    def test_equal_ones_that_wait_are_one(self) -> None:
        """They are one before it is their turn as well."""
        self.run_core("first", "one")
        done = [self.run_core(name, "two") for name in "ab"]
        self.steps.end("first")
        self.steps.end("a")
        for deferred in done:
            self.successResultOf(deferred)
        self.assertNotIn("b begins", self.steps.events)

    def test_nothing_joins_across_another(self) -> None:
        """An operation between two equal ones keeps them two: whatever it is, and a single user's change, too."""
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

    def test_nothing_joins_across_what_is_over(self) -> None:
        """Nor do they become one when what came between them is over already."""
        self.run_core("start", "subject", settles=True)
        self.run_users("sync")
        self.steps.end("sync")
        self.run_core("again", "subject")
        self.steps.end("start")
        self.assertEqual(self.steps.events[-1], "again begins")

    def test_operations_without_a_subject_never_join(self) -> None:
        """Stops and syncs are each one of their own."""
        self.run_core("a")
        self.run_core("b")
        self.steps.end("a")
        self.assertEqual(self.steps.events[-1], "b begins")

    def test_what_is_over_is_not_joined(self) -> None:
        """An equal operation that comes after the end begins anew."""
        self.run_core("a", "subject")
        self.steps.end("a")
        self.run_core("b", "subject")
        self.assertEqual(self.steps.events[-1], "b begins")

    def test_abort(self) -> None:
        """Abort ends what is under way and what waits; nothing of that begins, all callers hear of it, others go on."""
        done = [self.run_core("a", settles=True), self.run_core("b"), self.run_users("sync"), self.run_core("c", "c")]
        self.control.abort()
        for deferred in done:
            self.failureResultOf(deferred, Aborted)
        self.assertEqual(self.steps.events, ["a begins", "a aborted"])
        self.run_core("stop")
        self.assertEqual(self.steps.events[-1], "stop begins")

    def test_what_comes_after_an_abort_waits_for_the_end(self) -> None:
        """An aborted operation that still clears up keeps the next one waiting."""
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

    def test_clearing_up_is_not_ended(self) -> None:
        """What was aborted clears up once, however many aborts come meanwhile, and what comes after waits for it."""
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

    def test_what_is_final_is_not_aborted(self) -> None:
        """It goes on to its end, and so does one that waits for its turn."""
        work = [ensureDeferred(self.control.run(self.steps.work(name), core=True, final=True)) for name in "ab"]
        self.control.abort()
        for name, done in zip("ab", work, strict=True):
            self.steps.end(name)
            self.successResultOf(done)

    def test_a_caller_that_hangs_up(self) -> None:
        """A caller who gives up ends nothing, and those who joined him are told the end."""
        gone, patient = self.run_core("a", "subject"), self.run_core("b", "subject")
        waits = ensureDeferred(self.control.settled())
        for deferred in (gone, waits):
            deferred.cancel()
            self.failureResultOf(deferred, CancelledError)
        self.steps.end("a")
        self.successResultOf(patient)
        self.assertEqual(self.steps.events, ["a begins", "a ends"])

    def test_a_fault_is_only_the_callers(self) -> None:
        """An operation that fails, foreseen or not, does not keep the next one from beginning."""
        failed = self.run_core("a")
        self.run_core("b")
        self.steps.end("a", KeyError("x"))
        self.failureResultOf(failed, KeyError)
        self.assertEqual(self.steps.events[-1], "b begins")

    def test_what_no_controller_asked_for_waits_for_what_came_before_only(self) -> None:
        """Whoever asks again and again puts it off for no longer than that; and it is done before what comes next."""
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
