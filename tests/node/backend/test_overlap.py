"""Another run beside the one that serves: nobody is dropped, a bad one is not led to, and the old ones drain."""

from __future__ import annotations

from typing import cast

from twisted.internet.defer import ensureDeferred

from node.backend import drain
from node.backend.drain import SETTLED
from node.backend.probation import SECONDS as PROBATION
from node.errors import CoreFailed, InvalidConfig, PortTaken
from protos.service_pb2 import Backend, User
from tests.harness.memory import SharedGeneration, person
from tests.harness.overlap import ANN, BOB, CY, GRACE, OverlapTests


class Starts(OverlapTests):
    def test_nobody_is_dropped(self) -> None:
        """Another configuration comes in beside the one that serves, which keeps its connections until they end."""
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
        """A client may have its answer and not be there yet."""
        old = self.started("a", ANN)
        old.connections = 0
        self.started("a x", ANN)
        self.pass_time(SETTLED - 0.5)
        self.assertTrue(old.alive)
        self.pass_time(2)
        self.assertFalse(old.alive)

    def test_a_limit_of_time(self) -> None:
        """One whose clients never go is ended."""
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
        """Nobody waits for its end, nor for that of any other."""
        self.started("a", ANN)
        self.started("a x", ANN)
        self.driver.stopping.shut = True
        self.started("a y", ANN)
        newest = self.started("a z", ANN)
        self.assertEqual((self.current, len(self.driver.running)), (newest, 4))

    def test_too_many_with_one_that_does_not_come_up(self) -> None:
        """Nobody's connections end for it."""
        runs = [self.started("a" + " x" * number, ANN) for number in range(3)]
        self.driver.faults = [CoreFailed("it fell")]
        self.failureResultOf(self.start("a y", ANN), CoreFailed)
        self.assertEqual([run.alive for run in runs], [True, True, True])

    def test_connections_that_cannot_be_counted(self) -> None:
        """The run is ended at the limit of time all the same."""
        old = self.started("a", ANN)
        self.started("a x", ANN)
        old.connections = CoreFailed("they cannot be counted")
        self.pass_time(62)
        self.assertFalse(old.alive)
        self.assertTrue(self.flushLoggedErrors(CoreFailed))

    def test_one_that_is_given_connections(self) -> None:
        """While nothing else is there to serve, the newest that drains is not ended."""
        old = self.started("a", ANN)
        new = self.started("a x", ANN)
        old.connections = 0
        self.pass_time(PROBATION - 1)
        self.driver.launching.shut = True
        start = self.start("a y", ANN)
        new.die()
        self.pass_time(10)
        self.assertTrue(old.alive)
        self.driver.launching.open()
        self.successResultOf(start)
        self.pass_time(10)
        self.assertFalse(old.alive)

    def test_too_little_memory(self) -> None:
        """Those that drain are ended first; where that is not enough it is a restart, and a warning says why.

        The listeners of the one that serves are not touched for that.
        """
        first = self.started("a", ANN)
        second = self.started("a x", ANN)
        second.joined = False
        self.patch(drain, "available", lambda: 1)
        third = self.started("a y", ANN)
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
        """Nobody notices, and the caller hears why."""
        old = self.started("a", ANN)
        for fault, kind in ((CoreFailed("it fell"), CoreFailed), (InvalidConfig("it is odd"), InvalidConfig)):
            self.driver.faults = [fault]
            error = self.failureResultOf(self.start("a x", BOB), kind).value
            self.assertEqual(error.text, f"{fault.text}; the backend before it goes on")
            self.assertEqual(
                (self.generations.counting, self.names(old), self.state), ((old,), {"ann"}, ("running", ""))
            )
        self.assertEqual(self.record.kept.keys(), {"ann"})

    def test_one_that_dies_when_it_has_come_up(self) -> None:
        """That nobody can join it any more is no reason to restart the one that serves."""
        old = self.started("a", ANN)
        self.driver.stillborn = 1
        self.failureResultOf(self.start("a x", ANN), CoreFailed)
        self.assertEqual((old.alive, old.wound_down, self.current, self.state), (True, False, old, ("running", "")))

    def test_a_port_that_is_taken_for_a_moment(self) -> None:
        """The run that serves is held again before the next try."""
        old = self.started("a", ANN)
        self.driver.faults = [PortTaken("port 1 is taken")]
        start = self.start("a x", ANN)
        self.pass_time(1)
        self.successResultOf(start)
        self.assertEqual((old.alive, self.generations.draining), (True, (old,)))

    def test_one_that_does_not_accept(self) -> None:
        """It is ended, and was never given anybody."""
        old = self.started("a", ANN)
        self.driver.proving.shut = True
        start = self.start("a x", BOB)
        [_, new] = self.driver.running
        cast(SharedGeneration, new).proof = CoreFailed("port 1 does not accept")
        self.driver.proving.open()
        self.failureResultOf(start, CoreFailed)
        self.assertEqual((new.alive, self.driver.led, self.current), (False, old, old))

    def test_users_meanwhile(self) -> None:
        """What is said while it comes up holds for both: who is removed is out of the old one too."""
        old = self.started("a", ANN, BOB)
        self.driver.launching.shut = True
        start = self.start("a x", ANN, BOB)
        sync = self.sync(ANN, CY)
        self.driver.launching.open()
        for done in (start, sync):
            self.successResultOf(done)
        self.assertEqual((self.names(old), self.names(self.current)), ({"ann"}, {"ann", "cy"}))

    def test_who_leaves_meanwhile(self) -> None:
        """The run that serves lets nobody in who was removed, and not only when another one is there."""
        ancient = self.started("a", ANN, BOB)
        old = self.started("a x", ANN, BOB)
        self.driver.launching.shut = True
        starting = self.start("a y", ANN, BOB, CY)
        self.successResultOf(ensureDeferred(self.runner.users.update([User(email="ann"), person("bob", "new", "a")])))
        self.assertEqual((self.names(old), self.names(ancient), self.state[0]), (set(), set(), "starting"))
        self.driver.launching.open()
        self.successResultOf(starting)
        self.assertEqual((self.names(self.current), self.names(old)), ({"bob", "cy"}, set()))

    def test_who_cannot_leave_meanwhile(self) -> None:
        """The run that serves is not ended for them: another one is on its way."""
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

    def test_who_leaves_by_a_start_that_fails(self) -> None:
        """Nobody is out of the run that goes on, unless they were removed meanwhile."""
        old = self.started("a", ANN, BOB)
        self.driver.launching.shut = True
        self.driver.faults = [CoreFailed("it fell")]
        starting = self.start("a x", CY)
        self.successResultOf(ensureDeferred(self.runner.users.update([User(email="ann")])))
        self.assertEqual(self.names(old), {"bob"})
        self.driver.launching.open()
        self.failureResultOf(starting, CoreFailed)
        self.assertEqual((self.names(old), self.current), ({"bob"}, old))

    def test_who_leaves_at_the_last_moment(self) -> None:
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

    def test_who_cannot_leave_a_crowd_meanwhile(self) -> None:
        """Nothing is collected where another run is on its way: neither the Start nor who leaves with them waits."""
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
        """They are in the one that goes on."""
        old = self.started("a", ANN, BOB)
        self.driver.launching.shut = True
        start = self.start("a x", ANN, BOB)
        self.successResultOf(self.sync(ANN, CY))
        self.driver.faults = [CoreFailed("it fell")]
        self.driver.launching.open()
        self.failureResultOf(start, CoreFailed)
        self.assertEqual(self.names(old), {"ann", "cy"})

    def test_who_is_out_of_a_set(self) -> None:
        """Is out of the old one as well when the Start is answered."""
        old = self.started("a", ANN, BOB)
        self.started("a x", ANN)
        self.assertEqual(self.names(old), {"ann"})

    def test_a_stop_and_another_start(self) -> None:
        """A panel's way to change a configuration drops nobody either."""
        old = self.started("a", ANN)
        self.successResultOf(ensureDeferred(self.runner.stop("asked", GRACE)))
        new = self.started("a x", ANN)
        self.assertEqual((old.alive, self.driver.led, self.generations.draining), (True, new, (old,)))

    def test_a_stop_and_a_start_that_fails(self) -> None:
        """What was stopped is over then."""
        old = self.started("a", ANN)
        self.successResultOf(ensureDeferred(self.runner.stop("asked", GRACE)))
        self.driver.faults = [CoreFailed("it fell")]
        self.failureResultOf(self.start("a x", ANN), CoreFailed)
        self.assertEqual((old.alive, self.state[0]), (False, "failed"))

    def test_a_stop_and_no_core_after_it(self) -> None:
        """A run that once waited for a Start is not the one that waits later."""
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
        """Those that drain, too."""
        self.started("a", ANN)
        self.started("a x", ANN)
        self.successResultOf(ensureDeferred(self.runner.stop("asked")))
        self.assertEqual((self.driver.running, self.generations.counting), ([], ()))


class Upgrades(OverlapTests):
    def test_an_equal_start(self) -> None:
        """Where that is wished it brings in a core whose files changed; else it takes what runs."""
        old = self.started("a", ANN)
        old.outdated = True
        self.assertIs(self.started("a", ANN), old)
        self.runner._upgrade = True
        new = self.started("a", ANN)
        self.assertEqual((old.alive, self.driver.led), (True, new))
        self.assertIs(self.started("a", ANN), new)


class WaysBack(OverlapTests):
    def test_it_dies_at_once(self) -> None:
        """The one before it serves again, with its configuration and the users of now, which is told and recorded."""
        old = self.started("a", ANN)
        new = self.started("a x", ANN, BOB)
        self.driver.led = None
        new.die()
        self.pass_time(0)
        self.assertEqual((self.current, self.driver.led, self.names(old)), (old, old, {"ann", "bob"}))
        self.assertEqual(self.state[0], "running")
        self.assertIn("signal 9", self.state[1])
        self.assertIn("did not hold", "".join(self.runner.warnings))
        self.assertEqual(Backend.FromString(self.record.request).config, "a")
        self.successResultOf(self.start("a", ANN))
        self.assertEqual(self.current, old)

    def test_who_is_left_out_of_the_one_before(self) -> None:
        """Is named in the log."""
        self.started("a", ANN)
        self.started("a x", ANN, person("bob", "bad", "a")).die()
        self.pass_time(0)
        left_out = [line for line in self.ring.read(0)[0] if "user 'bob' is left out" in line]
        self.assertEqual(len(left_out), 2)

    def test_it_hangs(self) -> None:
        """One that answers nothing any more is ended, also if it hangs just before it would have held."""
        for before in (0.0, PROBATION - 0.5):
            old = self.started("a", ANN)
            new = self.started("a x", ANN)
            self.pass_time(before)
            new.silent = True
            self.pass_time(7)
            self.assertEqual((new.killed, self.current, self.state[0]), (True, old, "running"))

    def test_it_is_busy(self) -> None:
        """That is no reason to take back what a controller was answered."""
        self.started("a", ANN)
        new = self.started("a x", ANN)
        self.pass_time(1)
        new.silent = True
        self.pass_time(4.5)
        new.silent = False
        self.pass_time(PROBATION)
        self.assertEqual((new.alive, self.current), (True, new))

    def test_the_one_before_is_busy(self) -> None:
        """That is no reason to restart it."""
        old = self.started("a", ANN)
        old.silent = True
        start = self.start("a x", ANN)
        self.pass_time(1.5)
        old.silent = False
        self.pass_time(1)
        self.successResultOf(start)
        self.assertTrue(old.alive)

    def test_nobody_is_connected_to_the_one_before(self) -> None:
        """It is there for as long as there is a way back."""
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
        """What is still there of an earlier configuration is not what it comes in the place of."""
        self.started("a", ANN)
        new = self.started("b", BOB)
        self.pass_time(PROBATION + 1)
        new.die()
        self.pass_time(0)
        self.current.die()
        self.pass_time(3)
        self.assertEqual((self.current.plan.config, self.state), ("b", ("running", "")))

    def test_while_another_run_comes(self) -> None:
        """What comes in for users' sake when the configuration has not held does not stay."""
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

    def test_is_told_until_it_is_known(self) -> None:
        """A Start of what runs by now, or a Stop, is the answer."""
        for answer in (lambda: self.start("a", ANN), lambda: ensureDeferred(self.runner.stop("asked"))):
            self.started("a", ANN)
            self.started("a x", ANN).die()
            self.pass_time(0)
            self.assertIn("did not hold", "".join(self.runner.warnings))
            self.successResultOf(answer())
            self.assertEqual(self.runner.warnings, [])

    def test_both_die(self) -> None:
        """So is that."""
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
