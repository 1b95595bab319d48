"""Changes of users that need a new run of the core."""

from __future__ import annotations

from collections.abc import Mapping

from twisted.internet.defer import CancelledError, Deferred

from drivers.pretended.scripted import Gate, MemoryGeneration, MemoryPlan
from node.backend.health import AUDIT
from node.backend.pending import WINDOW
from node.base.errors import (
    CoreFailed,
    InvalidConfig,
    NodeError,
    NotStarted,
    PortTaken,
    UsersRefused,
)
from node.contract.accounts import Accounts
from tests.harness.memory import person
from tests.harness.runner import ANN, BOB, CY, GRACE, RunnerTests


class Renewals(RunnerTests):
    """Changes that a core cannot take while it runs, and the new run for them."""

    def setUp(self) -> None:
        super().setUp()
        self.driver.dear = lambda change: True

    def renewed(self, sync: Deferred[None]) -> Deferred[None]:
        """Let the batching window end."""
        self.pass_time(1)
        return sync

    def test_the_new_one_takes_its_place(self) -> None:
        """It does not count as a crash, and the counters of the previous run are read."""
        first = self.started("a", ANN)
        self.driver.stopping.shut = True
        sync = self.renewed(self.sync_user(BOB))
        self.assertRaises(NotStarted, self.runner.current)
        self.assertEqual((self.generations.counting, self.read), ((first,), [[first]]))
        self.driver.stopping.open()
        self.successResultOf(sync)
        self.assertEqual((self.runner.status.state, self.accounts()), ("running", {"ann": b"one", "bob": b"two"}))
        self.assertEqual((len(self.driver.cores), self.generations.counting), (2, (self.core,)))

    def test_those_of_the_window_come_together(self) -> None:
        """One run for all changes of the window; a cheap change does not wait."""
        self.driver.dear = lambda change: change.packed is not None
        self.started("a", ANN)
        first = self.sync_user(BOB)
        self.clock.advance(WINDOW / 2)
        second = self.sync_user(CY)
        self.assertEqual(len(self.driver.launches), 1)
        self.clock.advance(WINDOW)
        for sync in (first, second):
            self.successResultOf(sync)
        self.successResultOf(self.sync_user(person("ann")))
        self.assertEqual((len(self.driver.launches), set(self.accounts())), (2, {"bob", "cy"}))

    def test_a_port_that_is_taken_for_a_while(self) -> None:
        """It is retried, as at a Start."""
        self.started("a", ANN)
        self.driver.faults = [PortTaken("port 1 is taken")] * 3
        self.successResultOf(self.renewed(self.renewed(self.sync_user(BOB))))
        self.assertEqual(set(self.accounts()), {"ann", "bob"})

    def test_the_core_refuses_new_users(self) -> None:
        """Their callers get the refusals; the core keeps running, unless a user was removed: removed users are out."""
        core = self.started("a", ANN, BOB)
        self.driver.unchecked = InvalidConfig("not him")
        cy = person("Cy", "three", "a")
        [(name, reason)] = self.failureResultOf(self.renewed(self.sync_users(ANN, BOB, cy)), UsersRefused).value.refused
        self.assertEqual((name, reason, self.core), ("Cy", "a: not him", core))
        refused = self.failureResultOf(self.renewed(self.sync_users(BOB, cy)), UsersRefused).value.refused
        self.assertEqual([name for name, _ in refused], ["Cy"])
        self.assertEqual((core.alive, self.accounts()), (False, {"bob": b"two"}))

    def test_no_core_comes_up_with_them(self) -> None:
        """A core starts without them, and without the users removed with them. The node retries until they are in."""
        self.started("a", ANN, BOB)
        self.driver.unchecked = CoreFailed("killed")
        sync = self.renewed(self.sync_users(BOB, CY))
        [(name, reason)] = self.failureResultOf(sync, UsersRefused).value.refused
        self.assertEqual((name, reason), ("cy", "a: killed; the node tries again"))
        self.assertEqual((self.runner.status.state, self.accounts()), ("running", {"bob": b"two"}))
        warned = "1 users are missing from the core, or have an old credential there: a: killed; the node tries again"
        self.assertEqual(self.runner.warnings[1:], [warned])
        self.driver.unchecked = None
        self.pass_time(3)
        self.assertEqual((set(self.accounts()), self.runner.warnings), ({"bob", "cy"}, self.runner.warnings[:1]))
        launches = len(self.driver.launches)
        self.pass_time(3 * AUDIT)
        self.assertEqual(len(self.driver.launches), launches)

    def test_a_refusal_is_final(self) -> None:
        """The node does not start a core again with users whom it has refused, and `info` warns all the time."""
        self.started("a", ANN)
        self.driver.unchecked = InvalidConfig("not him")
        self.failureResultOf(self.renewed(self.sync_users(ANN, CY)), UsersRefused)
        self.pass_time(3 * AUDIT)
        self.assertEqual(len(self.driver.checks), 1)
        self.assertIn("not him", "".join(self.runner.warnings))
        self.successResultOf(self.sync_user(person("cy")))
        self.assertEqual(self.runner.warnings, [])

    def test_what_was_refused_once(self) -> None:
        """Another user does not bring a refused one back; sending the refused one again does."""
        self.started("a", ANN)
        self.driver.unchecked = CoreFailed("killed")
        self.failureResultOf(self.renewed(self.sync_users(ANN, CY)), UsersRefused)
        self.driver.unchecked = None
        self.successResultOf(self.renewed(self.sync_user(BOB)))
        self.assertEqual(set(self.accounts()), {"ann", "bob"})
        self.successResultOf(self.renewed(self.sync_user(CY)))
        self.assertEqual(set(self.accounts()), {"ann", "bob", "cy"})

    def test_neither_runs(self) -> None:
        """It counts as a crash then: the core restarts, with all users."""
        self.started("a", ANN)
        self.driver.faults = [CoreFailed("it did not come up")] * 2
        sync = self.sync_user(BOB)
        self.clock.advance(WINDOW)
        self.failureResultOf(sync, CoreFailed)
        self.assertIn("backend restarting: it did not come up", self.told)
        self.pass_time(0)
        self.assertEqual((self.runner.status.state, self.accounts()), ("running", {"ann": b"one", "bob": b"two"}))

    def test_any_error(self) -> None:
        """No core after a batch is a crash, also if the configuration was refused or the machine had no more files."""
        for fault in (InvalidConfig("it is odd"), OSError("no more files"), CancelledError()):
            self.started("a", ANN)
            self.driver.faults = [fault] * 2
            sync = self.sync_user(BOB)
            self.clock.advance(WINDOW)
            self.failureResultOf(sync, CoreFailed)
            self.assertIn("backend restarting", self.told)
            self.pass_time(0)
            self.assertEqual((self.runner.status.state, self.accounts()), ("running", {"ann": b"one", "bob": b"two"}))
            self.flushLoggedErrors()
            self.stopped()

    def test_a_new_one_that_is_dead(self) -> None:
        """So is a new core that has died by then."""
        self.started("a", ANN)
        launch = self.driver.launch

        async def dead(plan: MemoryPlan, target: Mapping[str, Accounts], seconds: float) -> MemoryGeneration:
            core = await launch(plan, target, seconds)
            core.die()
            return core

        self.driver.launch = dead  # type: ignore[method-assign]
        sync = self.sync_user(BOB)
        self.clock.advance(WINDOW)
        self.successResultOf(sync)
        self.assertEqual(self.runner.status.state, "restarting")
        self.driver.launch = launch  # type: ignore[method-assign]
        self.pass_time(1)
        self.assertEqual((self.runner.status.state, self.accounts()), ("running", {"ann": b"one", "bob": b"two"}))

    def test_an_end_that_fails(self) -> None:
        """A core that cannot be wound down is still ended before another one begins."""
        core = self.started("a", ANN)

        async def wind_down() -> None:
            raise OSError("no more files")

        core.wind_down = wind_down  # type: ignore[method-assign]
        self.successResultOf(self.renewed(self.sync_user(BOB)))
        self.assertFalse(core.alive)
        self.assertEqual(len(self.flushLoggedErrors(OSError)), 1)
        self.assertEqual(self.accounts(), {"ann": b"one", "bob": b"two"})

    def test_it_dies_in_the_window(self) -> None:
        """The next run brings the changes; there is one launch for both."""
        core = self.started("a", ANN)
        sync = self.sync_user(BOB)
        core.die()
        self.successResultOf(self.renewed(sync))
        self.assertEqual((len(self.driver.launches), set(self.accounts())), (2, {"ann", "bob"}))

    def test_an_equal_start_meanwhile(self) -> None:
        """It waits for the new core and joins it."""
        self.started("a", ANN)
        self.driver.stopping.shut = True
        sync = self.renewed(self.sync_user(BOB))
        start = self.start("a", ANN, BOB)
        self.driver.stopping.open()
        for deferred in (sync, start):
            self.successResultOf(deferred)
        self.assertEqual(len(self.driver.cores), 2)

    def test_another_start_meanwhile(self) -> None:
        """No core is launched for users of a backend that is not wanted any more."""
        self.started("a", ANN)
        self.driver.stopping.shut = True
        sync = self.renewed(self.sync_user(BOB))
        start = self.start("b", person("cy", "three", "b"))
        self.driver.stopping.open()
        for deferred in (sync, start):
            self.successResultOf(deferred)
        self.assertEqual([core.plan.config for core in self.driver.cores], ["a", "b"])

    def test_a_whole_set_meanwhile(self) -> None:
        """A starting run gets it, whatever users that run began with."""
        self.started("a", ANN)
        self.driver.stopping.shut = True
        sync = self.renewed(self.sync_user(BOB))
        whole = self.sync_users(ANN, CY)
        self.driver.stopping.open()
        self.successResultOf(sync)
        self.assertNoResult(whole)
        self.successResultOf(self.renewed(whole))
        self.assertEqual(set(self.accounts()), {"ann", "cy"})

    def test_a_refused_start_meanwhile(self) -> None:
        """A configuration that the core cannot build is refused before anything is touched, also now."""
        self.started("a", ANN)
        self.driver.stopping.shut = True
        sync = self.renewed(self.sync_user(BOB))
        self.failureResultOf(self.start("b unbuildable"), InvalidConfig)
        self.driver.stopping.open()
        self.successResultOf(sync)
        self.assertEqual((len(self.driver.cores), set(self.accounts())), (2, {"ann", "bob"}))

    def test_a_grace_meanwhile(self) -> None:
        """A core that waits for a Start is not ended for a removal that it cannot take: others are connected to it."""
        core = self.started("a", ANN, BOB)
        checking = Gate()
        checking.shut = True

        async def check(plan: MemoryPlan, target: Mapping[str, Accounts]) -> None:
            await checking.passed()

        self.patch(self.driver, "check", check)
        removal = self.renewed(self.sync_user(person("bob")))
        self.stopped(GRACE)
        checking.open()
        self.pass_time(1)
        self.successResultOf(removal)
        self.assertEqual((self.driver.running, self.runner.status.state), ([core], "stopped"))
        self.pass_time(GRACE)
        self.assertEqual(self.driver.running, [])

    def test_a_stop_meanwhile(self) -> None:
        """No core is left, and none was launched."""
        self.started("a", ANN)
        self.driver.stopping.shut = True
        sync = self.renewed(self.sync_user(BOB))
        stop = self.stop()
        self.driver.stopping.open()
        self.successResultOf(stop)
        sync.addErrback(lambda failure: failure.trap(NodeError))
        self.assertEqual((self.driver.running, self.runner.status.state), ([], "stopped"))
        self.assertEqual(len(self.driver.launches), 1)
