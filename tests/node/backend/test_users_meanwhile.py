"""Users who come and go while a backend starts, runs and stops."""

from __future__ import annotations

from twisted.internet.defer import ensureDeferred

from node.backend import desired as members
from node.errors import (
    CoreFailed,
    UsersRefused,
)
from tests.harness.memory import (
    person,
)
from tests.harness.runner import ANN, BOB, CY, RunnerTests, SlowPool


class Users(RunnerTests):
    def test_order_of_arrival(self) -> None:
        """What is said of users while a Start is read comes after it, a whole set before a single one as they came."""
        self.driver.reading.shut = True
        start = self.start("a", ANN)
        done = [self.sync_user(BOB), self.sync_users(CY), self.sync_user(person("dan", "four", "a"))]
        for deferred in done:
            self.assertNoResult(deferred)
        self.driver.reading.open()
        for deferred in (start, *done):
            self.successResultOf(deferred)
        self.assertEqual(set(self.accounts()), {"cy", "dan"})

    def test_what_is_on_its_way_is_taken_back(self) -> None:
        """Who is no more in the next set is out, though the core was still being told of him when that came."""
        self.started("a")
        self.driver.applying.shut = True
        sets = [self.sync_users(ANN, BOB), self.sync_users(BOB)]
        self.driver.applying.open()
        for deferred in sets:
            self.successResultOf(deferred)
        self.assertEqual(self.accounts(), {"bob": b"two"})

    def test_a_set_for_another_configuration(self) -> None:
        """A large set is built beside the reactor; if a Start failed meanwhile it is built anew, for what is back."""
        self.started("a", ANN)
        self.driver.launching.shut = True
        start = self.start("b", person("ann", "one", "b"))
        pool = self.slow_pool()
        sync = self.sync_users(BOB, person("cy", "three", "b"))
        self.driver.faults = [CoreFailed("it fell")]
        self.driver.launching.open()
        self.failureResultOf(start, CoreFailed)
        pool.work()
        self.successResultOf(sync)
        self.assertEqual(self.core.accounts, {"a": {"bob": b"two"}})

    def test_a_large_change_is_made_beside_the_reactor(self) -> None:
        """What comes in chunks, too. It has the same effect as a small one, and what comes after it waits."""
        self.started("a", ANN, BOB)
        self.patch(members, "BUILD_INLINE", 0)
        pool = SlowPool()
        self.clock.getThreadPool = lambda: pool
        self.clock.callFromThread = lambda call, *args: call(*args)
        update = ensureDeferred(self.runner.users.update([person("bob"), CY, person("dan", "bad", "a")]))
        later = self.sync_user(person("cy", "four", "a"))
        self.assertNoResult(update)
        self.assertNoResult(later)
        self.assertEqual(self.accounts(), {"ann": b"one", "bob": b"two"})
        pool.work()
        [(name, _)] = self.failureResultOf(update, UsersRefused).value.refused
        self.successResultOf(later)
        self.assertEqual((name, self.accounts()), ("dan", {"ann": b"one", "cy": b"four"}))
        self.assertEqual(list(self.record.kept), list(self.runner.desired.roster.users))

    def test_a_large_change_while_a_start_fails(self) -> None:
        """It is made for what is back, and for nothing else."""
        self.started("a", ANN)
        self.driver.launching.shut = True
        start = self.start("b", person("ann", "one", "b"))
        self.patch(members, "BUILD_INLINE", 0)
        pool = SlowPool()
        self.clock.getThreadPool = lambda: pool
        self.clock.callFromThread = lambda call, *args: call(*args)
        update = ensureDeferred(self.runner.users.update([BOB, person("cy", "three", "b")]))
        self.driver.faults = [CoreFailed("it fell")]
        self.driver.launching.open()
        self.failureResultOf(start, CoreFailed)
        pool.work()
        self.successResultOf(update)
        self.assertEqual(self.core.accounts, {"a": {"ann": b"one", "bob": b"two"}})

    def test_nothing_for_another_configuration(self) -> None:
        """Changes that wait for a busy core are not made to it any more once another Start was accepted."""
        core = self.started("a,b", ANN)
        self.driver.applying.shut = True
        first, second = self.sync_user(BOB), self.sync_user(person("cy", "old", "a", "b"))
        start = self.start("b,c", person("cy", "new", "b", "c"))
        third = self.sync_user(person("dan", "four", "c"))
        self.assertEqual(self.runner.status.state, "starting")
        self.driver.applying.open()
        for deferred in (first, second, third, start):
            self.successResultOf(deferred)
        self.assertEqual(core.accounts, {"a": {"ann": b"one", "bob": b"two"}, "b": {}})
        self.assertEqual(self.core.accounts, {"b": {"cy": b"new"}, "c": {"cy": b"new", "dan": b"four"}})
