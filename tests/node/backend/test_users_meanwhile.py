"""Users who come and go while a backend starts, runs and stops."""

from __future__ import annotations

from twisted.internet.defer import ensureDeferred

from node.backend import desired as members
from node.base.errors import (
    CoreFailed,
    UsersRefused,
)
from tests.harness.memory import person
from tests.harness.runner import ANN, BOB, CY, RunnerTests, SlowPool


class Users(RunnerTests):
    def test_order_of_arrival(self) -> None:
        """Changes of users while a Start is read come after it, in their order, whole sets and single users."""
        self.driver.reading.shut = True
        start = self.start("a", ANN)
        done = [self.sync_user(BOB), self.sync_users(CY), self.sync_user(person("dan", "four", "a"))]
        for deferred in done:
            self.assertNoResult(deferred)
        self.driver.reading.open()
        for deferred in (start, *done):
            self.successResultOf(deferred)
        self.assertEqual(set(self.accounts()), {"cy", "dan"})

    def test_additions_under_way_are_taken_back(self) -> None:
        """A user missing in the next set is out, though an addition was still on its way to the core."""
        self.started("a")
        self.driver.applying.shut = True
        sets = [self.sync_users(ANN, BOB), self.sync_users(BOB)]
        self.driver.applying.open()
        for deferred in sets:
            self.successResultOf(deferred)
        self.assertEqual(self.accounts(), {"bob": b"two"})

    def test_a_set_for_another_configuration(self) -> None:
        """A large set is built in a thread; if a Start failed meanwhile it is built again, for the previous backend."""
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
        """The same for a large update. It has the same effect as a small one, and later changes wait."""
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
        """It is made for the previous backend, and for nothing else."""
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
        self.successResultOf(start)
        self.driver.applying.open()
        for deferred in (first, second, third):
            self.successResultOf(deferred)
        self.assertEqual(core.accounts, {"a": {"ann": b"one"}, "b": {}})
        self.assertEqual(self.core.accounts, {"b": {"cy": b"new"}, "c": {"cy": b"new", "dan": b"four"}})
