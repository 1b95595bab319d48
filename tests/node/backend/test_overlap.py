"""Another run beside the one that serves: nobody is dropped, a bad one is not led to, and the old ones drain."""

from __future__ import annotations

from typing import Any, cast

from twisted.internet.defer import Deferred, ensureDeferred
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from node.backend import drain
from node.backend.backoff import STEADY
from node.backend.drain import SETTLED, Limits
from node.backend.generations import Generations
from node.backend.keeper import PATIENCE, REFRESH, RETRY, SESSIONS
from node.backend.probation import SECONDS as PROBATION
from node.backend.renewal import CROWDED_WINDOW, WINDOW
from node.backend.runner import Runner
from node.contract.driver import Generation
from node.errors import Aborted, CoreFailed, InvalidConfig, PortTaken, UsersRefused
from node.logs import LogRing
from protos.service_pb2 import Backend, User
from tests.harness.memory import MemoryRecord, SharedGeneration, SharingDriver, person

GRACE = 30.0
ANN, BOB, CY = person("ann", "one", "a"), person("bob", "two", "a"), person("cy", "three", "a")


class OverlapTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.clock = cast(Any, Clock())
        self.driver = SharingDriver(self.clock)
        self.ring, self.generations, self.record = LogRing(self.clock, 1000), Generations(), MemoryRecord()
        limits = Limits(timeout=60.0, generations=2)
        self.runner = Runner(self.clock, self.ring, self.record, self.generations, self.read, limits)
        self.patch(drain, "available", lambda: 1 << 40)

    def tearDown(self) -> None:
        for gate in (self.driver.launching, self.driver.stopping, self.driver.proving):
            gate.open()
        closed = ensureDeferred(self.runner.close())
        self.pass_time(3)
        self.successResultOf(closed)
        self.assertEqual((self.driver.running, self.clock.getDelayedCalls()), ([], []))

    async def read(self, _: Generation) -> bool:
        return False

    def start(self, config: str, *users: User) -> Deferred[None]:
        return ensureDeferred(self.runner.start(self.driver, Backend(config=config, users=users)))

    def started(self, config: str, *users: User) -> SharedGeneration:
        self.successResultOf(self.start(config, *users))
        return self.current

    def remove(self, name: str) -> Deferred[None]:
        return ensureDeferred(self.runner.users.update([User(email=name)]))

    def sync(self, *users: User) -> Deferred[None]:
        return ensureDeferred(self.runner.users.replace(users))

    def pass_time(self, seconds: float) -> None:
        self.clock.pump([0.0] + [0.125] * int(seconds * 8))

    @property
    def current(self) -> SharedGeneration:
        assert isinstance(self.generations.current, SharedGeneration)
        return self.generations.current

    def names(self, run: Generation) -> set[str]:
        return {key for accounts in run.accounts.values() for key in accounts}

    @property
    def state(self) -> tuple[str, str]:
        return str(self.runner.status.state), self.runner.status.reason


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


class Renewals(OverlapTests):
    def setUp(self) -> None:
        super().setUp()
        self.driver.dear = lambda change: change.packed is not None

    def settled(self, done: Deferred[None], seconds: float = 1.0) -> Deferred[None]:
        self.pass_time(seconds)
        return done

    def test_users_who_come(self) -> None:
        """Nobody else notices."""
        old = self.started("a", ANN)
        self.successResultOf(self.settled(self.sync(ANN, BOB)))
        self.assertEqual((old.alive, self.names(self.current)), (True, {"ann", "bob"}))

    def test_who_leaves_with_them(self) -> None:
        """Is out of the old one when the caller hears."""
        old = self.started("a", ANN, BOB)
        self.driver.dear = lambda change: old is self.generations.current
        self.successResultOf(self.settled(self.sync(ANN, CY)))
        self.assertEqual((old.alive, self.names(old), self.names(self.current)), (True, {"ann"}, {"ann", "cy"}))

    def test_none_comes_up_with_them(self) -> None:
        """The one that serves goes on, and they are told."""
        old = self.started("a", ANN)
        self.driver.faults = [CoreFailed("it fell")]
        [refused] = self.failureResultOf(self.settled(self.sync(ANN, BOB)), UsersRefused).value.refused
        self.assertEqual((refused, self.current, self.state[0]), (("bob", "a: it fell"), old, "running"))

    def test_a_stop_while_they_come(self) -> None:
        """The run that was to come in does not; the one that waits for a Start is given all connections."""
        old = self.started("a", ANN)
        self.driver.proving.shut = True
        sync = self.settled(self.sync(ANN, BOB))
        stop = ensureDeferred(self.runner.stop("asked", GRACE))
        self.driver.proving.open()
        self.failureResultOf(sync, Aborted)
        self.successResultOf(stop)
        self.successResultOf(self.settled(self.start("a", ANN, BOB)))
        self.assertEqual((self.current, self.names(self.current)), (self.driver.led, {"ann", "bob"}))
        self.assertEqual(self.generations.draining, (old,))
        old.connections = 0
        self.pass_time(10)
        self.assertFalse(old.alive)

    def test_a_start_while_they_come(self) -> None:
        """The run that they are not in keeps whom it has by its own configuration."""
        old = self.started("a,b", person("ann", "one", "a", "b"))
        self.driver.proving.shut = True
        sync = self.settled(self.sync(person("ann", "one", "a", "b"), person("bob", "two", "a", "b")))
        start = self.start("b", person("ann", "one", "a", "b"))
        self.driver.proving.open()
        for done in (start, sync):
            self.successResultOf(done)
        self.assertEqual((old.alive, old.accounts), (True, {"a": {"ann": b"one"}, "b": {"ann": b"one"}}))

    def test_nobody_waits_for_more_of_them(self) -> None:
        """A Start or a Stop comes at once, however long they are collected for."""
        for hurry in (lambda: self.start("a x"), lambda: ensureDeferred(self.runner.stop("asked"))):
            self.started("a")
            for user in (ANN, BOB):
                self.successResultOf(self.settled(ensureDeferred(self.runner.users.update([user]))))
            late = ensureDeferred(self.runner.users.update([CY]))
            self.pass_time(1)
            self.assertNoResult(late)
            hurried = hurry()
            self.pass_time(1)
            self.successResultOf(hurried)
            late.addErrback(lambda _: None)
            self.successResultOf(late)
            self.successResultOf(ensureDeferred(self.runner.stop("asked")))

    def test_a_stop_leaves_nothing_to_do(self) -> None:
        """Also if a run takes over only then."""
        self.started("a", ANN)
        self.driver.proving.shut = True
        sync = self.settled(self.sync(ANN, BOB))
        stop = ensureDeferred(self.runner.stop("asked"))
        self.failureResultOf(sync, Aborted)
        self.driver.proving.open()
        self.successResultOf(stop)
        self.assertEqual((self.driver.running, self.clock.getDelayedCalls()), ([], []))

    def test_many_one_after_another(self) -> None:
        """Where one that drains would end early they are collected for longer."""
        self.started("a")
        for user in (ANN, BOB):
            self.successResultOf(self.settled(ensureDeferred(self.runner.users.update([user]))))
        self.assertEqual(len(self.generations.draining), 2)
        late = ensureDeferred(self.runner.users.update([CY]))
        self.pass_time(CROWDED_WINDOW - 1)
        self.assertNoResult(late)
        self.successResultOf(self.settled(late, 2))
        self.assertEqual((len(self.generations.draining), self.names(self.current)), (2, {"ann", "bob", "cy"}))

    def test_where_nothing_may_drain(self) -> None:
        """Users come in by a restart, and nobody waits for more of them."""
        self.runner._supervisor._drain._limits = Limits(generations=0)
        self.started("a", ANN)
        self.successResultOf(self.settled(self.sync(ANN, BOB)))
        self.assertIn("DRAIN_GENERATIONS is 0", "".join(self.runner.warnings))

    def test_one_that_dies_at_once(self) -> None:
        """The one before it serves again, and the users who came with it come with the next one, at once."""
        old = self.started("a", ANN)
        self.successResultOf(self.settled(self.sync(ANN, BOB)))
        self.current.die()
        self.pass_time(0)
        self.assertEqual((self.current, self.names(old), self.state[0]), (old, {"ann"}, "running"))
        self.pass_time(WINDOW + 0.5)
        self.assertEqual(self.names(self.current), {"ann", "bob"})

    def test_one_that_dies_after_a_while(self) -> None:
        """Also where the one before it takes them while it runs, and has served for long."""
        old = self.started("a", ANN)
        self.successResultOf(self.settled(self.sync(ANN, BOB)))
        self.driver.dear = lambda _: False
        self.pass_time(PROBATION - 1)
        self.current.die()
        self.pass_time(0)
        self.assertEqual((self.current, self.names(old)), (old, {"ann", "bob"}))
        self.pass_time(STEADY)
        old.die()
        self.pass_time(0)
        self.assertEqual((self.names(self.current), self.state), ({"ann", "bob"}, ("running", "")))

    def test_each_of_them_dies_at_once(self) -> None:
        """The next one comes later and later, and the one before serves all the time."""
        old = self.started("a", ANN)
        self.sync(ANN, BOB)
        for seconds in range(16):
            for run in self.driver.running:
                if run is not old:
                    run.die()
            self.pass_time(1)
            self.assertIn(old, self.generations.serving, seconds)
        self.assertIn(len(self.driver.launches), range(5, 9))

    def test_it_is_stopped_before_they_come_again(self) -> None:
        self.started("a", ANN)
        self.successResultOf(self.settled(self.sync(ANN, BOB)))
        self.current.die()
        stopped = ensureDeferred(self.runner.stop("asked"))
        self.pass_time(3)
        self.successResultOf(stopped)
        self.assertEqual((self.driver.running, self.state[0]), ([], "stopped"))


class Refreshes(OverlapTests):
    """Another run for the sake of users whom the core keeps out though it knows their credentials."""

    def removed(self, *staying: User) -> SharedGeneration:
        """The run from which somebody was removed just now."""
        run = self.current
        run.lingering = True
        self.successResultOf(self.sync(*staying))
        return run

    def test_soon(self) -> None:
        """It knows nothing of them, and nobody's connections end for it."""
        self.started("a", ANN, BOB)
        old = self.removed(BOB)
        self.pass_time(REFRESH + 0.5)
        self.assertEqual((self.names(self.current), self.current is old, old.alive), ({"bob"}, False, True))

    def test_one_that_does_not_come_up(self) -> None:
        """Is tried again after a while, without another change."""
        self.started("a", ANN, BOB)
        old = self.removed(BOB)
        self.driver.faults = [CoreFailed("it fell")]
        self.pass_time(REFRESH + RETRY - 1)
        self.assertEqual((self.current, len(self.driver.launches)), (old, 2))
        self.pass_time(2)
        self.assertIsNot(self.current, old)

    def test_where_one_that_drains_would_end(self) -> None:
        """It waits for that to end by itself, for a while."""
        for config in ("a", "a x", "a y"):
            self.started(config, ANN, BOB)
        oldest, serving = self.generations.draining[0], self.removed(BOB)
        self.pass_time(REFRESH * 3)
        self.assertEqual((self.current, oldest.alive), (serving, True))
        cast(SharedGeneration, oldest).connections = 0
        self.pass_time(REFRESH + 2)
        self.assertNotEqual((self.current, oldest.alive), (serving, True))

    def test_where_sessions_would_end(self) -> None:
        """It waits for longer, and that begins anew when another run has come for another reason."""
        self.started("a", ANN, BOB, CY)
        self.removed(ANN, BOB).ends_sessions = True
        self.pass_time(SESSIONS / 2)
        self.driver.dear = lambda change: change.key == "cy"
        self.sync(ANN, BOB, CY)
        self.pass_time(2)
        serving = self.removed(BOB, CY)
        serving.ends_sessions = True
        self.pass_time(SESSIONS - 2)
        self.assertIs(self.current, serving)
        self.pass_time(REFRESH * 2 + 2)
        self.assertIsNot(self.current, serving)

    def test_where_none_ends(self) -> None:
        """Who was removed does not wait for ever."""
        self.runner._supervisor._drain._limits = Limits(timeout=600.0, generations=2)
        for config in ("a", "a x", "a y"):
            self.started(config, ANN, BOB)
        oldest, serving = self.generations.draining[0], self.removed(BOB)
        self.pass_time(PATIENCE - 1)
        self.assertEqual((self.current, oldest.alive), (serving, True))
        self.pass_time(REFRESH * 2 + 2)
        self.assertEqual((self.current is serving, oldest.alive), (False, False))

    def test_a_start_that_fails_meanwhile(self) -> None:
        """Whether they left before it or during it: another run comes in afterwards."""
        for early in (True, False):
            old = self.started("a", ANN, BOB)
            old.lingering = True
            if early:
                self.successResultOf(self.remove("ann"))
            self.driver.launching.shut = True
            self.driver.faults = [CoreFailed("it fell")]
            starting = self.start("a x", ANN, BOB)
            self.successResultOf(self.remove("ann"))
            self.pass_time(REFRESH + 1)
            self.driver.launching.open()
            self.failureResultOf(starting, CoreFailed)
            self.pass_time(REFRESH + 1)
            self.assertIsNot(self.current, old)

    def test_a_stop_and_an_equal_start_meanwhile(self) -> None:
        self.started("a", ANN, BOB)
        old = self.removed(BOB)
        self.successResultOf(ensureDeferred(self.runner.stop("asked", GRACE)))
        self.pass_time(REFRESH + 1)
        self.successResultOf(self.start("a", BOB))
        self.pass_time(REFRESH + 1)
        self.assertIsNot(self.current, old)

    def test_a_way_back(self) -> None:
        """The next look at its users sees to it."""
        old = self.started("a", ANN, BOB)
        old.lingering = True
        self.started("a x", BOB).die()
        self.pass_time(61 + REFRESH)
        self.assertIsNot(self.current, old)

    def test_too_little_memory(self) -> None:
        """No run that drains is ended for it."""
        self.runner._supervisor._drain._limits = Limits(timeout=600.0, generations=4)
        for config in ("a", "a x"):
            self.started(config, ANN, BOB)
        self.patch(drain, "available", lambda: 0)
        oldest, serving = self.generations.draining[0], self.removed(BOB)
        self.pass_time(REFRESH + RETRY + 1)
        self.assertEqual((self.current, oldest.alive), (serving, True))
        self.patch(drain, "available", lambda: 1 << 40)
        self.pass_time(RETRY + 1)
        self.assertEqual((self.current is serving, oldest.alive), (False, True))
