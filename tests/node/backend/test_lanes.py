"""Removals are applied at once; a run is counted for all of its life; and no caller waits without end."""

from __future__ import annotations

from collections.abc import Set

from twisted.internet.defer import ensureDeferred

from drivers.pretended.scripted import Gate, SharedGeneration
from node.backend import drain
from node.backend.faults import PATIENCE
from node.backend.options import BackendOptions
from node.backend.pending import WINDOW
from node.backend.replace import UNWANTED
from node.backend.roster import Limiter
from node.backend.wind_down import CALLER
from node.base.errors import Aborted, CoreFailed, InvalidConfig
from node.contract.driver import Generation
from tests.harness.memory import person
from tests.harness.overlap import ANN, BOB, CY, GRACE, OverlapTests


class Lanes(OverlapTests):
    """Additions need a new run, removals do not."""

    def setUp(self) -> None:
        super().setUp()
        self.driver.dear = lambda change: change.packed is not None

    def tearDown(self) -> None:
        self.driver.leading.open()
        self.driver.reading.open()
        super().tearDown()
        self.assertEqual(self.driver.unread, [])

    def test_while_additions_are_collected(self) -> None:
        """The removal is answered at once, and the new run does not know the user."""
        old = self.started("a", ANN, BOB)
        added = self.sync(ANN, BOB, CY)
        self.pass_time(WINDOW / 2)
        self.successResultOf(self.remove("bob"))
        self.assertEqual(self.names(old), {"ann"})
        self.pass_time(1)
        self.successResultOf(added)
        self.assertEqual(self.names(self.current), {"ann", "cy"})

    def test_while_a_core_comes_and_hangs(self) -> None:
        """Only the caller whose user needs the new core waits for it."""
        old = self.started("a", ANN, BOB)
        self.driver.launching.shut = True
        added = self.sync(ANN, BOB, CY)
        self.pass_time(1)
        self.successResultOf(self.remove("bob"))
        self.assertEqual(self.names(old), {"ann"})
        self.assertNoResult(added)
        self.driver.launching.open()
        self.pass_time(1)
        self.successResultOf(added)
        self.assertEqual(self.names(self.current), {"ann", "cy"})

    def test_while_a_core_is_proved(self) -> None:
        """The new run started with the user, but takes over without them."""
        self.started("a", ANN, BOB)
        self.driver.proving.shut = True
        added = self.sync(ANN, BOB, CY)
        self.pass_time(1)
        self.successResultOf(self.remove("bob"))
        self.driver.proving.open()
        self.successResultOf(added)
        self.assertEqual(self.names(self.current), {"ann", "cy"})

    def test_while_connections_are_led(self) -> None:
        """The removal is answered when the run that takes over has removed the user as well."""
        old = self.started("a", ANN, BOB)
        self.driver.leading.shut = True
        added = self.sync(ANN, BOB, CY)
        self.pass_time(1)
        [new] = self.generations.taking_over
        self.successResultOf(self.remove("bob"))
        self.assertEqual((self.names(old), self.names(new)), ({"ann"}, {"ann", "cy"}))
        self.driver.leading.open()
        self.successResultOf(added)
        self.assertEqual((self.current, self.names(self.current)), (new, {"ann", "cy"}))

    def test_that_the_serving_core_did_not_apply(self) -> None:
        """A core that comes takes over without the user all the same."""
        self.started("a", ANN, BOB)
        self.driver.proving.shut = self.driver.leading.shut = True
        added = self.sync(ANN, BOB, CY)
        self.pass_time(1)
        self.driver.fault = CoreFailed("no answer")
        self.failureResultOf(self.remove("bob"), CoreFailed)
        self.driver.fault = None
        self.driver.proving.open()
        [new] = self.generations.taking_over
        self.assertEqual(self.names(new), {"ann", "cy"})
        self.driver.leading.open()
        self.pass_time(1)
        self.successResultOf(added)
        self.assertEqual(self.names(self.current), {"ann", "cy"})

    def test_the_old_half_of_a_credential(self) -> None:
        """The old credential is removed at once; the new one comes with the next run."""
        old = self.started("a", ANN, BOB)
        changed = self.sync(person("ann", "new", "a"), BOB)
        self.assertEqual(old.accounts["a"], {"bob": b"two"})
        self.pass_time(1)
        self.successResultOf(changed)
        self.assertEqual(self.current.accounts["a"], {"ann": b"new", "bob": b"two"})

    def test_additions_that_a_run_left_before_it_drained(self) -> None:
        """They are no reason to end it: only removals that it cannot perform are."""
        old = self.started("a", ANN)
        self.driver.applying.shut = True
        added = self.sync(ANN, BOB)
        start = self.start("a x", ANN, BOB)
        self.assertIn(old, self.generations.draining)
        self.driver.applying.open()
        self.pass_time(1)
        self.successResultOf(start)
        self.successResultOf(added)
        self.assertEqual((old.alive, self.names(self.current)), (True, {"ann", "bob"}))

    def test_behind_a_start_that_waits(self) -> None:
        """The serving core removes the user now, and the core of the Start comes up without them."""
        old = self.started("a", ANN, BOB)
        self.driver.reading.shut = True
        start = self.start("a x", ANN, BOB)
        removed = self.remove("bob")
        self.assertEqual(self.names(old), {"ann"})
        self.assertNoResult(removed)
        self.driver.reading.open()
        self.successResultOf(start)
        self.successResultOf(removed)
        self.assertEqual(self.names(self.current), {"ann"})

    def test_a_set_behind_a_start_that_waits(self) -> None:
        """The same for users missing in a whole set; a later call brings them in again."""
        old = self.started("a", ANN, BOB)
        self.driver.dear = lambda _: False
        self.driver.reading.shut = True
        start = self.start("a x", ANN, BOB)
        replaced, added = self.sync(ANN), ensureDeferred(self.runner.users.update([BOB]))
        self.assertEqual(self.names(old), {"ann"})
        self.driver.reading.open()
        for deferred in (start, replaced, added):
            self.successResultOf(deferred)
        self.assertEqual(self.names(self.current), {"ann", "bob"})

    def test_a_quota_behind_a_start_that_waits(self) -> None:
        """The core removes the user before the Start is read."""
        limiter = Off()
        self.runner.desired.limiter = limiter
        old = self.started("a", ANN, BOB)
        self.driver.reading.shut = True
        start = self.start("a x", ANN, BOB)
        limiter.off = frozenset({"bob"})
        out = ensureDeferred(self.runner.users.keep_out(limiter.off))
        self.assertEqual(self.names(old), {"ann"})
        self.driver.reading.open()
        self.successResultOf(start)
        self.successResultOf(out)
        self.assertEqual(self.names(self.current), {"ann"})

    def test_a_quota_that_is_lifted_behind_a_start_that_waits(self) -> None:
        """The user is in again when the Start is done: the limits change the set of users who are off meanwhile."""
        limiter, off = Off(), set[str]()
        limiter.off = off
        self.driver.dear = lambda _: False
        self.runner.desired.limiter = limiter
        old = self.started("a", ANN, BOB)
        self.driver.reading.shut = True
        start = self.start("a x", ANN, BOB)
        off.add("bob")
        out = ensureDeferred(self.runner.users.keep_out(off))
        self.assertEqual(self.names(old), {"ann"})
        off.clear()
        self.driver.reading.open()
        self.successResultOf(start)
        self.successResultOf(out)
        self.assertEqual(self.names(self.current), {"ann", "bob"})

    def test_a_quota_that_is_lifted_behind_a_start_that_is_refused(self) -> None:
        """The core that goes on has the user again."""
        off = set[str]()
        self.driver.dear = lambda _: False
        old = self.started("a", ANN, BOB)
        self.driver.reading.shut = True
        start = self.start("a bad", ANN, BOB)
        off.add("bob")
        out = ensureDeferred(self.runner.users.keep_out(off))
        self.assertEqual(self.names(old), {"ann"})
        off.clear()
        self.driver.reading.open()
        self.failureResultOf(start, InvalidConfig)
        self.successResultOf(out)
        self.assertEqual(self.names(old), {"ann", "bob"})

    def test_a_removal_for_a_quota_fails_once(self) -> None:
        """The next try asks the core again, though the roster has the change already."""
        limiter = Off()
        self.runner.desired.limiter = limiter
        self.started("a", ANN, BOB)
        limiter.off = frozenset({"bob"})
        self.driver.fault = CoreFailed("no answer")
        self.failureResultOf(ensureDeferred(self.runner.users.keep_out(limiter.off)), CoreFailed)
        self.driver.fault = None
        self.successResultOf(ensureDeferred(self.runner.users.keep_out(limiter.off)))
        self.assertEqual(self.names(self.current), {"ann"})


class OneLife(OverlapTests):
    """A run that got connections is read a last time before it ends, whatever happens in between."""

    def setUp(self) -> None:
        super().setUp()
        self.driver.dear = lambda change: change.packed is not None

    def tearDown(self) -> None:
        self.driver.leading.open()
        super().tearDown()
        self.assertEqual(self.driver.unread, [])

    def leading(self) -> Generation:
        """A run that takes over for an addition, while connections are being directed to it."""
        self.driver.leading.shut = True
        self.sync(ANN, BOB).addErrback(lambda _: None)
        self.pass_time(1)
        [new] = self.generations.taking_over
        self.assertIn(new, self.generations.counting)
        return new

    def test_a_start_comes(self) -> None:
        """It gives way, drains with the connections that it got, and is read before it ends."""
        old = self.started("a", ANN)
        new = self.leading()
        start = self.start("a x", ANN, BOB)
        self.driver.leading.open()
        self.successResultOf(start)
        self.assertEqual(set(self.generations.draining), {old, new})
        self.assertEqual(self.current.plan.config, "a x")

    def test_a_stop_comes(self) -> None:
        """It ends with a last reading, as the others do."""
        old = self.started("a", ANN)
        new = self.leading()
        stop = ensureDeferred(self.runner.stop("asked"))
        self.driver.leading.open()
        self.pass_time(1)
        self.successResultOf(stop)
        self.assertTrue(old.wound_down and new.wound_down)  # type: ignore[attr-defined]

    def test_a_stop_with_grace_comes(self) -> None:
        """New connections go back to the core that waits for the Start, and that Start takes it back."""
        old = self.started("a", ANN)
        new = self.leading()
        stop = ensureDeferred(self.runner.stop("asked", GRACE))
        self.driver.leading.open()
        self.successResultOf(stop)
        self.assertEqual((self.driver.led, self.generations.draining), (old, (new, old)))
        self.driver.dear = lambda _: False
        self.successResultOf(self.start("a", ANN))
        self.assertEqual((self.current, self.generations.draining), (old, (new,)))

    def test_a_stop_comes_while_one_starts_alone(self) -> None:
        """It listens before it answers, and gets connections without being led to: it is read before it ends."""
        self.driver.launching.shut = True
        start = self.start("a", ANN)
        stop = ensureDeferred(self.runner.stop("asked"))
        self.pass_time(UNWANTED / 2)
        self.assertNoResult(stop)
        self.driver.launching.open()
        self.pass_time(1)
        self.successResultOf(stop)
        self.failureResultOf(start, Aborted)
        [core] = self.driver.cores
        self.assertEqual((core.wound_down, core.alive), (True, False))

    def test_a_stop_comes_while_one_hangs_as_it_starts_alone(self) -> None:
        """It cannot be read, and is killed soon."""
        self.driver.launching.shut = True
        start = self.start("a", ANN)
        stop = ensureDeferred(self.runner.stop("asked"))
        self.pass_time(UNWANTED)
        self.successResultOf(stop)
        self.failureResultOf(start, Aborted)
        self.assertEqual((self.driver.cores, self.driver.launching.waiting), ([], 0))

    def test_one_that_was_never_led_to(self) -> None:
        """It has no connections, and is killed at once."""
        self.started("a", ANN)
        self.driver.proving.shut = True
        self.sync(ANN, BOB).addErrback(lambda _: None)
        self.pass_time(1)
        new = self.driver.cores[-1]
        self.assertIn(new, self.generations.counting)
        self.successResultOf(ensureDeferred(self.runner.stop("asked")))
        self.assertEqual((new.killed, self.generations.counting), (True, ()))

    def test_silent_at_its_end(self) -> None:
        """The node asks twice, reports that the counters were not read, and kills it; no caller waits for long."""
        core = self.started("a", ANN)
        core.silent = True
        stop = ensureDeferred(self.runner.stop("asked"))
        self.pass_time(CALLER.answer + 0.5)
        self.assertEqual((core.asked, core.alive), (2, True))
        self.pass_time(CALLER.answer)
        self.successResultOf(stop)
        self.assertTrue(core.killed)
        self.assertIn(b"counters.lost", b"".join(packed for _, packed in self.runner.journal.read(0)))

    def test_silent_for_a_moment(self) -> None:
        """A core that answers the second request is read."""
        core = self.started("a", ANN)
        core.silent = True
        stop = ensureDeferred(self.runner.stop("asked"))
        self.pass_time(CALLER.answer + 0.5)
        core.silent = False
        self.pass_time(1)
        self.successResultOf(stop)
        self.assertEqual((core.killed, core.wound_down), (False, True))


class Verdicts(OverlapTests):
    """Users are left out only because a core refused them."""

    def setUp(self) -> None:
        super().setUp()
        self.driver.dear = lambda change: change.packed is not None

    def come(self) -> SharedGeneration:
        """The new run that brings another user."""
        self.pass_time(3)
        self.assertEqual(self.names(self.current), {"ann", "bob"})
        return self.current

    def test_it_crashes_twice(self) -> None:
        """The user who came with it is to blame then, `info` warns, and no new run starts for them."""
        old = self.started("a", ANN)
        self.sync(ANN, BOB)
        for _ in range(2):
            self.come().die(2)
            self.assertEqual(self.current, old)
        self.pass_time(100)
        self.assertEqual((self.current, len(self.driver.running)), (old, 1))
        self.assertIn("the core crashes with this user", "".join(self.runner.warnings))
        self.sync(ANN, BOB)
        self.come()

    def test_it_is_killed(self) -> None:
        """A kill does not count against the user: the node tries again and again."""
        old = self.started("a", ANN)
        self.sync(ANN, BOB)
        for _ in range(4):
            # On probation.
            self.come().die(-9)
            self.assertEqual(self.current, old)
        self.pass_time(20)
        self.assertEqual(self.names(self.current), {"ann", "bob"})


class Patience(OverlapTests):
    """A caller is answered in time, and the work for it goes on."""

    def tearDown(self) -> None:
        self.driver.applying.open()
        super().tearDown()

    def test_a_change_of_users(self) -> None:
        """The error says that the node continues, and it does."""
        self.started("a", ANN)
        self.driver.applying.shut = True
        added = self.sync(ANN, BOB)
        self.pass_time(PATIENCE + 0.125)
        self.failureResultOf(added, CoreFailed)
        self.driver.applying.open()
        self.assertEqual(self.names(self.current), {"ann", "bob"})

    def test_behind_an_operation(self) -> None:
        """A change that waits for its turn is made when that comes."""
        self.started("a", ANN)
        before = Gate()
        before.shut = True
        operation = ensureDeferred(self.runner._control.run(lambda _: before.passed()))
        added = ensureDeferred(self.runner.users.apply(BOB))
        self.pass_time(PATIENCE + 0.125)
        self.failureResultOf(added, CoreFailed)
        before.open()
        self.successResultOf(operation)
        self.assertEqual(self.names(self.current), {"ann", "bob"})

    def test_a_stop_behind_a_core_that_hangs_as_it_comes(self) -> None:
        """The Stop cancels the launch."""
        self.started("a", ANN)
        self.driver.launching.shut = True
        start = self.start("a x", ANN)
        self.successResultOf(ensureDeferred(self.runner.stop("asked")))
        self.failureResultOf(start, Aborted)


class Storm(OverlapTests):
    """More Starts than cores can start."""

    def tearDown(self) -> None:
        self.driver.reading.open()
        super().tearDown()

    def test_starts_that_wait_behind_one_another(self) -> None:
        """A Start that a later one replaces starts no core, and its caller is answered when that one runs."""
        self.started("a", ANN)
        self.driver.reading.shut = True
        starts = [self.start(f"a {name}", ANN) for name in "xyz"]
        self.driver.reading.open()
        self.pass_time(1)
        for start in starts:
            self.successResultOf(start)
        self.assertEqual([core.plan.config for core in self.driver.cores], ["a", "a y", "a z"])

    def test_a_change_of_users_between_two_starts(self) -> None:
        """Its caller expects the earlier configuration to run."""
        self.started("a", ANN)
        self.driver.reading.shut = True
        self.start("a x", ANN)
        added = ensureDeferred(self.runner.users.apply(BOB))
        self.start("a y", ANN, BOB)
        self.driver.reading.open()
        self.pass_time(1)
        self.successResultOf(added)
        self.assertEqual([core.plan.config for core in self.driver.cores], ["a", "a x", "a y"])


class Room(OverlapTests):
    """Which draining runs are ended early."""

    limits = BackendOptions(drain_timeout=60.0, drain_generations=2)

    def test_the_one_with_the_fewest_connections(self) -> None:
        """The one with the fewest connections is ended, not the oldest."""
        first, second, third = (self.started(f"a {number}", ANN) for number in range(3))
        first.connections, second.connections, third.connections = 200, 1, 5
        fourth = self.started("a 4", ANN)
        self.pass_time(1)
        self.assertEqual([run.alive for run in (first, second, third, fourth)], [True, False, True, True])

    def test_those_without_connections_do_not_count(self) -> None:
        """They do not count for the bound, and end when they have drained for long enough."""
        runs = []
        for number in range(6):
            runs.append(self.started(f"a {number}", ANN))
            runs[-1].connections = 0 if number else 200
            self.pass_time(1.5)
        self.assertTrue(runs[0].alive)
        self.assertEqual(self.runner.supervisor.happened.dropped, 0)
        self.assertGreater(len(self.generations.draining), self.limits.drain_generations)
        self.assertFalse(self.runner.supervisor._drain.full, "a change of users would wait")

    def test_a_start_waits_for_memory(self) -> None:
        """Connections that end in a moment are not ended for it."""
        old = self.started("a", ANN)
        second = self.started("a x", ANN)
        left = [1]
        self.patch(drain, "available", lambda: left[0])
        start = self.start("a y", ANN)
        self.pass_time(drain.ROOM / 2)
        self.assertEqual((old.alive, second.alive), (True, True))
        left[0] = 1 << 40
        self.pass_time(drain.ROOM)
        self.successResultOf(start)
        self.assertEqual((old.alive, second.alive, self.runner.supervisor.happened.dropped), (True, True, 0))


class Broken(OverlapTests):
    """Operations that are aborted, or fail, half-way."""

    def tearDown(self) -> None:
        self.driver.leading.open()
        self.driver.reading.open()
        super().tearDown()

    def test_a_start_is_aborted_while_it_makes_room(self) -> None:
        """The run that it was about to end still ends, and a removed user's connections with it."""
        one, two = self.started("a y", ANN, BOB), self.started("a z", ANN, BOB)
        self.pass_time(6)
        self.patch(drain, "available", lambda: 0 if len(self.driver.running) > 1 else 1 << 40)
        one.silent = True
        start = self.start("a w", ANN, BOB)
        self.pass_time(2)
        stop = ensureDeferred(self.runner.stop("asked", GRACE))
        self.failureResultOf(start, Aborted)
        self.successResultOf(stop)
        self.successResultOf(self.start("a z", ANN, BOB))
        one.silent = False
        self.pass_time(12)
        self.assertEqual((one.alive, self.current, self.generations.counting), (False, two, (two,)))

    def test_a_launch_is_aborted_while_it_clears_up(self) -> None:
        """The new run that failed is forgotten."""
        self.started("a", ANN)
        self.driver.dear = lambda change: change.packed is not None
        self.driver.proving.shut = self.driver.stopping.shut = True
        self.sync(ANN, BOB).addErrback(lambda _: None)
        self.pass_time(1)
        new = self.driver.cores[-1]
        assert isinstance(new, SharedGeneration)
        new.proof = CoreFailed("no proof")
        self.driver.proving.open()
        start = self.start("a x", ANN)
        self.driver.stopping.open()
        self.pass_time(1)
        self.successResultOf(start)
        self.assertNotIn(new, self.generations.counting)

    def test_a_removal_that_takes_another_run(self) -> None:
        """The node retries soon if that run did not start."""
        self.started("a", ANN, BOB)
        self.driver.dear = lambda change: change.packed is None
        self.driver.faults = [CoreFailed("killed")] * 2
        removed = self.remove("bob")
        self.pass_time(1)
        self.failureResultOf(removed, CoreFailed)
        self.driver.dear = lambda _: False
        self.pass_time(3)
        self.assertEqual(self.names(self.current), {"ann"})

    def test_a_batch_that_fails(self) -> None:
        """The node retries soon."""
        self.started("a", ANN)
        self.driver.fault = CoreFailed("no answer")
        self.failureResultOf(self.sync(ANN, BOB), CoreFailed)
        self.driver.fault = None
        self.pass_time(3)
        self.assertEqual(self.names(self.current), {"ann", "bob"})

    def test_retries_that_fail(self) -> None:
        """The log has no traceback, which would fail this test, and a later retry succeeds."""
        self.started("a", ANN)
        self.driver.fault = CoreFailed("no answer")
        self.failureResultOf(self.sync(ANN, BOB), CoreFailed)
        self.pass_time(10)
        self.assertEqual(self.names(self.current), {"ann"})
        self.driver.fault = None
        self.pass_time(10)
        self.assertEqual(self.names(self.current), {"ann", "bob"})

    def test_a_set_whose_caller_was_answered(self) -> None:
        """Users missing in it stay barred until its turn comes."""
        one = self.started("a y", ANN, BOB)
        before = Gate()
        before.shut = True
        operation = ensureDeferred(self.runner._control.run(lambda _: before.passed()))
        replaced = self.sync(BOB)
        self.pass_time(PATIENCE + 1)
        self.failureResultOf(replaced, CoreFailed)
        self.assertEqual(self.names(one), {"bob"})
        self.successResultOf(ensureDeferred(self.runner.supervisor.settling.settle_all()))
        self.assertEqual(self.names(one), {"bob"})
        before.open()
        self.successResultOf(operation)
        self.assertEqual(list(self.record.kept), ["bob"])

    def test_others_wait_while_a_refresh_fails(self) -> None:
        """They come with the next run."""
        old = self.started("a", ANN, BOB)
        old.lingering = True
        self.driver.dear = lambda change: change.key == "cy"
        self.driver.leading.shut = True
        self.successResultOf(self.remove("bob"))
        self.pass_time(2.5)
        self.assertEqual(len(self.generations.taking_over), 1)
        added = ensureDeferred(self.runner.users.update([CY]))
        self.driver.fault = CoreFailed("no answer")
        self.sync(ANN, CY, person("dan", "q", "a")).addErrback(lambda _: None)
        self.driver.leading.open()
        self.pass_time(0.25)
        self.driver.fault = None
        self.pass_time(3)
        added.addErrback(lambda _: None)
        self.assertEqual(self.names(self.current), {"ann", "cy", "dan"})

    def test_inbounds_change_while_a_run_takes_over(self) -> None:
        """A change of users is not sent to inbounds that the new run does not have."""
        old = self.started("a", ANN, BOB)
        old.lingering = True
        self.driver.reading.shut = True
        start = self.start("b", person("ann", "one", "b"))
        self.driver.leading.shut = True
        self.runner.supervisor._pending.refresh.soon()
        self.pass_time(2)
        self.assertEqual(len(self.generations.taking_over), 1)
        added = ensureDeferred(self.runner.users.update([person("bob", "two", "b")]))
        self.driver.reading.open()
        self.driver.leading.open()
        self.pass_time(1)
        self.successResultOf(start)
        self.successResultOf(added)
        self.assertEqual(self.current.accounts, {"b": {"ann": b"one", "bob": b"two"}})


class Off(Limiter):
    """The test decides who is off."""

    def __init__(self) -> None:
        self.off: Set[str] = frozenset()

    def install(self, said: object, users: object) -> Set[str]:
        return self.off

    def follow(self, key: str) -> bool:
        return key in self.off
