"""Starts that change nothing, and Starts that fail."""

from __future__ import annotations

from twisted.internet.defer import CancelledError, ensureDeferred

from node.backend.replace import LAST_TRY, PORT_RETRY, UNWANTED
from node.backend.starts import BACK_TIMEOUT, MAX_CONFIG
from node.backend.supervisor import START_TIMEOUT
from node.base.errors import (
    Aborted,
    CoreFailed,
    InvalidConfig,
    NodeError,
    PortTaken,
)
from tests.harness.memory import person
from tests.harness.runner import ANN, BOB, CY, GRACE, WAITING, RunnerTests


class IdenticalStarts(RunnerTests):
    def test_nothing_happens(self) -> None:
        """The same backend again leaves the core and its users alone."""
        core = self.started("a,b", ANN)
        self.successResultOf(self.start("a,b", ANN))
        self.assertEqual((self.driver.cores, self.driver.batches), ([core], []))

    def test_by_meaning(self) -> None:
        """It is the same if the driver's fingerprints are equal; the excluded inbounds are a set."""
        self.successResultOf(self.start("a,b,c  x", ANN, exclude=("b", "c")))
        self.successResultOf(self.start("a,b,c x", ANN, exclude=("c", "b", "c")))
        self.assertEqual(len(self.driver.cores), 1)
        self.successResultOf(self.start("a,b,c x", ANN, exclude=("c",)))
        self.assertEqual(len(self.driver.cores), 2)

    def test_its_users_follow(self) -> None:
        """Only users that differ are changed in the running core."""
        core = self.started("a,b", ANN, BOB)
        self.successResultOf(self.start("a,b", CY, ANN))
        self.assertIs(self.core, core)
        self.assertEqual(self.accounts(), {"ann": b"one", "cy": b"three"})
        [changes] = self.driver.batches
        self.assertEqual({change.key for change in changes}, {"bob", "cy"})

    def test_bad_users_are_left_out(self) -> None:
        """Unusable users of a Start, and those that the core refuses, are logged by name; the Start succeeds."""
        self.started("a,b", person("dan", "bad", "a"))
        self.started("a,b", ANN, person("eve", "bad", "a"), person("fay", "refused", "a"))
        self.assertEqual(self.accounts(), {"ann": b"one"})
        for name in ("dan", "eve", "fay"):
            self.assertIn(f"user '{name}' is left out", self.told)

    def test_two_at_once(self) -> None:
        """Two at once are one launch, and both callers get its outcome."""
        self.driver.launching.shut = True
        both = [self.start("a", ANN), self.start("a", ANN)]
        self.assertEqual(len(self.driver.launches), 1)
        self.driver.launching.open()
        for deferred in both:
            self.successResultOf(deferred)
        self.assertEqual(len(self.driver.launches), 1)

    def test_not_across_a_stop(self) -> None:
        """A Stop between two of them aborts the first, and the second runs."""
        self.driver.launching.shut = True
        first, stop, second = self.start("a", ANN), self.stop(), self.start("a", ANN)
        self.pass_time(UNWANTED)
        self.failureResultOf(first, Aborted)
        self.successResultOf(stop)
        self.driver.launching.open()
        self.successResultOf(second)
        self.assertEqual(self.runner.status.state, "running")

    def test_not_across_users(self) -> None:
        """A user who was removed between two of them is back after the second."""
        self.driver.launching.shut = True
        self.start("a", ANN, BOB)
        self.sync_user(person("bob"))
        second = self.start("a", ANN, BOB)
        self.driver.launching.open()
        self.successResultOf(second)
        self.assertEqual(set(self.accounts()), {"ann", "bob"})

    def test_a_caller_that_hangs_up(self) -> None:
        """The core starts though the caller is gone."""
        self.driver.launching.shut = True
        caller = self.start("a", ANN)
        caller.cancel()
        self.failureResultOf(caller, CancelledError)
        self.driver.launching.open()
        self.assertEqual(self.runner.status.state, "running")

    def test_while_it_restarts(self) -> None:
        """The same backend again while its core waits for a restart restarts it now."""
        self.started("a", ANN)
        self.driver.faults = [CoreFailed("no")] * 4
        self.core.die()
        self.pass_time(8)
        self.assertEqual((self.runner.status.state, self.driver.faults), ("restarting", []))
        self.successResultOf(self.start("a", BOB))
        self.assertEqual(self.accounts(), {"bob": b"two"})

    def test_the_core_dies_meanwhile(self) -> None:
        """A core that dies while an identical Start's users are built is run again, also in the grace after a Stop."""
        pool = self.slow_pool()
        for grace in (None, GRACE):
            start = self.start("a", ANN)
            pool.work()
            self.successResultOf(start)
            if grace is not None:
                self.stopped(grace)
            start = self.start("a", BOB)
            self.core.die()
            pool.work()
            pool.work()
            self.successResultOf(start)
            self.pass_time(0)
            self.assertEqual((self.runner.status.state, self.accounts()), ("running", {"bob": b"two"}))

    def test_another_call_removes_a_user_meanwhile(self) -> None:
        """That removal is still under way when the Start is done, which does not fail the Start."""
        self.started("a", ANN, BOB)
        self.driver.applying.shut = True
        start = self.start("a", ANN, BOB, CY)
        removal = ensureDeferred(self.runner.users.update([person("ann")]))
        self.driver.applying.let_through()
        self.successResultOf(start)
        self.assertNoResult(removal)
        self.driver.applying.open()
        self.successResultOf(removal)
        self.assertEqual(set(self.accounts()), {"bob", "cy"})


class FailedStarts(RunnerTests):
    def test_refused_before_anything_is_touched(self) -> None:
        """A configuration that is refused when it is parsed or checked leaves the running one as it is."""
        core = self.started("a", ANN)
        for config in ("b bad", "b unbuildable"):
            self.failureResultOf(self.start(config, BOB), InvalidConfig)
            self.assertEqual((self.driver.running, self.accounts()), ([core], {"ann": b"one"}))
            self.assertEqual((self.runner.status.state, self.runner.status.reason), ("running", ""))
        self.successResultOf(self.sync_users(CY))
        self.assertEqual(self.accounts(), {"cy": b"three"})

    def test_a_configuration_that_is_too_long(self) -> None:
        """A too long configuration is refused before it is parsed."""
        core = self.started("a", ANN)
        error = self.failureResultOf(self.start("b" + " " * MAX_CONFIG), InvalidConfig).value
        self.assertIn("8 MiB", error.text)
        self.assertEqual((self.driver.running, self.runner.status.state), ([core], "running"))

    def test_put_back(self) -> None:
        """If the new core does not start, the previous backend runs again with its users, and the error says both."""
        self.started("a", ANN)
        for fault, kind in ((CoreFailed("it fell"), CoreFailed), (InvalidConfig("it is odd"), InvalidConfig)):
            self.driver.faults = [fault]
            error = self.failureResultOf(self.start("b", BOB), kind).value
            self.assertEqual(error.text, f"{fault.text}; the previous backend runs again")
            self.assertEqual((self.core.plan.config, self.accounts()), ("a", {"ann": b"one"}))
            self.assertEqual((self.runner.status.state, self.runner.status.reason), ("running", ""))
        self.successResultOf(self.start("a", ANN))
        self.assertEqual(len(self.driver.launches), 5)

    def test_put_back_after_an_unforeseen_fault(self) -> None:
        """An internal error brings the previous backend back, too; the log has the rest."""
        self.started("a", ANN)
        self.driver.faults = [KeyError("x")]
        error = self.failureResultOf(self.start("b", BOB), CoreFailed).value
        self.assertIn("KeyError", error.text)
        self.assertEqual(self.accounts(), {"ann": b"one"})
        self.assertEqual(len(self.flushLoggedErrors(KeyError)), 1)

    def test_put_back_after_a_call_that_was_cancelled(self) -> None:
        """The same for a cancelled call to a core, whatever cancelled it: only a Stop aborts a Start."""
        self.started("a", ANN)
        self.driver.faults = [CancelledError(), CancelledError()]
        self.assertIn("CancelledError", self.failureResultOf(self.start("b", BOB), CoreFailed).value.text)
        self.pass_time(0)
        self.assertEqual((self.runner.status.state, self.accounts()), ("running", {"ann": b"one"}))
        self.assertEqual(len(self.flushLoggedErrors(CancelledError)), 2)

    def test_put_back_later(self) -> None:
        """If the previous backend does not start at once either, the error says so, and it is retried."""
        self.started("a", ANN)
        self.driver.faults = [CoreFailed("it fell"), CoreFailed("so did this"), CoreFailed("and this")]
        error = self.failureResultOf(self.start("b", BOB), CoreFailed).value
        self.assertIn("it fell", error.text)
        self.assertIn("so did this", error.text)
        self.assertNotIn(WAITING, error.text)
        self.assertEqual(self.runner.status.state, "restarting")
        self.pass_time(1)
        self.assertEqual((self.runner.status.state, self.accounts()), ("running", {"ann": b"one"}))

    def test_one_that_was_coming_back(self) -> None:
        """A Start that fails while the previous backend waited for a restart does not end that."""
        for fault in (CoreFailed("it fell"), InvalidConfig("it is odd")):
            self.started("a", ANN)
            self.driver.faults = [CoreFailed("not yet"), fault]
            self.core.die()
            self.pass_time(0)
            self.assertEqual(self.runner.status.state, "restarting")
            self.failureResultOf(self.start("b", BOB), NodeError)
            self.assertEqual((self.runner.status.state, self.accounts()), ("running", {"ann": b"one"}))
            self.stopped()

    def test_users_changed_meanwhile(self) -> None:
        """Changes of users while the new core failed are in force in the previous backend."""
        self.started("a", ANN, BOB)
        self.driver.launching.shut = True
        start = self.start("b", person("ann", "one", "b"))
        self.sync_user(person("bob"))
        single = self.sync_user(CY)
        self.successResultOf(single)
        self.driver.faults = [CoreFailed("it fell")]
        self.driver.launching.open()
        self.failureResultOf(start, CoreFailed)
        self.assertEqual(set(self.accounts()), {"ann", "cy"})

    def test_a_whole_set_meanwhile(self) -> None:
        """So is a whole set."""
        self.started("a", ANN, BOB)
        self.driver.launching.shut = True
        start = self.start("b", person("ann", "one", "b"))
        self.successResultOf(self.sync_users(CY))
        self.driver.faults = [CoreFailed("it fell")]
        self.driver.launching.open()
        self.failureResultOf(start, CoreFailed)
        self.assertEqual(self.accounts(), {"cy": b"three"})

    def test_users_while_it_is_put_back(self) -> None:
        """Users that come while the previous backend restarts are there when it runs."""
        self.started("a", ANN)
        self.driver.faults = [CoreFailed("it fell")]
        self.driver.launching.shut = True
        start = self.start("b", BOB)
        self.driver.launching.let_through()
        self.assertEqual(self.runner.status.state, "restarting")
        self.successResultOf(self.sync_user(CY))
        self.driver.launching.open()
        self.failureResultOf(start, CoreFailed)
        self.assertEqual(set(self.accounts()), {"ann", "cy"})

    def test_nothing_ran(self) -> None:
        """If nothing ran before, a refused Start changes nothing, and a failed one sets the state."""
        self.driver.faults = [InvalidConfig("it is odd")]
        self.failureResultOf(self.start("a", ANN), InvalidConfig)
        self.assertEqual(self.runner.status.state, "stopped")
        self.driver.faults = [CoreFailed("it fell")]
        self.failureResultOf(self.start("a", ANN), CoreFailed)
        self.assertEqual((self.runner.status.state, self.runner.status.reason), ("failed", "it fell"))
        with self.assertRaises(CoreFailed) as raised:
            self.runner.status.require()
        self.assertNotIn(WAITING, raised.exception.text)
        self.pass_time(60)
        self.assertEqual(self.driver.running, [])

    def test_a_port_that_is_taken_for_a_while(self) -> None:
        """A port that is taken is retried until it is free."""
        self.driver.faults = [PortTaken("port 1 is taken")] * 8
        start = self.start("a", ANN)
        self.assertEqual(self.runner.status.state, "starting")
        self.pass_time(8 * PORT_RETRY + 1)
        self.successResultOf(start)

    def test_a_port_that_stays_taken(self) -> None:
        """A port that stays taken is named in time, after long enough tries, and the previous backend is back."""
        core = self.started("a", ANN)
        self.driver.faults = [PortTaken("port 1 is taken")] * int(START_TIMEOUT / PORT_RETRY)
        patience = len(self.driver.patience)
        start = self.start("b", BOB)
        self.pass_time(START_TIMEOUT - LAST_TRY - 1)
        self.assertNoResult(start)
        self.driver.faults = self.driver.faults[:4]
        self.pass_time(2)
        error = self.failureResultOf(start, CoreFailed).value
        self.assertIn("port 1 is taken", error.text)
        self.assertIn("the previous backend runs again", error.text)
        self.assertTrue(all(LAST_TRY <= seconds <= START_TIMEOUT for seconds in self.driver.patience[patience:]))
        self.assertIsNot(self.core, core)
        self.assertEqual(self.accounts(), {"ann": b"one"})

    def test_start_timeout(self) -> None:
        """The timeouts of a new core, and of the one that comes back, let the caller be answered in time."""
        self.started("a", ANN)
        self.driver.faults = [CoreFailed("no answer")]
        self.failureResultOf(self.start("b", BOB), CoreFailed)
        self.assertEqual(self.driver.patience, [START_TIMEOUT, START_TIMEOUT, BACK_TIMEOUT])

    def test_a_core_that_never_reads(self) -> None:
        """A core that does not parse a configuration in time fails the Start; the running one is not touched."""
        core = self.started("a", ANN)
        self.driver.reading.shut = True
        start = self.start("b", BOB)
        self.pass_time(START_TIMEOUT)
        self.assertIn(f"{START_TIMEOUT:g} s", self.failureResultOf(start, CoreFailed).value.text)
        self.assertEqual((self.driver.running, self.runner.status.state), ([core], "running"))

    def test_time_is_counted_from_the_beginning(self) -> None:
        """Time spent on parsing a configuration is taken from the launch."""
        self.driver.reading.shut = True
        start = self.start("b", BOB)
        self.pass_time(3)
        self.driver.reading.open()
        self.successResultOf(start)
        self.assertEqual(self.driver.patience, [START_TIMEOUT - 3])
