"""Stops, at once and with a grace period."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Mapping

from twisted.internet.defer import CancelledError, Deferred, ensureDeferred

from drivers.pretended.scripted import Gate, MemoryGeneration, MemoryPlan
from node.backend.replace import UNWANTED
from node.backend.wind_down import CALLER
from node.base.errors import (
    Aborted,
    CoreFailed,
    InvalidConfig,
    NodeError,
    NotInitialized,
    ShuttingDown,
)
from node.contract.accounts import Accounts
from node.contract.driver import Generation
from node.contract.saved import Changes
from tests.harness.memory import person
from tests.harness.runner import ANN, BOB, CY, GRACE, RunnerTests


class Stops(RunnerTests):
    def test_stop(self) -> None:
        """The counters are read, the core ends, and nothing is left of it; a second Stop is no error."""
        self.started("a", ANN)
        self.stopped()
        self.assertEqual((self.driver.running, self.readings, self.runner.status.state), ([], 1, "stopped"))
        self.assertRaises(NotInitialized, self.runner.status.require)
        self.failureResultOf(self.sync_users(ANN), NotInitialized)
        self.failureResultOf(self.sync_user(ANN), NotInitialized)
        self.stopped()

    def test_nothing_is_lost_at_the_end(self) -> None:
        """An ending core takes no connections, then it is read until its counters rest, and only then it goes."""
        core = self.started("a", ANN)
        self.moving = 3
        stop = self.stop()
        self.assertTrue(core.wound_down)
        self.assertTrue(core.alive)
        self.pass_time(1)
        self.successResultOf(stop)
        self.assertEqual((self.readings, self.driver.running), (5, []))
        self.assertEqual(self.read, [[core]] * 5)
        self.assertEqual(self.generations.counting, ())

    def test_nothing_is_kept(self) -> None:
        """The memory for its many users is freed, not kept until the next Start."""
        core = weakref.ref(self.started("a", ANN))
        self.stopped()
        for known in (self.driver.cores, self.read):
            known.clear()
        gc.collect()
        self.assertIsNone(core())

    def test_counters_that_never_rest(self) -> None:
        """The reading of them is bounded."""
        self.started("a", ANN)
        self.moving = 10**6
        stop = self.stop()
        self.pass_time(CALLER.rest + 1)
        self.successResultOf(stop)
        self.assertEqual(self.driver.running, [])

    def test_counters_that_do_not_come(self) -> None:
        """A core that stalls while it is read is not waited for as long as a call to it may take."""
        self.started("a", ANN)
        never = Gate()
        never.shut = True

        async def read(_: Generation) -> bool:
            await never.passed()
            return True

        self.patch(self, "_count", read)
        stop = self.stop()
        self.pass_time(CALLER.rest + 1)
        self.successResultOf(stop)
        self.assertEqual(self.driver.running, [])

    def test_a_stop_while_a_core_is_read(self) -> None:
        """A core that a Start was about to end is not taken back by a panel's Stop and Start: it serves no more."""
        core = self.started("a", ANN)
        self.moving = 10**6
        start = self.start("b", BOB)
        self.assertTrue(core.wound_down)
        stop, same = self.stop(GRACE), self.start("a", ANN)
        self.failureResultOf(start, Aborted)
        self.moving = 0
        self.pass_time(1)
        for deferred in (stop, same):
            self.successResultOf(deferred)
        self.assertFalse(core.alive)
        self.assertEqual(self.accounts(), {"ann": b"one"})

    def test_stop_aborts_a_start(self) -> None:
        """A Stop aborts a Start in any phase, and no core is left."""
        gates: dict[str, Callable[[], Gate]] = {
            "reading": lambda: self.driver.reading,
            "stopping": lambda: self.driver.stopping,
            "launching": lambda: self.driver.launching,
        }
        for name, gate in gates.items():
            self.started("a", ANN)
            gate().shut = True
            start, after = self.start("b", BOB), self.start("c", CY)
            stop = self.stop()
            self.assertEqual(self.runner.status.state, "stopped", name)
            self.pass_time(UNWANTED)
            for deferred in (start, after):
                self.failureResultOf(deferred, Aborted)
            gate().open()
            self.successResultOf(stop)
            self.assertEqual((self.driver.running, self.runner.status.state), ([], "stopped"), name)

    def starts_clear_up_until(self) -> Deferred[None]:
        """Let no core start, and each aborted Start clean up until this fires."""
        cleared: Deferred[None] = Deferred()

        async def slow(plan: MemoryPlan, target: Mapping[str, Accounts], seconds: float) -> MemoryGeneration:
            try:
                return await Deferred()
            finally:
                await cleared

        self.driver.launch = slow  # type: ignore[method-assign]
        return cleared

    def test_stopped_for_callers_at_once(self) -> None:
        """A Stop counts although the Start that it aborted still cleans up."""
        cleared = self.starts_clear_up_until()
        start, stop = self.start("a", ANN), self.stop()
        self.assertEqual(self.runner.status.state, "stopped")
        self.assertRaises(NotInitialized, self.runner.status.require)
        self.pass_time(UNWANTED)
        self.assertNoResult(stop)
        cleared.callback(None)
        self.failureResultOf(start, Aborted)
        self.successResultOf(stop)

    def test_a_start_that_fails_when_it_is_aborted(self) -> None:
        """Whatever fails while it cleans up, nothing comes back after a Stop."""
        launch = self.driver.launch

        async def failing(plan: MemoryPlan, target: Mapping[str, Accounts], seconds: float) -> MemoryGeneration:
            try:
                return await Deferred()
            except CancelledError:
                raise OSError("no more files") from None

        for crash in (False, True):
            self.patch(self.driver, "launch", launch)
            core = self.started("a", ANN)
            self.patch(self.driver, "launch", failing)
            if crash:
                core.die()
                self.pass_time(0)
            else:
                self.start("b", BOB).addErrback(lambda failure: failure.trap(OSError))
            stop = self.stop()
            self.pass_time(UNWANTED)
            self.successResultOf(stop)
            self.assertEqual((self.driver.running, self.runner.status.state), ([], "stopped"))
            self.assertEqual(len(self.flushLoggedErrors(OSError)), crash)

    def test_two_stops(self) -> None:
        """Stops at the same time all succeed, none before the core has ended, which is done once."""
        self.started("a", ANN)
        self.driver.stopping.shut = True
        both = [self.stop(), self.stop(GRACE)]
        for deferred in both:
            self.assertNoResult(deferred)
        self.driver.stopping.open()
        for deferred in both:
            self.successResultOf(deferred)
        self.assertEqual((self.driver.running, self.readings), ([], 1))

    def test_two_stops_while_a_start_clears_up(self) -> None:
        """The second does not end the cleanup that the first one waits for: both are answered when no core is left."""
        cleared = self.starts_clear_up_until()
        start, both = self.start("a", ANN), [self.stop(), self.stop()]
        self.pass_time(UNWANTED)
        for deferred in (start, *both):
            self.assertNoResult(deferred)
        cleared.callback(None)
        self.failureResultOf(start, Aborted)
        for deferred in both:
            self.successResultOf(deferred)

    def test_stop_ends_the_restarts(self) -> None:
        """After a Stop a core is not restarted, and the logs have no error for it."""
        self.started("a", ANN)
        self.driver.launching.shut = True
        self.core.die()
        self.pass_time(0)
        stop = self.stop()
        self.pass_time(UNWANTED)
        self.successResultOf(stop)
        self.driver.launching.open()
        self.pass_time(60)
        self.assertEqual((self.driver.running, self.runner.status.state), ([], "stopped"))

    def test_a_hung_core_ends_in_time(self) -> None:
        """The counters of a core that does not answer are not waited for."""
        self.started("a", ANN).silent = True
        stop = self.stop()
        self.pass_time(2 * CALLER.answer)
        self.successResultOf(stop)
        self.assertEqual(self.readings, 0)

    def test_closed(self) -> None:
        """After the node's end no Start runs."""
        self.started("a", ANN)
        self.successResultOf(ensureDeferred(self.runner.close()))
        self.failureResultOf(self.start("a", ANN), ShuttingDown)
        self.assertEqual(self.driver.running, [])


class Grace(RunnerTests):
    def test_stopped_for_callers(self) -> None:
        """The core lives on, and all calls say that there is none."""
        core = self.started("a", ANN)
        self.stopped(GRACE)
        self.assertEqual((self.driver.running, self.runner.status.state), ([core], "stopped"))
        self.assertRaises(NotInitialized, self.runner.status.require)

    def test_taken_back(self) -> None:
        """The same Start takes the core back, with its users; the scheduled end is cancelled."""
        core = self.started("a", ANN, BOB)
        self.stopped(GRACE)
        self.pass_time(10)
        self.successResultOf(self.start("a", BOB, CY))
        self.assertEqual((self.core, self.runner.status.state, set(self.accounts())), (core, "running", {"bob", "cy"}))
        self.pass_time(2 * GRACE)
        self.assertEqual(self.driver.cores, [core])

    def test_another_start(self) -> None:
        """Another Start ends the core at once."""
        core = self.started("a", ANN)
        self.stopped(GRACE)
        self.successResultOf(self.start("b", ANN))
        self.assertFalse(core.alive)
        self.assertEqual((self.core.plan.config, self.readings), ("b", 1))
        self.pass_time(2 * GRACE)
        self.assertTrue(self.core.alive)

    def test_a_refused_start(self) -> None:
        """A refused Start changes nothing: the backend stays stopped, and the core goes on waiting."""
        core = self.started("a", ANN)
        self.stopped(GRACE)
        self.failureResultOf(self.start("b bad", ANN), InvalidConfig)
        self.assertEqual((self.driver.running, self.runner.status.state), ([core], "stopped"))
        self.pass_time(GRACE)
        self.assertEqual(self.driver.running, [])

    def test_it_ends(self) -> None:
        """When its time is over the core ends, its counters read, and a Start launches a new one."""
        self.started("a", ANN)
        self.stopped(GRACE)
        self.pass_time(GRACE - 1)
        self.assertEqual(len(self.driver.running), 1)
        self.pass_time(1)
        self.assertEqual((self.driver.running, self.readings), ([], 1))
        self.successResultOf(self.start("a", ANN))
        self.assertEqual(len(self.driver.cores), 2)

    def test_each_stop_renews_it(self) -> None:
        """A panel that sends a Stop and a refused Start every ten seconds ends no connection."""
        core = self.started("a", ANN)
        for _ in range(10):
            self.stopped(GRACE)
            self.failureResultOf(self.start("b bad", ANN), InvalidConfig)
            self.pass_time(10)
        self.assertTrue(core.alive)

    def test_a_stop_without_grace(self) -> None:
        """A Stop without grace ends it at once."""
        self.started("a", ANN)
        self.stopped(GRACE)
        self.stopped()
        self.assertEqual(self.driver.running, [])

    def test_a_stop_while_another_start_waits(self) -> None:
        """A core that another Start was about to end is not kept: users could not be removed from it."""
        core = self.started("a", ANN)
        self.stopped(GRACE)
        self.driver.stopping.shut = True
        start, stop = self.start("b", BOB), self.stop(GRACE)
        self.failureResultOf(start, Aborted)
        self.driver.stopping.open()
        self.successResultOf(stop)
        self.assertFalse(core.alive)

    def test_its_end_does_not_abort_a_start(self) -> None:
        """A Start under way when the time is over succeeds: the same, another, and a refused one as always."""
        for config in ("a", "b", "b bad"):
            self.started("a", ANN)
            self.stopped(GRACE)
            self.pass_time(GRACE - 1)
            self.driver.reading.shut = self.driver.launching.shut = True
            start = self.start(config, ANN)
            self.pass_time(2)
            self.driver.reading.open()
            self.driver.launching.open()
            if config == "b bad":
                self.failureResultOf(start, InvalidConfig)
                self.assertEqual(self.driver.running, [])
            else:
                self.successResultOf(start)
                self.assertEqual(self.core.plan.config, config)
            self.stopped()

    def test_removed_users_are_out(self) -> None:
        """Removals and changed credentials apply, additions wait for the Start; callers get `NotInitialized`."""
        new = person("bob", "new", "a")
        calls: dict[str, Callable[[], list[Deferred[None]]]] = {
            "SyncUser": lambda: [self.sync_user(user) for user in (person("ann"), new, CY)],
            "SyncUsers": lambda: [self.sync_users(new, CY, person("dan", "four", "a"))],
            "chunks": lambda: [ensureDeferred(self.runner.users.update([person("ann"), new, CY]))],
        }
        for name, call in calls.items():
            self.started("a", ANN, BOB, person("dan", "four", "a"))
            self.stopped(GRACE)
            for deferred in call():
                self.failureResultOf(deferred, NotInitialized)
            self.assertEqual(self.accounts(), {"dan": b"four"}, name)
            self.successResultOf(self.start("a", new, CY))
            self.assertEqual(self.accounts(), {"bob": b"new", "cy": b"three"}, name)
            self.stopped()

    def test_a_core_that_dies_in_it(self) -> None:
        """It is not restarted, and the same Start runs another."""
        self.started("a", ANN).die()
        self.stopped(GRACE)
        self.pass_time(1)
        self.stopped()
        core = self.started("a", ANN)
        self.stopped(GRACE)
        core.die()
        self.pass_time(1)
        self.assertEqual((self.driver.running, self.runner.status.state), ([], "stopped"))
        self.successResultOf(self.start("a", ANN))
        self.assertEqual(self.accounts(), {"ann": b"one"})

    def test_a_start_that_fails_in_it(self) -> None:
        """A stopped backend stays stopped, in the core, for callers and on disk, if a Start in its grace fails."""
        for fault, state in ((CoreFailed("it fell"), "failed"), (InvalidConfig("it is odd"), "stopped")):
            self.started("a", ANN, BOB)
            self.stopped(GRACE)
            self.driver.faults = [fault]
            error = self.failureResultOf(self.start("b", ANN), NodeError).value
            self.assertEqual(error.text, fault.text)
            self.pass_time(2 * GRACE)
            self.assertEqual((self.driver.running, self.runner.status.state), ([], state))
            self.assertEqual((self.record.request, self.record.kept, self.runner.accepted), (b"", {}, None))
            kept = Changes()
            self.runner.desired.recorder.save(kept)
            self.assertEqual((kept.request, kept.users), (b"", {}))
            self.failureResultOf(self.sync_user(BOB), NodeError)
