"""Cores that crash, and cores that do not answer."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

from twisted.internet.defer import Deferred, ensureDeferred

from drivers.pretended.scripted import Gate, MemoryDriver, MemoryGeneration
from node.backend.health import AUDIT, INTERVAL, PATIENCE
from node.base.errors import (
    CoreFailed,
    InvalidConfig,
    NotInitialized,
    NotStarted,
    UsersRefused,
)
from node.contract.accounts import Accounts
from protos.service_pb2 import Backend
from tests.harness.memory import person
from tests.harness.runner import ANN, BOB, CY, GRACE, WAITING, RunnerTests


class Crashes(RunnerTests):
    def test_at_once(self) -> None:
        """A crashed core restarts at once, with its users; calls get `NotStarted` meanwhile."""
        self.started("a", ANN)
        self.core.die(-9)
        self.assertEqual(self.runner.status.state, "restarting")
        with self.assertRaises(NotStarted) as raised:
            self.runner.status.require()
        self.assertIn("signal 9", raised.exception.text)
        self.pass_time(0)
        self.assertEqual((self.runner.status.state, self.accounts()), ("running", {"ann": b"one"}))
        self.assertIn("backend restarting: the core ended unexpectedly (signal 9)", self.told)

    def test_its_last_counters(self) -> None:
        """They are booked as far as the node knows them, before the run is forgotten."""
        self.started("a", ANN)
        core = self.core
        core.die(-9)
        self.assertIn([core], self.read)
        self.assertNotIn(core, self.generations.counting)

    def test_later_and_later(self) -> None:
        """A core that keeps failing is retried after 0, 1, 2, 4 … s, then every 30 s without end."""
        self.started("a", ANN)
        self.driver.faults = [CoreFailed("it fell")] * 9
        before = self.clock.seconds()
        self.core.die()
        self.pass_time(200)
        tries = [before, *self.driver.launches[1:]]
        self.assertEqual(
            [round(later - earlier) for earlier, later in pairwise(tries)],
            [0, 1, 2, 4, 8, 16, 30, 30, 30, 30],
        )
        self.assertEqual(self.runner.status.state, "running")

    def test_one_that_served(self) -> None:
        """A core that served for some seconds restarts at once, however often it crashes."""
        self.started("a", ANN)
        for _ in range(8):
            self.pass_time(3)
            self.core.die()
            self.pass_time(0)
            self.assertEqual(self.runner.status.state, "running")

    def test_one_that_dies_young(self) -> None:
        """The pauses of a core that starts and dies at once grow, until it has served for a while."""
        self.started("a", ANN)
        for pause in (0, 1, 2, 4):
            self.core.die()
            if pause:
                self.pass_time(pause - 0.25)
                self.assertEqual(self.driver.running, [])
            self.pass_time(0.25)
            self.assertEqual(self.runner.status.state, "running")
        self.pass_time(3)
        self.core.die()
        self.pass_time(0)
        self.assertEqual(self.runner.status.state, "running")

    def test_users_changed_meanwhile(self) -> None:
        """Users that change while the core is down or starting are applied when it is up."""
        self.started("a", ANN, BOB)
        self.driver.faults = [CoreFailed("it fell")] * 2
        self.core.die()
        self.pass_time(0)
        self.successResultOf(self.sync_users(BOB))
        self.successResultOf(self.sync_user(CY))
        self.driver.launching.shut = True
        self.pass_time(1)
        self.successResultOf(self.sync_user(person("bob")))
        self.driver.faults = []
        self.driver.launching.open()
        self.assertEqual((self.runner.status.state, self.accounts()), ("running", {"cy": b"three"}))

    def test_refused_users_meanwhile(self) -> None:
        """Refused users are reported although the core is down."""
        self.started("a", ANN)
        self.driver.launching.shut = True
        self.core.die()
        self.pass_time(0)
        refused = self.failureResultOf(self.sync_users(BOB, person("eve", "bad", "a")), UsersRefused).value.refused
        self.assertEqual([name for name, _ in refused], ["eve"])
        self.driver.launching.open()
        self.assertEqual(self.accounts(), {"bob": b"two"})

    def test_a_refused_configuration(self) -> None:
        """A configuration that is refused at a restart is not retried, and the error text says that."""
        self.started("a", ANN)
        self.driver.faults = [InvalidConfig("it is odd")]
        self.core.die()
        self.pass_time(600)
        self.assertEqual((self.runner.status.state, self.runner.status.reason), ("failed", "it is odd"))
        with self.assertRaises(CoreFailed) as raised:
            self.runner.status.require()
        self.assertNotIn(WAITING, raised.exception.text)
        self.assertEqual(len(self.driver.launches), 2)
        self.successResultOf(self.start("a", ANN))

    def test_an_unforeseen_fault(self) -> None:
        """An internal error does not end the retries."""
        self.started("a", ANN)
        self.driver.faults = [KeyError("x")]
        self.core.die()
        self.pass_time(1)
        self.assertEqual(self.runner.status.state, "running")
        self.assertEqual(len(self.flushLoggedErrors(KeyError)), 1)

    def test_another_backend_resets_the_backoff(self) -> None:
        """The first crash of another backend is retried at once, whatever the previous one did."""
        self.started("a", ANN)
        self.driver.faults = [CoreFailed("it fell")] * 5
        self.core.die()
        self.pass_time(10)
        self.driver.faults = []
        self.started("b", BOB).die()
        self.pass_time(0)
        self.assertEqual(self.runner.status.state, "running")

    def test_while_a_batch_is_under_way(self) -> None:
        """A sync whose core dies meanwhile succeeds: its users are in the core after the restart."""
        self.started("a", ANN)
        self.driver.applying.shut = True
        sync = self.sync_users(ANN, BOB)
        self.core.die()
        self.driver.applying.open()
        self.successResultOf(sync)
        self.pass_time(0)
        self.assertEqual(set(self.accounts()), {"ann", "bob"})

    def test_a_start_under_way(self) -> None:
        """A core dies while a Start of another one is checked: that Start goes on, and one core runs."""
        self.started("a", ANN)
        self.driver.reading.shut = True
        start = self.start("b", BOB)
        self.core.die()
        self.pass_time(0)
        self.driver.reading.open()
        self.pass_time(60)
        self.successResultOf(start)
        self.assertEqual((self.runner.status.state, self.core.plan.config), ("running", "b"))

    def test_a_core_that_hangs(self) -> None:
        """A core that lives and does not answer is killed and restarted."""
        core = self.started("a", ANN)
        core.silent = True
        self.pass_time(INTERVAL + PATIENCE + 1)
        self.assertTrue(core.killed)
        self.assertEqual((self.runner.status.state, self.accounts()), ("running", {"ann": b"one"}))
        self.assertIn("the core is killed: it did not answer for 10 s", self.told)

    def test_drift(self) -> None:
        """Users that the core gained or lost behind the node's back are repaired within a minute."""

        def drift(accounts: dict[str, Accounts]) -> int:
            del accounts["a"]["ann"]
            accounts["a"]["stranger"] = b"who"
            return 2

        self.started("a", ANN).audits = [drift]
        self.pass_time(AUDIT)
        self.assertEqual(self.accounts(), {"ann": b"one"})


class Stalls(RunnerTests):
    """A core that hangs for some seconds: no change is forgotten, and none is reported as done too early."""

    def stall(self, core: MemoryGeneration, seconds: float) -> None:
        core.silent = True
        self.clock.callLater(seconds, setattr, core, "silent", False)

    def calls(self) -> dict[str, Callable[[], Deferred[None]]]:
        """Ways to remove Ann and to add Cy."""
        return {
            "a whole set": lambda: self.sync_users(BOB, CY),
            "a partial update": lambda: ensureDeferred(self.runner.users.update([person("ann"), CY])),
            "an equal Start": lambda: self.start("a", BOB, CY),
        }

    def test_it_fails_and_is_applied_later(self) -> None:
        """A change that was not applied fails, and is in force as soon as the core answers, without another call."""
        for name, call in self.calls().items():
            core = self.started("a", ANN, BOB)
            self.stall(core, 8)
            done = call()
            self.pass_time(7.5)
            self.failureResultOf(done, UsersRefused, CoreFailed)
            self.assertEqual(set(self.accounts()), {"ann", "bob"}, name)
            self.pass_time(1)
            self.assertEqual((self.accounts(), self.core), ({"bob": b"two", "cy": b"three"}, core), name)
            self.stopped()

    def test_a_repeated_call(self) -> None:
        """A second, equal SyncUser fails as well."""
        core = self.started("a", ANN)
        self.stall(core, 14)
        for _ in range(2):
            done = ensureDeferred(self.runner.users.update([person("ann")]))
            self.pass_time(6.5)
            self.failureResultOf(done, UsersRefused)
        done = ensureDeferred(self.runner.users.update([person("ann")]))
        self.pass_time(7)
        self.successResultOf(done)
        self.assertEqual((self.accounts(), self.core), ({}, core))

    def test_in_grace(self) -> None:
        """A user removed from a core in its grace after a Stop is out as soon as it answers."""
        core = self.started("a", ANN, BOB)
        self.stopped(GRACE)
        self.stall(core, 8)
        self.failureResultOf(self.sync_user(person("ann")), NotInitialized)
        self.pass_time(8.5)
        self.assertEqual(self.accounts(), {"bob": b"two"})

    def test_one_that_stays_silent(self) -> None:
        """The core is killed and restarts with the wanted users."""
        core = self.started("a", ANN, BOB)
        core.silent = True
        done = self.sync_users(BOB)
        self.pass_time(7)
        self.failureResultOf(done, UsersRefused)
        self.pass_time(INTERVAL + PATIENCE)
        self.assertTrue(core.killed)
        self.assertEqual(self.accounts(), {"bob": b"two"})

    def test_at_each_audit(self) -> None:
        """A change that the core did not take, for whatever reason, is retried at each audit."""
        self.started("a", ANN)
        self.driver.fault = KeyError("x")
        self.failureResultOf(self.sync_users(BOB), KeyError)
        self.driver.fault = None
        self.pass_time(AUDIT)
        self.assertEqual(self.accounts(), {"bob": b"two"})

    def test_a_refused_change_is_not_retried(self) -> None:
        """If a change is costly for all users, a core that refused it is asked again only by a controller."""
        self.started("a", ANN)
        self.driver.dear = lambda change: change.packed == b"refused"
        self.driver.unchecked = InvalidConfig("not her")
        sync = self.sync_users(person("eve", "refused", "a"), BOB)
        self.pass_time(1)
        self.failureResultOf(sync, UsersRefused)
        asked = len(self.driver.batches), len(self.driver.checks), len(self.driver.cores)
        self.pass_time(5 * AUDIT)
        self.assertEqual(self.accounts(), {"bob": b"two"})
        self.assertEqual((len(self.driver.batches), len(self.driver.checks), len(self.driver.cores)), asked)

    def test_a_user_who_cannot_be_removed(self) -> None:
        """A core that answers and does not remove a user is replaced by a new one without that user."""
        new = person("ann", "new", "a")
        calls: dict[str, Callable[[], Deferred[None]]] = {
            "a whole set": lambda: self.sync_users(new, CY),
            "a partial update": lambda: ensureDeferred(self.runner.users.update([new, person("bob"), CY])),
            "an equal Start": lambda: self.start("a", new, CY),
        }
        self.driver.unable = True
        for name, call in calls.items():
            core = self.started("a", ANN, BOB)
            done = call()
            self.pass_time(1)
            self.successResultOf(done)
            self.assertFalse(core.alive)
            self.assertEqual(
                (self.accounts(), self.runner.status.state), ({"ann": b"new", "cy": b"three"}, "running"), name
            )
            self.stopped()

    def test_another_start_during_an_audit(self) -> None:
        """The previous core is not changed by the new one's driver; the removed user is not in the new core."""
        core, other = self.started("a", ANN, BOB), MemoryDriver(self.clock)
        looking = Gate()
        looking.shut = True

        async def audit() -> int:
            await looking.passed()
            return 0

        core.audit = audit  # type: ignore[method-assign]
        self.driver.unable = True
        removal = ensureDeferred(self.runner.users.update([person("ann")]))
        start = ensureDeferred(self.runner.start(other, Backend(config="b,c", users=[BOB])))
        looking.open()
        for deferred in (removal, start):
            self.successResultOf(deferred)
        self.assertEqual((len(self.driver.batches), other.batches), (1, []))
        self.assertEqual((core.alive, len(self.driver.cores), len(other.running)), (False, 1, 1))
        self.stopped()

    def test_a_user_who_cannot_be_removed_in_grace(self) -> None:
        """That core still waits: others are connected to it. The next Start replaces it."""
        self.driver.unable = True
        core = self.started("a", ANN)
        self.stopped(GRACE)
        self.failureResultOf(self.sync_user(person("ann")), NotInitialized)
        self.pass_time(1)
        self.assertEqual((self.driver.running, self.runner.status.state), ([core], "stopped"))
        start = self.start("a", BOB)
        self.pass_time(1)
        self.successResultOf(start)
        self.assertEqual(self.accounts(), {"bob": b"two"})
