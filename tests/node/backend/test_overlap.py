"""A new run beside the serving one: no connection ends, a failing one gets no connections, and the old ones drain."""

from __future__ import annotations

from typing import cast

from twisted.internet.defer import ensureDeferred
from twisted.logger import capturedLogs, formatEvent

from drivers.pretended.scripted import SharedGeneration
from node.backend import drain
from node.backend.drain import SETTLED
from node.backend.options import BackendOptions
from node.backend.probation import SECONDS as PROBATION
from node.base.errors import Aborted, CoreFailed, InvalidConfig, PortTaken
from protos.service_pb2 import Backend, User
from tests.harness.memory import person
from tests.harness.overlap import ANN, BOB, CY, GRACE, OverlapTests


class Starts(OverlapTests):
    def test_no_connection_ends(self) -> None:
        """Another configuration starts beside the serving run, which keeps its connections until they end."""
        old = self.started("a", ANN)
        new = self.started("a x", ANN, BOB)
        self.assertEqual((old.alive, old.wound_down, self.driver.led), (True, False, new))
        self.assertEqual((self.generations.draining, self.state), ((old,), ("running", "")))
        self.pass_time(PROBATION + 1)
        self.assertTrue(old.alive)
        old.connections = 0
        self.pass_time(2)
        self.assertEqual((old.alive, self.generations.counting), (False, (new,)))

    def test_an_old_one_stays_for_a_while(self) -> None:
        """A client may have its handshake answered and not be connected yet."""
        old = self.started("a", ANN)
        old.connections = 0
        self.started("a x", ANN)
        self.pass_time(SETTLED - 0.5)
        self.assertTrue(old.alive)
        self.pass_time(2)
        self.assertFalse(old.alive)

    def test_a_limit_of_time(self) -> None:
        """A run whose clients never leave is ended."""
        old = self.started("a", ANN)
        self.started("a x", ANN)
        self.pass_time(59)
        self.assertTrue(old.alive)
        self.pass_time(2)
        self.assertFalse(old.alive)

    def test_too_many_at_once(self) -> None:
        """The oldest is ended."""
        runs = [self.started("a" + " x" * number, ANN) for number in range(4)]
        self.assertEqual([run.alive for run in runs], [False, True, True, True])

    def test_too_many_and_one_that_hangs(self) -> None:
        """No caller waits for its end, nor for that of any other."""
        self.started("a", ANN)
        self.started("a x", ANN)
        self.driver.stopping.shut = True
        self.started("a y", ANN)
        newest = self.started("a z", ANN)
        self.assertEqual((self.current, len(self.driver.running)), (newest, 4))

    def test_too_many_with_one_that_does_not_come_up(self) -> None:
        """No connection is ended for it."""
        runs = [self.started("a" + " x" * number, ANN) for number in range(3)]
        self.driver.faults = [CoreFailed("it fell")]
        self.failureResultOf(self.start("a y", ANN), CoreFailed)
        self.assertEqual([run.alive for run in runs], [True, True, True])

    def test_connections_that_cannot_be_counted(self) -> None:
        """The run is still ended after the timeout."""
        old = self.started("a", ANN)
        self.started("a x", ANN)
        old.connections = CoreFailed("they cannot be counted")
        with capturedLogs() as logged:
            self.pass_time(62)
        self.assertFalse(old.alive)
        self.assertTrue([event for event in logged if "they cannot be counted" in formatEvent(event)])

    def test_one_that_is_given_connections(self) -> None:
        """While no other run serves, the newest draining one is not ended."""
        old = self.started("a", ANN)
        new = self.started("a x", ANN)
        old.connections = 0
        self.pass_time(PROBATION - 1)
        self.driver.launching.shut = True
        start = self.start("a y", ANN)
        new.die()
        self.pass_time(5)
        self.assertTrue(old.alive)
        self.driver.launching.open()
        self.successResultOf(start)
        self.pass_time(5)
        self.assertFalse(old.alive)

    def test_too_little_memory(self) -> None:
        """Draining runs are ended first; if that is not enough the core is restarted, and a warning says why.

        The listeners of the serving run are not touched for that.
        """
        first = self.started("a", ANN)
        second = self.started("a x", ANN)
        second.joined = False
        self.patch(drain, "available", lambda: 1)
        starting = self.start("a y", ANN)
        self.pass_time(drain.ROOM + 0.25)
        self.successResultOf(starting)
        third = self.current
        self.assertEqual([run.alive for run in (first, second, third)], [False, False, True])
        self.assertFalse(second.joined)
        self.assertIn("there is not enough memory for two cores", "".join(self.runner.warnings))
        self.patch(drain, "available", lambda: 1 << 40)
        self.started("a z", ANN)
        self.assertEqual(self.runner.warnings, [])

    def test_where_it_cannot_be_done(self) -> None:
        """The core is restarted, its listeners untouched until then, and a warning says why."""
        old = self.started("a", ANN)
        for self.driver.obstacles, self.driver.unshared in ((["port 1 is UDP"], ""), ([], "somebody else listens")):
            new = self.started(old.plan.config + " x", ANN)
            self.assertEqual((old.alive, old.wound_down, old.joined), (False, True, False))
            [reason] = [*self.driver.obstacles, *filter(None, [self.driver.unshared])]
            self.assertIn(reason, "".join(self.runner.warnings))
            old = new

    def test_one_that_does_not_come_up(self) -> None:
        """The serving run is not affected, and the caller gets the reason."""
        old = self.started("a", ANN)
        for fault, kind in ((CoreFailed("it fell"), CoreFailed), (InvalidConfig("it is odd"), InvalidConfig)):
            self.driver.faults = [fault]
            error = self.failureResultOf(self.start("a x", BOB), kind).value
            self.assertEqual(error.text, f"{fault.text}; the previous backend goes on")
            self.assertEqual(
                (self.generations.counting, self.names(old), self.state), ((old,), {"ann"}, ("running", ""))
            )
        self.assertEqual(self.record.kept.keys(), {"ann"})

    def test_one_that_dies_when_it_has_come_up(self) -> None:
        """A new run that died and so cannot join is no reason to restart the serving one."""
        old = self.started("a", ANN)
        self.driver.stillborn = 1
        self.failureResultOf(self.start("a x", ANN), CoreFailed)
        self.assertEqual((old.alive, old.wound_down, self.current, self.state), (True, False, old, ("running", "")))

    def test_a_port_that_is_taken_for_a_moment(self) -> None:
        """The serving run holds its listeners again before the next try."""
        old = self.started("a", ANN)
        self.driver.faults = [PortTaken("port 1 is taken")]
        start = self.start("a x", ANN)
        self.pass_time(1)
        self.successResultOf(start)
        self.assertEqual((old.alive, self.generations.draining), (True, (old,)))

    def test_one_that_does_not_accept(self) -> None:
        """It is killed, and never got a connection."""
        old = self.started("a", ANN)
        self.driver.proving.shut = True
        start = self.start("a x", BOB)
        [_, new] = self.driver.running
        cast(SharedGeneration, new).proof = CoreFailed("port 1 does not accept")
        self.driver.proving.open()
        self.failureResultOf(start, CoreFailed)
        self.assertEqual((new.alive, self.driver.led, self.current), (False, old, old))

    def test_users_meanwhile(self) -> None:
        """Changes of users while it starts hold for both: a removed user is out of the old run, too."""
        old = self.started("a", ANN, BOB)
        self.driver.launching.shut = True
        start = self.start("a x", ANN, BOB)
        sync = self.sync(ANN, CY)
        self.driver.launching.open()
        for done in (start, sync):
            self.successResultOf(done)
        self.assertEqual((self.names(old), self.names(self.current)), ({"ann"}, {"ann", "cy"}))

    def test_a_user_is_removed_meanwhile(self) -> None:
        """The serving run removes the user at once, not only when the new one is there."""
        ancient = self.started("a", ANN, BOB)
        old = self.started("a x", ANN, BOB)
        self.driver.launching.shut = True
        starting = self.start("a y", ANN, BOB, CY)
        self.successResultOf(ensureDeferred(self.runner.users.update([User(email="ann"), person("bob", "new", "a")])))
        self.assertEqual((self.names(old), self.names(ancient), self.state[0]), (set(), set(), "starting"))
        self.driver.launching.open()
        self.successResultOf(starting)
        self.assertEqual((self.names(self.current), self.names(old)), ({"bob", "cy"}, set()))

    def test_who_was_removed_during_a_start_that_a_stop_ends(self) -> None:
        """They are out of the serving core at once, and so also when it waits for the next Start."""
        old = self.started("a", ANN, BOB)
        self.driver.launching.shut = True
        start = self.start("a x", ANN)
        self.successResultOf(self.remove("bob"))
        self.assertEqual(self.names(old), {"ann"})
        stop = ensureDeferred(self.runner.stop("asked", GRACE))
        self.failureResultOf(start, Aborted)
        self.driver.launching.open()
        self.successResultOf(stop)
        self.assertEqual((self.names(old), self.driver.running), ({"ann"}, [old]))

    def test_a_user_who_cannot_be_removed_meanwhile(self) -> None:
        """The serving run is not ended for them: a new one is starting."""
        old = self.started("a", ANN, BOB)
        self.driver.launching.shut = True
        starting = self.start("a x", ANN, BOB)
        self.driver.dear = lambda change: change.key == "ann"
        leaving = ensureDeferred(self.runner.users.update([User(email="ann")]))
        self.pass_time(1)
        self.successResultOf(leaving)
        self.assertTrue(old.alive)
        self.driver.launching.open()
        self.pass_time(1)
        self.successResultOf(starting)
        self.assertEqual((self.names(self.current), old.alive), ({"bob"}, False))

    def test_users_missing_in_a_start_that_fails(self) -> None:
        """All users of the run that goes on stay, unless they were removed meanwhile."""
        old = self.started("a", ANN, BOB)
        self.driver.launching.shut = True
        self.driver.faults = [CoreFailed("it fell")]
        starting = self.start("a x", CY)
        self.successResultOf(ensureDeferred(self.runner.users.update([User(email="ann")])))
        self.assertEqual(self.names(old), {"bob"})
        self.driver.launching.open()
        self.failureResultOf(starting, CoreFailed)
        self.assertEqual((self.names(old), self.current), ({"bob"}, old))

    def test_a_user_is_removed_at_the_last_moment(self) -> None:
        """They do not get in by the new run either, not even for a moment."""
        self.started("a", ANN, BOB)
        self.driver.proving.shut = True
        starting = self.start("a x", ANN, BOB)
        self.successResultOf(self.remove("ann"))
        seen: list[set[str]] = []
        lead = SharedGeneration.lead

        async def led(run: SharedGeneration) -> None:
            seen.append(self.names(run))
            await lead(run)

        self.patch(SharedGeneration, "lead", led)
        self.driver.proving.open()
        self.successResultOf(starting)
        self.assertEqual(seen, [{"bob"}])

    def test_a_user_who_cannot_be_removed_from_a_crowd_meanwhile(self) -> None:
        """No batch is collected while another run is starting: neither the Start nor the removal waits."""
        for config in ("a", "a x", "a y"):
            serving = self.started(config, ANN, BOB, CY)
        self.driver.dear = lambda change: change.key == "ann" and self.driver.launching.shut
        self.driver.launching.shut = True
        starting = self.start("a z", ANN, BOB, CY)
        for name in ("ann", "bob"):
            self.successResultOf(self.remove(name))
        self.assertEqual(self.names(serving), {"ann", "cy"})
        self.driver.launching.open()
        self.successResultOf(starting)

    def test_users_while_one_fails(self) -> None:
        """They are in the run that goes on."""
        old = self.started("a", ANN, BOB)
        self.driver.launching.shut = True
        start = self.start("a x", ANN, BOB)
        self.successResultOf(self.sync(ANN, CY))
        self.driver.faults = [CoreFailed("it fell")]
        self.driver.launching.open()
        self.failureResultOf(start, CoreFailed)
        self.assertEqual(self.names(old), {"ann", "cy"})

    def test_users_missing_in_a_start(self) -> None:
        """They are out of the old run as well when the Start is answered."""
        old = self.started("a", ANN, BOB)
        self.started("a x", ANN)
        self.assertEqual(self.names(old), {"ann"})

    def test_a_stop_and_another_start(self) -> None:
        """A panel's way to change a configuration ends no connection either."""
        old = self.started("a", ANN)
        self.successResultOf(ensureDeferred(self.runner.stop("asked", GRACE)))
        new = self.started("a x", ANN)
        self.assertEqual((old.alive, self.driver.led, self.generations.draining), (True, new, (old,)))

    def test_a_stop_and_a_start_that_fails(self) -> None:
        """The stopped backend is over then."""
        old = self.started("a", ANN)
        self.successResultOf(ensureDeferred(self.runner.stop("asked", GRACE)))
        self.driver.faults = [CoreFailed("it fell")]
        self.failureResultOf(self.start("a x", ANN), CoreFailed)
        self.assertEqual((old.alive, self.state[0]), (False, "failed"))

    def test_a_stop_and_no_core_after_it(self) -> None:
        """A run that once waited for a Start is not mistaken for one that waits later."""
        self.started("a", ANN)
        self.successResultOf(ensureDeferred(self.runner.stop("asked", GRACE)))
        self.started("a", ANN)
        new = self.started("a,b", ANN)
        self.pass_time(PROBATION + 1)
        self.driver.launching.shut = True
        new.die()
        self.pass_time(0)
        stop = ensureDeferred(self.runner.stop("asked", GRACE))
        self.driver.launching.open()
        self.successResultOf(stop)
        self.assertEqual(self.started("a,b", ANN).plan.config, "a,b")

    def test_a_stop_meanwhile(self) -> None:
        """No run is left, wherever the overlap was."""
        for gate in (self.driver.launching, self.driver.proving):
            self.started("a", ANN)
            gate.shut = True
            start = self.start("a x", ANN)
            stop = ensureDeferred(self.runner.stop("asked"))
            gate.open()
            self.successResultOf(stop)
            start.addErrback(lambda _: None)
            self.assertEqual((self.driver.running, self.state[0]), ([], "stopped"))
            self.driver.led = None

    def test_a_stop_ends_all(self) -> None:
        """Draining ones, too."""
        self.started("a", ANN)
        self.started("a x", ANN)
        self.successResultOf(ensureDeferred(self.runner.stop("asked")))
        self.assertEqual((self.driver.running, self.generations.counting), ([], ()))


class Upgrades(OverlapTests):
    def test_an_equal_start(self) -> None:
        """With UPGRADE_ON_START it replaces a core whose files changed; else the running one goes on."""
        old = self.started("a", ANN)
        old.outdated = True
        self.assertIs(self.started("a", ANN), old)
        self.runner._starts._options = BackendOptions(upgrade=True)
        new = self.started("a", ANN)
        self.assertEqual((old.alive, self.driver.led), (True, new))
        self.assertIs(self.started("a", ANN), new)


class WaysBack(OverlapTests):
    def test_it_dies_at_once(self) -> None:
        """The previous run serves again, with its configuration and the current users; this is reported and saved."""
        old = self.started("a", ANN)
        new = self.started("a x", ANN, BOB)
        self.driver.led = None
        new.die()
        self.pass_time(0)
        self.assertEqual((self.current, self.driver.led, self.names(old)), (old, old, {"ann", "bob"}))
        self.assertEqual(self.state[0], "running")
        self.assertIn("signal 9", self.state[1])
        self.assertIn("failed soon after taking over", "".join(self.runner.warnings))
        self.assertEqual(Backend.FromString(self.record.request).config, "a")
        self.successResultOf(self.start("a", ANN))
        self.assertEqual(self.current, old)

    def test_users_refused_by_the_previous_one(self) -> None:
        """They are named in the log."""
        self.started("a", ANN)
        self.started("a x", ANN, person("bob", "bad", "a")).die()
        self.pass_time(0)
        left_out = [line for line in self.ring.read(0)[0] if "user 'bob' is left out" in line]
        self.assertEqual(len(left_out), 2)

    def test_it_hangs(self) -> None:
        """A run that does not answer any more is killed, also if it hangs just before the end of its probation."""
        for before in (0.0, PROBATION - 0.5):
            old = self.started("a", ANN)
            new = self.started("a x", ANN)
            self.pass_time(before)
            new.silent = True
            self.pass_time(7)
            self.assertEqual((new.killed, self.current, self.state[0]), (True, old, "running"))

    def test_it_is_busy(self) -> None:
        """A busy core is no reason to take back what a controller was answered."""
        self.started("a", ANN)
        new = self.started("a x", ANN)
        self.pass_time(1)
        new.silent = True
        self.pass_time(4.5)
        new.silent = False
        self.pass_time(PROBATION)
        self.assertEqual((new.alive, self.current), (True, new))

    def test_the_one_before_is_busy(self) -> None:
        """A busy core is no reason to restart it."""
        old = self.started("a", ANN)
        old.silent = True
        start = self.start("a x", ANN)
        self.pass_time(1.5)
        old.silent = False
        self.pass_time(1)
        self.successResultOf(start)
        self.assertTrue(old.alive)

    def test_no_connection_is_left_to_the_previous_one(self) -> None:
        """It stays for as long as there is a way back."""
        old = self.started("a", ANN)
        new = self.started("a x", ANN)
        old.connections = 0
        self.pass_time(PROBATION - 0.25)
        new.die()
        self.pass_time(0)
        self.assertEqual((self.current, self.state[0]), (old, "running"))

    def test_it_dies_later(self) -> None:
        """That is a crash."""
        self.started("a", ANN)
        new = self.started("a x", ANN)
        self.pass_time(PROBATION + 1)
        new.die()
        self.pass_time(0)
        self.assertEqual((self.current.plan.config, self.state), ("a x", ("running", "")))
        self.assertIsNot(self.current, new)

    def test_one_that_comes_again_dies_at_once(self) -> None:
        """It replaced nothing: a draining run of an earlier configuration is no way back."""
        self.started("a", ANN)
        new = self.started("b", BOB)
        self.pass_time(PROBATION + 1)
        new.die()
        self.pass_time(0)
        self.current.die()
        self.pass_time(3)
        self.assertEqual((self.current.plan.config, self.state), ("b", ("running", "")))

    def test_while_another_run_comes(self) -> None:
        """A new run for users of the failed configuration does not stay."""
        old = self.started("a", ANN)
        new = self.started("b", person("ann", "one", "a", "b"))
        self.driver.dear = lambda change: new.alive
        self.driver.proving.shut = True
        update = ensureDeferred(self.runner.users.update([person("bob", "two", "a", "b")]))
        self.pass_time(1)
        new.die()
        self.pass_time(0)
        self.driver.proving.open()
        self.pass_time(1)
        self.assertEqual((self.current, self.driver.led, self.state[0]), (old, old, "running"))
        self.assertEqual(self.names(old), {"ann", "bob"})
        self.successResultOf(update)
        self.assertEqual(self.driver.running, [old])

    def test_the_warning_ends(self) -> None:
        """A Start of what runs by then, or a Stop, ends the warning."""
        for answer in (lambda: self.start("a", ANN), lambda: ensureDeferred(self.runner.stop("asked"))):
            self.started("a", ANN)
            self.started("a x", ANN).die()
            self.pass_time(0)
            self.assertIn("failed soon after taking over", "".join(self.runner.warnings))
            self.successResultOf(answer())
            self.assertEqual(self.runner.warnings, [])

    def test_both_die(self) -> None:
        """So does a crash of both."""
        old = self.started("a", ANN)
        new = self.started("a x", ANN)
        old.die()
        new.die()
        self.pass_time(0)
        self.assertEqual((self.current.plan.config, self.state[0]), ("a x", "running"))

    def test_the_old_one_dies(self) -> None:
        """That costs its connections, and nothing else."""
        old = self.started("a", ANN)
        new = self.started("a x", ANN)
        old.die()
        self.pass_time(2 * PROBATION)
        self.assertEqual((self.current, self.generations.counting, self.state), (new, (new,), ("running", "")))
