"""New runs beside the serving one, for changes of users, and to forget credentials of removed users."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from typing import cast

from twisted.internet.defer import Deferred, ensureDeferred, succeed

from drivers.pretended.scripted import SharedGeneration
from node.backend import drain
from node.backend.backoff import STEADY
from node.backend.options import BackendOptions
from node.backend.pending import CROWDED_WINDOW, WINDOW
from node.backend.probation import SECONDS as PROBATION
from node.backend.renewal import PATIENCE, REFRESH, RETRY, SESSIONS
from node.base.errors import Aborted, CoreFailed, InvalidConfig, UsersRefused
from node.contract.accounts import Change
from node.contract.driver import Applied
from protos.service_pb2 import User
from tests.harness.memory import person
from tests.harness.overlap import ANN, BOB, CY, GRACE, OverlapTests


class Renewals(OverlapTests):
    def setUp(self) -> None:
        super().setUp()
        self.driver.dear = lambda change: change.packed is not None

    def settled(self, done: Deferred[None], seconds: float = 1.0) -> Deferred[None]:
        self.pass_time(seconds)
        return done

    def test_users_who_come(self) -> None:
        """Other users are not affected."""
        old = self.started("a", ANN)
        self.successResultOf(self.settled(self.sync(ANN, BOB)))
        self.assertEqual((old.alive, self.names(self.current)), (True, {"ann", "bob"}))

    def test_users_removed_with_them(self) -> None:
        """They are out of the old run when the caller is answered."""
        old = self.started("a", ANN, BOB)
        self.driver.dear = lambda change: old is self.generations.current
        self.successResultOf(self.settled(self.sync(ANN, CY)))
        self.assertEqual((old.alive, self.names(old), self.names(self.current)), (True, {"ann"}, {"ann", "cy"}))

    def test_none_comes_up_with_them(self) -> None:
        """The serving run goes on. The caller's error says that the node tries again, and it does."""
        old = self.started("a", ANN)
        self.driver.faults = [CoreFailed("it fell")] * 2
        [refused] = self.failureResultOf(self.settled(self.sync(ANN, BOB), 0.375), UsersRefused).value.refused
        reason = "a: it fell; the node tries again"
        self.assertEqual((refused, self.current, self.state[0]), (("bob", reason), old, "running"))
        self.pass_time(0.5)
        self.assertEqual((self.driver.faults, self.current), ([], old))
        self.pass_time(2)
        self.assertEqual((old.alive, self.names(self.current)), (True, {"ann", "bob"}))

    def test_a_stop_while_they_come(self) -> None:
        """The new run is given up; the one that waits for a Start gets all connections."""
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
        """The old run, without the new users, keeps its users by its own configuration."""
        old = self.started("a,b", person("ann", "one", "a", "b"))
        self.driver.proving.shut = True
        sync = self.settled(self.sync(person("ann", "one", "a", "b"), person("bob", "two", "a", "b")))
        start = self.start("b", person("ann", "one", "a", "b"))
        self.driver.proving.open()
        for done in (start, sync):
            self.successResultOf(done)
        self.assertEqual((old.alive, old.accounts), (True, {"a": {"ann": b"one"}, "b": {"ann": b"one"}}))

    def test_changes_during_a_start_while_they_come(self) -> None:
        """A run that is given up for another backend gets no account of that one."""
        self.started("a", ANN)
        self.driver.leading.shut = True
        sync = self.settled(self.sync(ANN, BOB))
        [given_up] = self.generations.taking_over
        apply, came = given_up.apply, list[Change]()

        def applied(changes: Sequence[Change]) -> Awaitable[Applied]:
            came.extend(change for change in changes if change.packed is not None)
            return apply(changes)

        self.patch(given_up, "apply", applied)
        start = self.start("a x", person("ann", "other", "a"))
        changed = self.sync(person("ann", "other", "a"), CY)
        self.driver.leading.open()
        for done in (start, sync, changed):
            self.successResultOf(done)
        self.assertEqual((came, self.names(self.current)), ([], {"ann", "cy"}))

    def test_a_stop_taken_back_while_they_come(self) -> None:
        """A Start that gave a new run up is aborted, and the backend runs again before that run is gone."""
        self.started("a", ANN)
        self.driver.leading.shut = True
        sync = self.settled(self.sync(ANN, BOB))
        start = self.start("a x", ANN)
        stop = ensureDeferred(self.runner.stop("asked", GRACE))
        again = self.start("a", ANN, BOB)
        self.driver.leading.open()
        self.pass_time(3)
        for done in (stop, again):
            self.successResultOf(done)
        for done in (sync, start):
            self.failureResultOf(done, Aborted)
        self.assertEqual((self.names(self.current), self.state[0]), ({"ann", "bob"}, "running"))

    def test_a_fault_before_the_batch(self) -> None:
        """While the node cannot see how much memory is free, as without descriptors, it tries again, with pauses."""
        self.started("a", ANN)
        looks, well = list[None](), self.clock.seconds() + 2

        def full(_: drain.Drain) -> bool:
            looks.append(None)
            # The second condition ends a loop that lets no time pass.
            if self.clock.seconds() < well and len(looks) < 100:
                raise OSError("too many open files")
            return False

        self.patch(drain.Drain, "full", property(full))
        sync = self.sync(ANN, BOB)
        self.pass_time(5)
        self.successResultOf(sync)
        self.assertEqual(self.names(self.current), {"ann", "bob"})
        self.assertLess(len(looks), 20)
        self.assertEqual(len(self.flushLoggedErrors(OSError)), len(looks) - 1)

    def test_a_start_or_stop_does_not_wait_for_the_batch(self) -> None:
        """A Start or a Stop begins at once, however long changes would be batched."""
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
        """The same if a run takes over only then."""
        self.started("a", ANN)
        self.driver.proving.shut = True
        sync = self.settled(self.sync(ANN, BOB))
        stop = ensureDeferred(self.runner.stop("asked"))
        self.failureResultOf(sync, Aborted)
        self.driver.proving.open()
        self.successResultOf(stop)
        self.assertEqual((self.driver.running, self.clock.getDelayedCalls()), ([], []))

    def test_many_one_after_another(self) -> None:
        """If a draining run would end early they are batched for longer."""
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
        """Users come in by a restart, and nothing is batched for longer."""
        self.runner.supervisor._drain._options = BackendOptions(drain_generations=0)
        self.started("a", ANN)
        self.successResultOf(self.settled(self.sync(ANN, BOB)))
        self.assertIn("DRAIN_GENERATIONS is 0", "".join(self.runner.warnings))

    def test_one_that_dies_at_once(self) -> None:
        """The previous run serves again, and the users who came with the failed one come with the next, at once."""
        old = self.started("a", ANN)
        self.successResultOf(self.settled(self.sync(ANN, BOB)))
        self.current.die()
        self.pass_time(0)
        self.assertEqual((self.current, self.names(old), self.state[0]), (old, {"ann"}, "running"))
        self.pass_time(WINDOW + 0.5)
        self.assertEqual(self.names(self.current), {"ann", "bob"})

    def test_one_that_dies_after_a_while(self) -> None:
        """The same if the previous run takes them while it runs, and has served for long."""
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
        """The next one comes later and later, and the previous one serves all the time."""
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
    """A new run in place of one that keeps removed users out but still knows their credentials."""

    def removed(self, *staying: User) -> SharedGeneration:
        """A run from which a user was removed just now."""
        run = self.current
        run.lingering = True
        self.successResultOf(self.sync(*staying))
        return run

    def test_soon(self) -> None:
        """The new run does not know the removed user, and no connection ends for it."""
        self.started("a", ANN, BOB)
        old = self.removed(BOB)
        self.pass_time(REFRESH + 0.5)
        self.assertEqual((self.names(self.current), self.current is old, old.alive), ({"bob"}, False, True))

    def test_who_comes_back_meanwhile(self) -> None:
        """A new run that lacks them does not take over; the next one has them."""
        self.started("a", ANN, BOB)
        old = self.removed(BOB)
        self.driver.launching.shut = True
        self.pass_time(REFRESH + 0.5)
        self.successResultOf(self.sync(ANN, BOB))
        self.driver.dear = lambda change: change.key == "ann"
        self.driver.launching.open()
        self.pass_time(1)
        self.assertEqual((self.names(self.current), self.current is old), ({"ann", "bob"}, True))
        self.pass_time(RETRY + 1)
        self.assertEqual((self.names(self.current), self.current is old), ({"ann", "bob"}, False))

    def test_who_comes_back_as_it_takes_over(self) -> None:
        """The caller is answered when the run that gets new connections has them."""
        self.started("a", ANN, BOB)
        self.removed(BOB)
        self.driver.leading.shut = True
        self.pass_time(REFRESH + 0.5)
        [new] = self.generations.taking_over
        self.patch(new, "apply", lambda changes: succeed(Applied([], changes)))
        led = list[SharedGeneration | None]()
        back = self.sync(ANN, BOB).addCallback(lambda _: led.append(self.driver.led))
        self.pass_time(1)
        self.driver.leading.open()
        self.pass_time(1)
        self.successResultOf(back)
        self.assertEqual([self.names(run) for run in led if run], [{"ann", "bob"}])

    def test_repaired_as_it_takes_over(self) -> None:
        """No run starts for a user whom the core has refused."""
        self.started("a", ANN)
        self.driver.dear = lambda change: change.key == "bob"
        self.driver.faults = [InvalidConfig("no bob")]
        refused = self.sync(ANN, BOB)
        self.pass_time(1)
        self.failureResultOf(refused)
        self.current.lingering = True
        self.driver.leading.shut = True
        self.runner.supervisor.settling._pending.refresh.soon()
        self.pass_time(REFRESH + 0.5)
        [new] = self.generations.taking_over
        launches = len(self.driver.launches)
        repaired = ensureDeferred(self.runner.supervisor.settling.repair(new))
        self.driver.leading.open()
        self.pass_time(1)
        self.successResultOf(repaired)
        self.assertEqual((self.current is new, len(self.driver.launches)), (True, launches))

    def test_one_that_does_not_come_up(self) -> None:
        """It is retried after a while, without another change."""
        self.started("a", ANN, BOB)
        old = self.removed(BOB)
        self.driver.faults = [CoreFailed("it fell")]
        self.pass_time(REFRESH + RETRY - 1)
        self.assertEqual((self.current, len(self.driver.launches)), (old, 2))
        self.pass_time(2)
        self.assertIsNot(self.current, old)

    def test_where_one_that_drains_would_end(self) -> None:
        """It waits for that run to drain, for a while."""
        for config in ("a", "a x", "a y"):
            self.started(config, ANN, BOB)
        oldest, serving = self.generations.draining[0], self.removed(BOB)
        self.pass_time(REFRESH * 3)
        self.assertEqual((self.current, oldest.alive), (serving, True))
        cast(SharedGeneration, oldest).connections = 0
        self.pass_time(REFRESH + 2)
        self.assertNotEqual((self.current, oldest.alive), (serving, True))

    def test_where_sessions_would_end(self) -> None:
        """It waits for longer; the wait begins again when a new run has come for another reason."""
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
        """The refresh is not put off without end."""
        self.runner.supervisor._drain._options = BackendOptions(drain_timeout=600.0, drain_generations=2)
        for config in ("a", "a x", "a y"):
            self.started(config, ANN, BOB)
        oldest, serving = self.generations.draining[0], self.removed(BOB)
        self.pass_time(PATIENCE - 1)
        self.assertEqual((self.current, oldest.alive), (serving, True))
        self.pass_time(REFRESH * 2 + 2)
        self.assertEqual((self.current is serving, oldest.alive), (False, False))

    def test_a_start_that_fails_meanwhile(self) -> None:
        """Whether they were removed before the Start or during it: a new run comes afterwards."""
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
        """The next audit takes care of it."""
        old = self.started("a", ANN, BOB)
        old.lingering = True
        self.started("a x", BOB).die()
        self.pass_time(61 + REFRESH)
        self.assertIsNot(self.current, old)

    def test_too_little_memory(self) -> None:
        """No draining run is ended for it."""
        self.runner.supervisor._drain._options = BackendOptions(drain_timeout=600.0, drain_generations=4)
        for config in ("a", "a x"):
            self.started(config, ANN, BOB)
        self.patch(drain, "available", lambda: 0)
        oldest, serving = self.generations.draining[0], self.removed(BOB)
        self.pass_time(REFRESH + RETRY + 1)
        self.assertEqual((self.current, oldest.alive), (serving, True))
        self.patch(drain, "available", lambda: 1 << 40)
        self.pass_time(RETRY + 1)
        self.assertEqual((self.current is serving, oldest.alive), (False, True))
