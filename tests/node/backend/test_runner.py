"""Running a backend: starts that change nothing, starts that fail, stops that wait, crashes, and users meanwhile."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, cycle, pairwise
from typing import Any, cast

from hypothesis import example, given, settings
from hypothesis import strategies as st
from twisted.internet.defer import CancelledError, Deferred, ensureDeferred, succeed
from twisted.internet.task import Clock, deferLater
from twisted.python.failure import Failure
from twisted.trial.unittest import SynchronousTestCase

from node.backend import desired as members
from node.backend.control import Settled
from node.backend.drain import Limits
from node.backend.faults import in_background
from node.backend.generations import Generations
from node.backend.health import AUDIT, INTERVAL, PATIENCE
from node.backend.renewal import WINDOW
from node.backend.replace import LAST_TRY, PORT_RETRY
from node.backend.runner import BACK_TIMEOUT, MAX_CONFIG, Runner
from node.backend.state import State as Status
from node.backend.supervisor import START_TIMEOUT
from node.backend.wind_down import FAREWELL, REST
from node.contract.accounts import Accounts, Change
from node.contract.driver import Generation
from node.errors import (
    Aborted,
    CoreFailed,
    InvalidConfig,
    NodeError,
    NotInitialized,
    NotStarted,
    PortTaken,
    ShuttingDown,
    UsersRefused,
)
from node.logs import LogRing
from protos.service_pb2 import Backend, User
from tests.harness.memory import (
    Gate,
    MemoryDriver,
    MemoryGeneration,
    MemoryPlan,
    MemoryRecord,
    SharedGeneration,
    SharingDriver,
    person,
)

GRACE = 30.0
ANN, BOB, CY = person("ann", "one", "a"), person("bob", "two", "a"), person("cy", "three", "a")
WAITING = "core is not started yet"


class RunnerTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.clock = cast(Any, Clock())
        self.driver = MemoryDriver(self.clock)
        self.ring = LogRing(self.clock, 10_000)
        self.readings = self.moving = 0
        self.read: list[list[Generation]] = []
        self.record = MemoryRecord()
        self.generations = Generations()
        self.runner = Runner(self.clock, self.ring, self.record, self.generations, lambda run: self._count(run))

    def tearDown(self) -> None:
        """Nothing is left: no core, no call."""
        for gate in (self.driver.reading, self.driver.launching, self.driver.stopping, self.driver.applying):
            gate.open()
        closed = ensureDeferred(self.runner.close())
        self.pass_time(FAREWELL + 1)
        self.successResultOf(closed)
        self.assertEqual(self.driver.running, [])
        self.assertEqual(self.clock.getDelayedCalls(), [])

    async def _count(self, generation: Generation) -> bool:
        """A reading brings something as often as `moving` says."""
        self.readings += 1
        self.assertIn(generation, self.generations.counting)
        self.read.append([generation])
        self.moving -= 1
        return self.moving >= 0

    def start(self, config: str = "a,b", *users: User, exclude: tuple[str, ...] = ()) -> Deferred[None]:
        request = Backend(config=config, users=users, exclude_inbounds=exclude)
        return ensureDeferred(self.runner.start(self.driver, request))

    def started(self, config: str = "a,b", *users: User) -> MemoryGeneration:
        """The core after a Start that succeeds at once."""
        self.successResultOf(self.start(config, *users))
        return self.core

    def stop(self, grace: float = 0.0) -> Deferred[None]:
        return ensureDeferred(self.runner.stop("a controller asked for it", grace))

    def stopped(self, grace: float = 0.0) -> None:
        self.successResultOf(self.stop(grace))

    def sync_users(self, *users: User) -> Deferred[None]:
        return ensureDeferred(self.runner.users.replace(users))

    def sync_user(self, user: User) -> Deferred[None]:
        async def whole() -> None:
            touched, _ = await self.runner.users.put(user)
            await self.runner.users.settle(touched)

        return ensureDeferred(whole())

    @property
    def core(self) -> MemoryGeneration:
        [core] = self.driver.running
        return core

    def accounts(self, tag: str = "a") -> dict[str, bytes]:
        return dict(self.core.accounts[tag])

    @property
    def told(self) -> str:
        lines, _ = self.ring.read(0)
        return "\n".join(lines)

    def pass_time(self, seconds: float) -> None:
        self.clock.pump([0.0] + [0.125] * int(seconds * 8))

    def slow_pool(self) -> SlowPool:
        """From now on every roster is built in this pool."""
        self.patch(members, "BUILD_INLINE", 0)
        pool = SlowPool()
        self.clock.getThreadPool = lambda: pool
        self.clock.callFromThread = lambda call, *args: call(*args)
        return pool


class IdenticalStarts(RunnerTests):
    def test_nothing_happens(self) -> None:
        """The same backend again leaves the core alone, and its users untouched."""
        core = self.started("a,b", ANN)
        self.successResultOf(self.start("a,b", ANN))
        self.assertEqual((self.driver.cores, self.driver.batches), ([core], []))

    def test_by_meaning(self) -> None:
        """It is the same where the driver says that it means the same, and what is excluded is a set."""
        self.successResultOf(self.start("a,b,c  x", ANN, exclude=("b", "c")))
        self.successResultOf(self.start("a,b,c x", ANN, exclude=("c", "b", "c")))
        self.assertEqual(len(self.driver.cores), 1)
        self.successResultOf(self.start("a,b,c x", ANN, exclude=("c",)))
        self.assertEqual(len(self.driver.cores), 2)

    def test_its_users_follow(self) -> None:
        """Only the users that differ are changed in the running core."""
        core = self.started("a,b", ANN, BOB)
        self.successResultOf(self.start("a,b", CY, ANN))
        self.assertIs(self.core, core)
        self.assertEqual(self.accounts(), {"ann": b"one", "cy": b"three"})
        [changes] = self.driver.batches
        self.assertEqual({change.key for change in changes}, {"bob", "cy"})

    def test_bad_users_are_left_out(self) -> None:
        """Users of a Start that cannot be used, or that the core refuses, are logged by name; the Start succeeds."""
        self.started("a,b", person("dan", "bad", "a"))
        self.started("a,b", ANN, person("eve", "bad", "a"), person("fay", "refused", "a"))
        self.assertEqual(self.accounts(), {"ann": b"one"})
        for name in ("dan", "eve", "fay"):
            self.assertIn(f"user '{name}' is left out", self.told)

    def test_two_at_once(self) -> None:
        """Two at once are one launch, and both callers hear how it ends."""
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
        """The core comes up though the caller has gone."""
        self.driver.launching.shut = True
        caller = self.start("a", ANN)
        caller.cancel()
        self.failureResultOf(caller, CancelledError)
        self.driver.launching.open()
        self.assertEqual(self.runner.status.state, "running")

    def test_while_it_restarts(self) -> None:
        """The same backend again while its core is to come back later brings it back now."""
        self.started("a", ANN)
        self.driver.faults = [CoreFailed("no")] * 4
        self.core.die()
        self.pass_time(8)
        self.assertEqual((self.runner.status.state, self.driver.faults), ("restarting", []))
        self.successResultOf(self.start("a", BOB))
        self.assertEqual(self.accounts(), {"bob": b"two"})

    def test_the_core_dies_meanwhile(self) -> None:
        """A core that dies while the users of an identical Start are built is run again, in a panel's grace, too."""
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

    def test_somebody_else_removes_a_user_meanwhile(self) -> None:
        """That removal is on its way when the Start is done, which is no fault of the Start's."""
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
        """A configuration that is refused when it is read or checked leaves what runs as it is."""
        core = self.started("a", ANN)
        for config in ("b bad", "b unbuildable"):
            self.failureResultOf(self.start(config, BOB), InvalidConfig)
            self.assertEqual((self.driver.running, self.accounts()), ([core], {"ann": b"one"}))
            self.assertEqual((self.runner.status.state, self.runner.status.reason), ("running", ""))
        self.successResultOf(self.sync_users(CY))
        self.assertEqual(self.accounts(), {"cy": b"three"})

    def test_a_configuration_without_measure(self) -> None:
        """One that is too long is refused before anybody reads it."""
        core = self.started("a", ANN)
        error = self.failureResultOf(self.start("b" + " " * MAX_CONFIG), InvalidConfig).value
        self.assertIn("8 MiB", error.text)
        self.assertEqual((self.driver.running, self.runner.status.state), ([core], "running"))

    def test_put_back(self) -> None:
        """If the new core does not come up, what ran before runs again with its users, and both things are told."""
        self.started("a", ANN)
        for fault, kind in ((CoreFailed("it fell"), CoreFailed), (InvalidConfig("it is odd"), InvalidConfig)):
            self.driver.faults = [fault]
            error = self.failureResultOf(self.start("b", BOB), kind).value
            self.assertEqual(error.text, f"{fault.text}; the backend before it runs again")
            self.assertEqual((self.core.plan.config, self.accounts()), ("a", {"ann": b"one"}))
            self.assertEqual((self.runner.status.state, self.runner.status.reason), ("running", ""))
        self.successResultOf(self.start("a", ANN))
        self.assertEqual(len(self.driver.launches), 5)

    def test_put_back_after_an_unforeseen_fault(self) -> None:
        """A fault of the node itself ends in the backend before it, too; the log has the rest."""
        self.started("a", ANN)
        self.driver.faults = [KeyError("x")]
        error = self.failureResultOf(self.start("b", BOB), CoreFailed).value
        self.assertIn("KeyError", error.text)
        self.assertEqual(self.accounts(), {"ann": b"one"})
        self.assertEqual(len(self.flushLoggedErrors(KeyError)), 1)

    def test_put_back_after_a_call_that_was_cancelled(self) -> None:
        """So does a call to a core that was cancelled, by whatever: only a Stop aborts a Start."""
        self.started("a", ANN)
        self.driver.faults = [CancelledError(), CancelledError()]
        self.assertIn("CancelledError", self.failureResultOf(self.start("b", BOB), CoreFailed).value.text)
        self.pass_time(0)
        self.assertEqual((self.runner.status.state, self.accounts()), ("running", {"ann": b"one"}))
        self.assertEqual(len(self.flushLoggedErrors(CancelledError)), 2)

    def test_put_back_later(self) -> None:
        """If that does not come up at once either, it is told, and tried on and on."""
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
        """A Start that fails while the backend before it was about to come back does not end that."""
        for fault in (CoreFailed("it fell"), InvalidConfig("it is odd")):
            self.started("a", ANN)
            self.driver.faults = [CoreFailed("not yet"), fault]
            self.core.die()
            self.pass_time(0)
            self.assertEqual(self.runner.status.state, "restarting")
            self.failureResultOf(self.start("b", BOB), NodeError)
            self.assertEqual((self.runner.status.state, self.accounts()), ("running", {"ann": b"one"}))
            self.stopped()

    def test_users_of_the_time(self) -> None:
        """What was said of users while the new core failed holds for the one that is put back."""
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

    def test_all_users_of_the_time(self) -> None:
        """So does a whole set."""
        self.started("a", ANN, BOB)
        self.driver.launching.shut = True
        start = self.start("b", person("ann", "one", "b"))
        self.successResultOf(self.sync_users(CY))
        self.driver.faults = [CoreFailed("it fell")]
        self.driver.launching.open()
        self.failureResultOf(start, CoreFailed)
        self.assertEqual(self.accounts(), {"cy": b"three"})

    def test_users_while_it_is_put_back(self) -> None:
        """Users that come while the old backend is on its way back are there when it is."""
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
        """Where nothing ran before a Start that is refused changes nothing, and one that fails says so."""
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
        """A port that is taken is tried again until it is free."""
        self.driver.faults = [PortTaken("port 1 is taken")] * 8
        start = self.start("a", ANN)
        self.assertEqual(self.runner.status.state, "starting")
        self.pass_time(8 * PORT_RETRY + 1)
        self.successResultOf(start)

    def test_a_port_that_stays_taken(self) -> None:
        """One that stays taken is named in time, after tries that had time enough, and the old backend is back."""
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
        self.assertIn("the backend before it runs again", error.text)
        self.assertTrue(all(LAST_TRY <= seconds <= START_TIMEOUT for seconds in self.driver.patience[patience:]))
        self.assertIsNot(self.core, core)
        self.assertEqual(self.accounts(), {"ann": b"one"})

    def test_start_timeout(self) -> None:
        """A core gets so much time, the one that is put back so much that the caller is answered in time."""
        self.started("a", ANN)
        self.driver.faults = [CoreFailed("no answer")]
        self.failureResultOf(self.start("b", BOB), CoreFailed)
        self.assertEqual(self.driver.patience, [START_TIMEOUT, START_TIMEOUT, BACK_TIMEOUT])

    def test_a_core_that_never_reads(self) -> None:
        """A core that does not look at a configuration in time fails the Start; what runs is not touched."""
        core = self.started("a", ANN)
        self.driver.reading.shut = True
        start = self.start("b", BOB)
        self.pass_time(START_TIMEOUT)
        self.assertIn(f"{START_TIMEOUT:g} s", self.failureResultOf(start, CoreFailed).value.text)
        self.assertEqual((self.driver.running, self.runner.status.state), ([core], "running"))

    def test_time_is_counted_from_the_beginning(self) -> None:
        """What the reading of a configuration took is not there any more for the launch."""
        self.driver.reading.shut = True
        start = self.start("b", BOB)
        self.pass_time(3)
        self.driver.reading.open()
        self.successResultOf(start)
        self.assertEqual(self.driver.patience, [START_TIMEOUT - 3])


class Stops(RunnerTests):
    def test_stop(self) -> None:
        """The counters are read, the core ends, and nothing is known of it; a second Stop is no error."""
        self.started("a", ANN)
        self.stopped()
        self.assertEqual((self.driver.running, self.readings, self.runner.status.state), ([], 1, "stopped"))
        self.assertRaises(NotInitialized, self.runner.status.require)
        self.failureResultOf(self.sync_users(ANN), NotInitialized)
        self.failureResultOf(self.sync_user(ANN), NotInitialized)
        self.stopped()

    def test_nothing_is_lost_at_the_end(self) -> None:
        """A core that ends serves nobody any more, then it is read until nothing moves, and only then it goes."""
        core = self.started("a", ANN)
        self.moving = 3
        stop = self.stop()
        self.assertTrue(core.wound_down)
        self.assertTrue(core.alive)
        self.pass_time(1)
        self.successResultOf(stop)
        self.assertEqual((self.readings, self.driver.running), (4, []))
        self.assertEqual(self.read, [[core]] * 4)
        self.assertEqual(self.generations.counting, ())

    def test_nothing_is_kept(self) -> None:
        """What it knew of many users is not kept in memory until the next Start."""
        core = weakref.ref(self.started("a", ANN))
        self.stopped()
        for known in (self.driver.cores, self.read):
            known.clear()
        gc.collect()
        self.assertIsNone(core())

    def test_counters_that_never_rest(self) -> None:
        """It is not read for ever."""
        self.started("a", ANN)
        self.moving = 10**6
        stop = self.stop()
        self.pass_time(REST + 1)
        self.successResultOf(stop)
        self.assertEqual(self.driver.running, [])

    def test_counters_that_do_not_come(self) -> None:
        """A core that stalls when it is read is not waited for as long as a call to it may take."""
        self.started("a", ANN)
        never = Gate()
        never.shut = True

        async def read(_: Generation) -> bool:
            await never.passed()
            return True

        self.patch(self, "_count", read)
        stop = self.stop()
        self.pass_time(REST + 1)
        self.successResultOf(stop)
        self.assertEqual(self.driver.running, [])

    def test_a_stop_while_a_core_is_read(self) -> None:
        """A core that a Start was about to end is not taken back by a panel's Stop and Start: it serves nobody."""
        core = self.started("a", ANN)
        self.moving = 10**6
        start = self.start("b", BOB)
        self.assertTrue(core.wound_down)
        stop, same = self.stop(GRACE), self.start("a", ANN)
        self.failureResultOf(start, Aborted)
        self.moving = 0
        self.pass_time(1)
        for deferred in (stop, same):
            self.successResultOf(deferred)
        self.assertFalse(core.alive)
        self.assertEqual(self.accounts(), {"ann": b"one"})

    def test_stop_aborts_a_start(self) -> None:
        """A Stop ends a Start under way, wherever that is, and no core is left."""
        gates: dict[str, Callable[[], Gate]] = {
            "reading": lambda: self.driver.reading,
            "stopping": lambda: self.driver.stopping,
            "launching": lambda: self.driver.launching,
        }
        for name, gate in gates.items():
            self.started("a", ANN)
            gate().shut = True
            start, after = self.start("b", BOB), self.start("c", CY)
            stop = self.stop()
            self.assertEqual(self.runner.status.state, "stopped", name)
            for deferred in (start, after):
                self.failureResultOf(deferred, Aborted)
            gate().open()
            self.successResultOf(stop)
            self.assertEqual((self.driver.running, self.runner.status.state), ([], "stopped"), name)

    def test_stopped_outwards_at_once(self) -> None:
        """A Stop counts although the Start that it aborted still clears up."""
        cleared: Deferred[None] = Deferred()

        async def slow(plan: MemoryPlan, target: Mapping[str, Accounts], seconds: float) -> MemoryGeneration:
            try:
                return await Deferred()
            finally:
                await cleared

        self.driver.launch = slow  # type: ignore[method-assign]
        start, stop = self.start("a", ANN), self.stop()
        self.assertEqual(self.runner.status.state, "stopped")
        self.assertRaises(NotInitialized, self.runner.status.require)
        self.assertNoResult(stop)
        cleared.callback(None)
        self.failureResultOf(start, Aborted)
        self.successResultOf(stop)

    def test_a_start_that_fails_when_it_is_aborted(self) -> None:
        """Whatever goes wrong while it clears up, nothing comes back after a Stop."""
        launch = self.driver.launch

        async def failing(plan: MemoryPlan, target: Mapping[str, Accounts], seconds: float) -> MemoryGeneration:
            try:
                return await Deferred()
            except CancelledError:
                raise OSError("no more files") from None

        for crash in (False, True):
            self.patch(self.driver, "launch", launch)
            core = self.started("a", ANN)
            self.patch(self.driver, "launch", failing)
            if crash:
                core.die()
                self.pass_time(0)
            else:
                self.start("b", BOB).addErrback(lambda failure: failure.trap(OSError))
            self.stopped()
            self.assertEqual((self.driver.running, self.runner.status.state), ([], "stopped"))
            self.assertEqual(len(self.flushLoggedErrors(OSError)), crash)

    def test_two_stops(self) -> None:
        """Stops at the same time all succeed, none before the core has ended, which is done once."""
        self.started("a", ANN)
        self.driver.stopping.shut = True
        both = [self.stop(), self.stop(GRACE)]
        for deferred in both:
            self.assertNoResult(deferred)
        self.driver.stopping.open()
        for deferred in both:
            self.successResultOf(deferred)
        self.assertEqual((self.driver.running, self.readings), ([], 1))

    def test_two_stops_while_a_start_clears_up(self) -> None:
        """The second does not end the clearing up that the first one waits for: both answer when no core is left."""
        cleared: Deferred[None] = Deferred()

        async def slow(plan: MemoryPlan, target: Mapping[str, Accounts], seconds: float) -> MemoryGeneration:
            try:
                return await Deferred()
            finally:
                await cleared

        self.driver.launch = slow  # type: ignore[method-assign]
        start, both = self.start("a", ANN), [self.stop(), self.stop()]
        for deferred in (start, *both):
            self.assertNoResult(deferred)
        cleared.callback(None)
        self.failureResultOf(start, Aborted)
        for deferred in both:
            self.successResultOf(deferred)

    def test_stop_ends_the_restarts(self) -> None:
        """After a Stop a core that was to come back does not, and the logs have no fault for it."""
        self.started("a", ANN)
        self.driver.launching.shut = True
        self.core.die()
        self.pass_time(0)
        self.stopped()
        self.driver.launching.open()
        self.pass_time(60)
        self.assertEqual((self.driver.running, self.runner.status.state), ([], "stopped"))

    def test_a_hung_core_ends_in_time(self) -> None:
        """Of a core that does not answer the counters are not waited for."""
        self.started("a", ANN).silent = True
        stop = self.stop()
        self.pass_time(FAREWELL)
        self.successResultOf(stop)
        self.assertEqual(self.readings, 0)

    def test_closed(self) -> None:
        """After the node's end no Start runs."""
        self.started("a", ANN)
        self.successResultOf(ensureDeferred(self.runner.close()))
        self.failureResultOf(self.start("a", ANN), ShuttingDown)
        self.assertEqual(self.driver.running, [])


class Grace(RunnerTests):
    def test_stopped_outwards(self) -> None:
        """The core lives on, and everything says that there is none."""
        core = self.started("a", ANN)
        self.stopped(GRACE)
        self.assertEqual((self.driver.running, self.runner.status.state), ([core], "stopped"))
        self.assertRaises(NotInitialized, self.runner.status.require)

    def test_taken_back(self) -> None:
        """The same Start takes the core back, with its users; its end does not come any more."""
        core = self.started("a", ANN, BOB)
        self.stopped(GRACE)
        self.pass_time(10)
        self.successResultOf(self.start("a", BOB, CY))
        self.assertEqual((self.core, self.runner.status.state, set(self.accounts())), (core, "running", {"bob", "cy"}))
        self.pass_time(2 * GRACE)
        self.assertEqual(self.driver.cores, [core])

    def test_another_start(self) -> None:
        """Another Start ends the core at once."""
        core = self.started("a", ANN)
        self.stopped(GRACE)
        self.successResultOf(self.start("b", ANN))
        self.assertFalse(core.alive)
        self.assertEqual((self.core.plan.config, self.readings), ("b", 1))
        self.pass_time(2 * GRACE)
        self.assertTrue(self.core.alive)

    def test_a_refused_start(self) -> None:
        """A Start that is refused changes nothing: it is stopped, and the core waits on."""
        core = self.started("a", ANN)
        self.stopped(GRACE)
        self.failureResultOf(self.start("b bad", ANN), InvalidConfig)
        self.assertEqual((self.driver.running, self.runner.status.state), ([core], "stopped"))
        self.pass_time(GRACE)
        self.assertEqual(self.driver.running, [])

    def test_it_ends(self) -> None:
        """When its time is over the core ends, its counters read, and a Start begins anew."""
        self.started("a", ANN)
        self.stopped(GRACE)
        self.pass_time(GRACE - 1)
        self.assertEqual(len(self.driver.running), 1)
        self.pass_time(1)
        self.assertEqual((self.driver.running, self.readings), ([], 1))
        self.successResultOf(self.start("a", ANN))
        self.assertEqual(len(self.driver.cores), 2)

    def test_each_stop_renews_it(self) -> None:
        """A panel that says Stop and a refused Start every ten seconds drops nobody."""
        core = self.started("a", ANN)
        for _ in range(10):
            self.stopped(GRACE)
            self.failureResultOf(self.start("b bad", ANN), InvalidConfig)
            self.pass_time(10)
        self.assertTrue(core.alive)

    def test_a_stop_without_grace(self) -> None:
        """A Stop without grace ends it at once."""
        self.started("a", ANN)
        self.stopped(GRACE)
        self.stopped()
        self.assertEqual(self.driver.running, [])

    def test_a_stop_while_another_start_waits(self) -> None:
        """A core that another Start was about to end is not kept: nobody could remove users from it."""
        core = self.started("a", ANN)
        self.driver.applying.shut = True
        self.sync_user(BOB)
        self.stopped(GRACE)
        start, stop = self.start("b", BOB), self.stop(GRACE)
        self.failureResultOf(start, Aborted)
        self.driver.applying.open()
        self.successResultOf(stop)
        self.assertFalse(core.alive)

    def test_its_end_does_not_abort_a_start(self) -> None:
        """A Start under way when the time is over succeeds: the same, another, and one that is refused as ever."""
        for config in ("a", "b", "b bad"):
            self.started("a", ANN)
            self.stopped(GRACE)
            self.pass_time(GRACE - 1)
            self.driver.reading.shut = self.driver.launching.shut = True
            start = self.start(config, ANN)
            self.pass_time(2)
            self.driver.reading.open()
            self.driver.launching.open()
            if config == "b bad":
                self.failureResultOf(start, InvalidConfig)
                self.assertEqual(self.driver.running, [])
            else:
                self.successResultOf(start)
                self.assertEqual(self.core.plan.config, config)
            self.stopped()

    def test_who_is_removed_is_out(self) -> None:
        """Removals and changed credentials apply, additions wait for the Start; callers hear that it is stopped."""
        new = person("bob", "new", "a")
        calls: dict[str, Callable[[], list[Deferred[None]]]] = {
            "SyncUser": lambda: [self.sync_user(user) for user in (person("ann"), new, CY)],
            "SyncUsers": lambda: [self.sync_users(new, CY, person("dan", "four", "a"))],
            "chunks": lambda: [ensureDeferred(self.runner.users.update([person("ann"), new, CY]))],
        }
        for name, call in calls.items():
            self.started("a", ANN, BOB, person("dan", "four", "a"))
            self.stopped(GRACE)
            for deferred in call():
                self.failureResultOf(deferred, NotInitialized)
            self.assertEqual(self.accounts(), {"dan": b"four"}, name)
            self.successResultOf(self.start("a", new, CY))
            self.assertEqual(self.accounts(), {"bob": b"new", "cy": b"three"}, name)
            self.stopped()

    def test_who_was_removed_during_a_start_that_it_ends(self) -> None:
        """Nothing was asked of the core that was about to end; now that it waits they are out of it."""
        self.started("a", ANN, BOB)
        self.driver.applying.shut = True
        self.sync_user(CY)
        start = self.start("b", ANN)
        self.successResultOf(self.sync_user(person("bob")))
        stop = self.stop(GRACE)
        self.failureResultOf(start, Aborted)
        self.driver.applying.open()
        self.successResultOf(stop)
        self.assertEqual(set(self.accounts()), {"ann", "cy"})

    def test_a_core_that_dies_in_it(self) -> None:
        """It does not come back by itself, and the same Start runs another."""
        self.started("a", ANN).die()
        self.stopped(GRACE)
        self.pass_time(1)
        self.stopped()
        core = self.started("a", ANN)
        self.stopped(GRACE)
        core.die()
        self.pass_time(1)
        self.assertEqual((self.driver.running, self.runner.status.state), ([], "stopped"))
        self.successResultOf(self.start("a", ANN))
        self.assertEqual(self.accounts(), {"ann": b"one"})

    def test_a_start_that_fails_in_it(self) -> None:
        """What was stopped stays stopped, in the core, outwards and on disk, if a Start within it does not come up."""
        for fault, state in ((CoreFailed("it fell"), "failed"), (InvalidConfig("it is odd"), "stopped")):
            self.started("a", ANN, BOB)
            self.stopped(GRACE)
            self.driver.faults = [fault]
            error = self.failureResultOf(self.start("b", ANN), NodeError).value
            self.assertEqual(error.text, fault.text)
            self.pass_time(2 * GRACE)
            self.assertEqual((self.driver.running, self.runner.status.state), ([], state))
            self.assertEqual((self.record.request, self.record.kept, self.runner.accepted), (b"", {}, None))
            kept = self.runner.desired.everything()
            self.assertEqual((kept.request, kept.users), (b"", {}))
            self.failureResultOf(self.sync_user(BOB), NodeError)


class Crashes(RunnerTests):
    def test_at_once(self) -> None:
        """A core that is gone comes again at once, with its users; meanwhile calls hear that it is on its way."""
        self.started("a", ANN)
        self.core.die(-9)
        self.assertEqual(self.runner.status.state, "restarting")
        with self.assertRaises(NotStarted) as raised:
            self.runner.status.require()
        self.assertIn("signal 9", raised.exception.text)
        self.pass_time(0)
        self.assertEqual((self.runner.status.state, self.accounts()), ("running", {"ann": b"one"}))
        self.assertIn("backend restarting: the core ended by itself (signal 9)", self.told)

    def test_later_and_later(self) -> None:
        """One that fails on is tried after 0, 1, 2, 4 … and for ever every 30 seconds."""
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
        """A core that served for some seconds comes back at once, however often that happens."""
        self.started("a", ANN)
        for _ in range(8):
            self.pass_time(3)
            self.core.die()
            self.pass_time(0)
            self.assertEqual(self.runner.status.state, "running")

    def test_one_that_dies_young(self) -> None:
        """The pauses of one that comes up and dies at once grow, until it has served for a while."""
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

    def test_users_of_the_time(self) -> None:
        """Users that change while it is down, and while it comes up, are as they shall be when it is up."""
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

    def test_bad_users_of_the_time(self) -> None:
        """Who cannot be used is told though the core is down."""
        self.started("a", ANN)
        self.driver.launching.shut = True
        self.core.die()
        self.pass_time(0)
        refused = self.failureResultOf(self.sync_users(BOB, person("eve", "bad", "a")), UsersRefused).value.refused
        self.assertEqual([name for name, _ in refused], ["eve"])
        self.driver.launching.open()
        self.assertEqual(self.accounts(), {"bob": b"two"})

    def test_a_refused_configuration(self) -> None:
        """A configuration that is refused at a restart is not tried again, and the text is another one."""
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
        """A fault of the node does not end the tries."""
        self.started("a", ANN)
        self.driver.faults = [KeyError("x")]
        self.core.die()
        self.pass_time(1)
        self.assertEqual(self.runner.status.state, "running")
        self.assertEqual(len(self.flushLoggedErrors(KeyError)), 1)

    def test_another_backend_begins_anew(self) -> None:
        """The first crash of another backend is mended at once, whatever the one before it did."""
        self.started("a", ANN)
        self.driver.faults = [CoreFailed("it fell")] * 5
        self.core.die()
        self.pass_time(10)
        self.driver.faults = []
        self.started("b", BOB).die()
        self.pass_time(0)
        self.assertEqual(self.runner.status.state, "running")

    def test_while_a_batch_is_under_way(self) -> None:
        """A sync whose core dies under it succeeds: its users are there when the core is back."""
        self.started("a", ANN)
        self.driver.applying.shut = True
        sync = self.sync_users(ANN, BOB)
        self.core.die()
        self.driver.applying.open()
        self.successResultOf(sync)
        self.pass_time(0)
        self.assertEqual(set(self.accounts()), {"ann", "bob"})

    def test_a_start_under_way(self) -> None:
        """A core that dies while a Start of another is checked: that Start goes on, and one core runs."""
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
        """A core that lives and gives no answer is ended and comes again."""
        core = self.started("a", ANN)
        core.silent = True
        self.pass_time(INTERVAL + PATIENCE + 1)
        self.assertTrue(core.killed)
        self.assertEqual((self.runner.status.state, self.accounts()), ("running", {"ann": b"one"}))
        self.assertIn("the core is ended: it did not answer for 10 s", self.told)

    def test_drift(self) -> None:
        """Users that the core has or lacks behind the node's back are put right within a minute."""

        def drift(accounts: dict[str, Accounts]) -> int:
            del accounts["a"]["ann"]
            accounts["a"]["stranger"] = b"who"
            return 2

        self.started("a", ANN).audits = [drift]
        self.pass_time(AUDIT)
        self.assertEqual(self.accounts(), {"ann": b"one"})


class Stalls(RunnerTests):
    """A core that lives and takes nothing for some seconds: nothing of what was said is forgotten, nor called done."""

    def stall(self, core: MemoryGeneration, seconds: float) -> None:
        core.silent = True
        self.clock.callLater(seconds, setattr, core, "silent", False)

    def calls(self) -> dict[str, Callable[[], Deferred[None]]]:
        """Ways to say that Ann is removed, and Cy is there."""
        return {
            "a whole set": lambda: self.sync_users(BOB, CY),
            "a partial update": lambda: ensureDeferred(self.runner.users.update([person("ann"), CY])),
            "an equal Start": lambda: self.start("a", BOB, CY),
        }

    def test_it_is_told_and_comes(self) -> None:
        """What was not done is no success, and is in force as soon as the core answers, without another word."""
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

    def test_who_says_it_again(self) -> None:
        """A second SyncUser that says the same is told the truth as well."""
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
        """Who is removed from a core that is stopped only outwards is out as soon as it answers."""
        core = self.started("a", ANN, BOB)
        self.stopped(GRACE)
        self.stall(core, 8)
        self.failureResultOf(self.sync_user(person("ann")), NotInitialized)
        self.pass_time(8.5)
        self.assertEqual(self.accounts(), {"bob": b"two"})

    def test_one_that_stays_silent(self) -> None:
        """It is ended and comes again as it shall be."""
        core = self.started("a", ANN, BOB)
        core.silent = True
        done = self.sync_users(BOB)
        self.pass_time(7)
        self.failureResultOf(done, UsersRefused)
        self.pass_time(INTERVAL + PATIENCE)
        self.assertTrue(core.killed)
        self.assertEqual(self.accounts(), {"bob": b"two"})

    def test_at_each_audit(self) -> None:
        """What a core did not take, whatever was the cause, is tried again at each audit."""
        self.started("a", ANN)
        self.driver.fault = KeyError("x")
        self.failureResultOf(self.sync_users(BOB), KeyError)
        self.driver.fault = None
        self.pass_time(AUDIT)
        self.assertEqual(self.accounts(), {"bob": b"two"})

    def test_what_is_refused_is_not_asked_for_ever(self) -> None:
        """Where a change costs everybody something, a core that refused it is not asked again but by a controller."""
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

    def test_who_cannot_be_removed(self) -> None:
        """A core that answers and does not let go of somebody is replaced by one that does not know him."""
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

    def test_another_start_while_a_core_is_looked_at(self) -> None:
        """The other core's driver is not asked to change this one; who was removed is not in the one that comes."""
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

    def test_who_cannot_be_removed_in_grace(self) -> None:
        """That core has no time left."""
        self.driver.unable = True
        self.started("a", ANN)
        self.stopped(GRACE)
        self.failureResultOf(self.sync_user(person("ann")), NotInitialized)
        self.pass_time(1)
        self.assertEqual((self.driver.running, self.runner.status.state), ([], "stopped"))
        self.successResultOf(self.start("a", BOB))
        self.assertEqual(self.accounts(), {"bob": b"two"})


class SlowPool:
    """A thread pool whose work is done when the test says so."""

    def __init__(self) -> None:
        self._waiting: list[Callable[[], None]] = []

    def callInThreadWithCallback(
        self, done: Callable[[bool, object], None], call: Callable[..., object], *args: object
    ) -> None:
        self._waiting.append(lambda: done(True, call(*args)))

    def work(self) -> None:
        while self._waiting:
            self._waiting.pop(0)()


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


class Records(RunnerTests):
    """What a node that is killed at any moment would leave."""

    def kept(self) -> tuple[str, list[str]]:
        return Backend.FromString(self.record.request).config, list(self.record.kept)

    def test_what_was_accepted(self) -> None:
        """The backend that runs, without its users, and each of them by himself."""
        self.successResultOf(self.start("a,b", ANN, BOB, exclude=("b",)))
        kept = Backend.FromString(self.record.request)
        self.assertEqual((kept.config, list(kept.exclude_inbounds), list(kept.users)), ("a,b", ["b"], []))
        self.assertEqual([User.FromString(packed) for packed in self.record.kept.values()], [ANN, BOB])

    def test_only_what_changed(self) -> None:
        """A sync, an equal Start, one user: who stays the same is not written again."""
        self.started("a", ANN, BOB)
        written = self.record.written
        for same in (self.sync_users(ANN, BOB), self.start("a", ANN, BOB), self.sync_user(BOB)):
            self.successResultOf(same)
        self.assertEqual(self.record.written, written)
        self.successResultOf(self.sync_users(BOB, CY))
        self.successResultOf(self.sync_user(person("bob", "new", "a")))
        self.assertEqual(self.record.written, written + 3)
        self.assertEqual(self.kept(), ("a", ["cy", "bob"]))

    def test_another_backend(self) -> None:
        """The one before stays until the new one runs, with its own users, also those of the time between."""
        self.started("a", ANN)
        self.driver.launching.shut = True
        start = self.start("b", person("bob", "two", "b"))
        self.successResultOf(self.sync_user(person("cy", "three", "a", "b")))
        self.assertEqual(self.kept(), ("a", ["ann", "cy"]))
        self.driver.launching.open()
        self.successResultOf(start)
        self.assertEqual(self.kept(), ("b", ["cy", "bob"]))

    def test_a_start_that_fails(self) -> None:
        """What ran before is what there is."""
        self.started("a", ANN)
        self.driver.faults = [CoreFailed("no")]
        self.failureResultOf(self.start("b", BOB), CoreFailed)
        self.successResultOf(self.sync_user(CY))
        self.assertEqual(self.kept(), ("a", ["ann", "cy"]))

    def test_a_set_behind_an_equal_start(self) -> None:
        """A whole set that waited for a Start which takes the core back is the last word, on disk as well."""
        self.started("a")
        self.driver.reading.shut = True
        refused = self.start("a bad")
        equal, sync = self.start("a", ANN), self.sync_users(BOB)
        self.driver.reading.open()
        for deferred in (equal, sync):
            self.successResultOf(deferred)
        self.failureResultOf(refused, InvalidConfig)
        self.assertEqual((self.kept(), self.accounts()), (("a", ["bob"]), {"bob": b"two"}))

    def test_where_credentials_collide(self) -> None:
        """Who has a credential depends on the order then: it is the same on disk."""
        twin = person("zoe", "one", "a")
        self.started("a", ANN, twin)
        self.failureResultOf(self.sync_users(twin, BOB, ANN), UsersRefused)
        self.assertEqual(self.kept(), ("a", ["zoe", "bob", "ann"]))
        self.assertEqual(self.accounts(), {"zoe": b"one", "bob": b"two"})

    def test_forgotten(self) -> None:
        """A Stop forgets at once, with grace, too; who takes the core back is there again."""
        for grace in (0.0, GRACE):
            self.started("a", ANN, BOB)
            self.stopped(grace)
            self.assertEqual(self.kept(), ("", []))
        self.failureResultOf(self.sync_user(person("bob")), NotInitialized)
        self.successResultOf(self.start("a", ANN))
        self.assertEqual(self.kept(), ("a", ["ann"]))

    def test_the_node_ends(self) -> None:
        """That is no Stop: the next node goes on."""
        self.started("a", ANN)
        self.successResultOf(ensureDeferred(self.runner.close()))
        self.assertEqual(self.kept(), ("a", ["ann"]))

    def test_an_answer_is_a_promise(self) -> None:
        """Whoever changes something hears of it when it is on disk."""
        self.started("a")
        self.record.gate.shut = True
        calls = [self.sync_users(ANN), ensureDeferred(self.runner.users.update([BOB])), self.start("a", ANN)]
        for call in calls:
            self.assertNoResult(call)
        self.record.gate.open()
        for call in calls:
            self.successResultOf(call)

    def test_everything(self) -> None:
        """A disk that lost some is given all: the same as by changes."""
        nothing = self.runner.desired.everything()
        self.assertEqual((nothing.request, nothing.users), (b"", {}))
        self.started("a", ANN)
        self.successResultOf(self.sync_user(BOB))
        everything = self.runner.desired.everything()
        self.assertEqual((everything.request, everything.users), (self.record.request, self.record.kept))


class Resumes(RunnerTests):
    def setUp(self) -> None:
        super().setUp()
        self.resumed: list[str] = []

    def resume(self, config: str = "a", *users: User) -> Deferred[None]:
        request = Backend(config=config, users=users)
        return ensureDeferred(self.runner.resume(self.driver, request, lambda: self.resumed.append(config)))

    def test_it_runs_again(self) -> None:
        """With its users; an equal Start joins it."""
        self.successResultOf(self.resume("a", ANN))
        self.assertEqual(self.accounts(), {"ann": b"one"})
        self.successResultOf(self.start("a", ANN, BOB))
        self.assertEqual(len(self.driver.cores), 1)

    def test_tried_again(self) -> None:
        """A core that does not come up is tried by the crash policy; until then nobody takes users for it."""
        self.driver.faults = [CoreFailed("no"), CoreFailed("not yet"), CoreFailed("later")]
        self.successResultOf(self.resume("a", ANN))
        self.pass_time(0)
        self.assertEqual(
            (self.runner.status.state, self.runner.status.reason),
            ("failed", "not resumed: not yet; this is tried again"),
        )
        self.failureResultOf(self.sync_users(BOB), CoreFailed)
        self.pass_time(4)
        self.assertEqual((self.runner.status.state, self.accounts()), ("running", {"ann": b"one"}))
        self.assertEqual(self.resumed, ["a"])

    def test_users_wait_for_it(self) -> None:
        """Changes of users wait until it runs, or fails: who is removed meanwhile does not come back later."""
        for fault in (None, CoreFailed("no")):
            self.driver.launching.shut = True
            resumed, sync = self.resume("a", ANN, BOB), self.sync_user(person("bob"))
            for deferred in (resumed, sync):
                self.assertNoResult(deferred)
            self.driver.faults = [fault, fault] if fault else []
            self.driver.launching.open()
            self.successResultOf(resumed)
            if fault:
                self.failureResultOf(sync, CoreFailed)
            else:
                self.successResultOf(sync)
                self.assertEqual((self.accounts(), list(self.record.kept)), ({"ann": b"one"}, ["ann"]))
            self.stopped()

    def test_refused(self) -> None:
        """A configuration that the core does not take any more does not mend itself."""
        self.successResultOf(self.resume("a bad", ANN))
        self.pass_time(100)
        self.assertEqual((self.runner.status.state, self.driver.launches), ("failed", []))

    def test_a_start_that_fails_meanwhile(self) -> None:
        """It does not end the tries, and `reason` says so."""
        for fault in (CoreFailed("it fell"), InvalidConfig("it is odd")):
            self.driver.faults = [CoreFailed("no"), CoreFailed("no"), CoreFailed("not yet")]
            self.successResultOf(self.resume("a", ANN))
            self.pass_time(1)
            self.assertEqual((self.runner.status.state, self.driver.faults), ("failed", []))
            self.failureResultOf(self.start("b bad", BOB), InvalidConfig)
            self.driver.faults = [fault]
            self.failureResultOf(self.start("b", BOB), NodeError)
            self.assertEqual(self.runner.status.state, "failed")
            self.assertIn("tried again", self.runner.status.reason)
            self.pass_time(4)
            self.assertEqual((self.runner.status.state, self.accounts()), ("running", {"ann": b"one"}))
            self.tearDown()
            self.setUp()

    def test_a_controller_is_faster(self) -> None:
        """A Start ends the tries, a Stop as well."""
        for act in (lambda: self.start("b", BOB), self.stop):
            self.driver.faults = [CoreFailed("no")] * 2
            self.successResultOf(self.resume("a", ANN))
            self.pass_time(0)
            self.successResultOf(act())
            before = len(self.driver.cores)
            self.pass_time(100)
            self.assertEqual((len(self.driver.cores), self.resumed), (before, []))
            self.stopped()


class Renewals(RunnerTests):
    """Changes that a core cannot take while it runs, and another run of it."""

    def setUp(self) -> None:
        super().setUp()
        self.driver.dear = lambda change: True

    def renewed(self, sync: Deferred[None]) -> Deferred[None]:
        """The window is over."""
        self.pass_time(1)
        return sync

    def test_the_new_one_takes_its_place(self) -> None:
        """Nobody takes it for a crash, and the counters of the one before are read."""
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
        """One run for all who come soon; what is not dear waits for nothing."""
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
        """It is tried again, as at a Start."""
        self.started("a", ANN)
        self.driver.faults = [PortTaken("port 1 is taken")] * 3
        self.successResultOf(self.renewed(self.renewed(self.sync_user(BOB))))
        self.assertEqual(set(self.accounts()), {"ann", "bob"})

    def test_the_core_refuses_who_comes(self) -> None:
        """They are told by name; nobody else notices, but where somebody left: who is removed is out."""
        core = self.started("a", ANN, BOB)
        self.driver.unchecked = InvalidConfig("not him")
        cy = person("Cy", "three", "a")
        [(name, reason)] = self.failureResultOf(self.renewed(self.sync_users(ANN, BOB, cy)), UsersRefused).value.refused
        self.assertEqual((name, reason, self.core), ("Cy", "a: not him", core))
        refused = self.failureResultOf(self.renewed(self.sync_users(BOB, cy)), UsersRefused).value.refused
        self.assertEqual([name for name, _ in refused], ["Cy"])
        self.assertEqual((core.alive, self.accounts()), (False, {"bob": b"two"}))

    def test_no_core_comes_up_with_them(self) -> None:
        """One does without them, and without those who left with them."""
        self.started("a", ANN, BOB)
        self.driver.faults = [CoreFailed("killed")]
        sync = self.renewed(self.sync_users(BOB, CY))
        [(name, reason)] = self.failureResultOf(sync, UsersRefused).value.refused
        self.assertEqual((name, reason), ("cy", "a: killed"))
        self.assertEqual((self.runner.status.state, self.accounts()), ("running", {"bob": b"two"}))
        launches = len(self.driver.launches)
        self.pass_time(3 * AUDIT)
        self.assertEqual(len(self.driver.launches), launches)

    def test_what_was_refused_once(self) -> None:
        """Another user does not bring it up again, the same one said again does."""
        self.started("a", ANN)
        self.driver.unchecked = CoreFailed("killed")
        self.failureResultOf(self.renewed(self.sync_users(ANN, CY)), UsersRefused)
        self.driver.unchecked = None
        self.successResultOf(self.renewed(self.sync_user(BOB)))
        self.assertEqual(set(self.accounts()), {"ann", "bob"})
        self.successResultOf(self.renewed(self.sync_user(CY)))
        self.assertEqual(set(self.accounts()), {"ann", "bob", "cy"})

    def test_neither_runs(self) -> None:
        """It is a crash then: the core comes again, with all users."""
        self.started("a", ANN)
        self.driver.faults = [CoreFailed("it did not come up")] * 2
        sync = self.sync_user(BOB)
        self.clock.advance(WINDOW)
        self.failureResultOf(sync, CoreFailed)
        self.assertIn("backend restarting: it did not come up", self.told)
        self.pass_time(0)
        self.assertEqual((self.runner.status.state, self.accounts()), ("running", {"ann": b"one", "bob": b"two"}))

    def test_whatever_went_wrong(self) -> None:
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
        """A core that cannot be wound down is ended all the same, before another one begins."""
        core = self.started("a", ANN)

        async def wind_down() -> None:
            raise OSError("no more files")

        core.wind_down = wind_down  # type: ignore[method-assign]
        self.successResultOf(self.renewed(self.sync_user(BOB)))
        self.assertFalse(core.alive)
        self.assertEqual(len(self.flushLoggedErrors(OSError)), 1)
        self.assertEqual(self.accounts(), {"ann": b"one", "bob": b"two"})

    def test_it_dies_in_the_window(self) -> None:
        """The next run takes the changes along; there is one launch for both."""
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
        """It is brought into the run that is on its way, whatever that begins with."""
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
        """A configuration that the core does not build is refused before anybody notices, now as well."""
        self.started("a", ANN)
        self.driver.stopping.shut = True
        sync = self.renewed(self.sync_user(BOB))
        self.failureResultOf(self.start("b unbuildable"), InvalidConfig)
        self.driver.stopping.open()
        self.successResultOf(sync)
        self.assertEqual((len(self.driver.cores), set(self.accounts())), (2, {"ann", "bob"}))

    def test_a_grace_meanwhile(self) -> None:
        """A core that was about to be renewed without somebody, and waits for a Start now, does not wait with them."""
        self.started("a", ANN, BOB)
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
        self.assertEqual((self.driver.running, self.runner.status.state), ([], "stopped"))

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


@dataclass(frozen=True)
class Step:
    """What a controller asks for, or a crash; and what shall be after it: a configuration and its users, or nothing."""

    kind: str
    config: str
    grace: float
    users: frozenset[str]
    # The seconds until the next one.
    pause: float

    def ask(self, runner: Runner, driver: MemoryDriver) -> Deferred[None]:
        # Said at another time it may be with another credential.
        people = [person(name, f"{name}{self.grace}", "a") for name in sorted(self.users)]
        if self.kind == "crash":
            for core in driver.running[CRASHES[self.grace]]:
                core.die()
            return succeed(None)
        if self.kind == "dear":
            driver.dear = DEAR[self.grace]
            return succeed(None)
        if self.kind == "overlap":
            in_background(overlap(runner, driver), "no other run came beside")
            return succeed(None)
        if self.kind == "start":
            return ensureDeferred(runner.start(driver, Backend(config=self.config, users=people)))
        if self.kind == "stop":
            return ensureDeferred(runner.stop("asked", self.grace))
        if self.kind == "sync all":
            return ensureDeferred(runner.users.replace(people))
        changed = people if self.kind == "add" else [person(name) for name in self.users]
        return ensureDeferred(runner.users.update(changed))

    def after(self, before: State) -> State:
        if self.kind == "stop":
            return None
        if self.kind == "start":
            return before if "bad" in self.config else (" ".join(self.config.split()), self.users)
        if before is None or self.kind in ("crash", "dear", "overlap"):
            return before
        if self.kind == "sync all":
            return before[0], self.users
        return before[0], before[1] | self.users if self.kind == "add" else before[1] - self.users


State = tuple[str, frozenset[str]] | None
MOMENTS = st.floats(0, 2)
STEPS = st.builds(
    Step,
    st.sampled_from(["start", "start", "stop", "sync all", "add", "remove", "crash", "dear", "overlap"]),
    st.sampled_from(["a", "a  ", "a x", "a bad"]),
    st.sampled_from([0.0, 5.0, GRACE]),
    st.frozensets(st.sampled_from(["ann", "bob", "cy", "dan"])),
    MOMENTS,
)


# Of the cores that run: all, the first, the last.
CRASHES = {0.0: slice(None), 5.0: slice(1), GRACE: slice(-1, None)}
# Changes that take another run: none, all, those of users who come.
DEAR: dict[float, Callable[[Change], bool]] = {
    0.0: lambda _: False,
    5.0: lambda _: True,
    GRACE: lambda change: change.packed is not None,
}


async def overlap(runner: Runner, driver: MemoryDriver) -> None:
    """Have another run of the same core take the place of the current one, which drains."""

    async def work(settled: Settled) -> None:
        if not (runner.status.running and runner._generations.current):
            return
        if isinstance(runner._generations.current, SharedGeneration):
            # One comes by itself for this, after the next removal.
            runner._generations.current.lingering = True
            return
        plan = cast(MemoryGeneration, runner._generations.current).plan
        runner.status.enter(Status.STARTING)
        settled()
        await runner._settling.idle()
        driver.cores.append(MemoryGeneration(driver.clock, plan, runner.desired.target, driver.stopping))
        runner.status.enter(Status.RUNNING)
        runner._supervisor._adopt(driver.cores[-1])
        await runner._settling.settle_all()

    await runner._control.run(work, core=True)


def start(config: str = "a", *users: str) -> Step:
    return Step("start", config, 0.0, frozenset(users), 0.0)


def sync_all(*users: str) -> Step:
    return Step("sync all", "", 0.0, frozenset(users), 0.0)


def trouble(kind: str) -> Step:
    return Step(kind, "", 5.0, frozenset(), 0.0)


def slow(clock: Clock, times: list[float], sharing: bool, proving: bool = False) -> MemoryDriver:
    """A driver whose every step takes one of these times."""
    driver = SharingDriver(clock) if sharing else MemoryDriver(clock)
    gates = [driver.reading, driver.launching, driver.stopping, driver.applying]
    for number, gate in enumerate(gates):
        make_slow(clock, gate, cycle(times[number::4]))
    if isinstance(driver, SharingDriver) and proving:
        make_slow(clock, driver.proving, cycle(times))
    return driver


def make_slow(clock: Clock, gate: Gate, times: Iterator[float]) -> None:
    async def passed() -> None:
        await deferLater(clock, next(times))

    gate.passed = passed  # type: ignore[method-assign]


# Not longer than a test waits.
LIMITS = Limits(timeout=60.0, generations=2)


class ManyAtOnce(SynchronousTestCase):
    @settings(deadline=None, max_examples=300)
    @example([start(), start(), start("a", "ann"), sync_all()], [0.0, 0.0, 0.0, 1.0], False)
    @example([start(), start("a x"), start("a x", "ann"), sync_all()], [0.0, 0.0, 0.0, 0.0, 1.0], False)
    @given(st.lists(STEPS, max_size=50), st.lists(MOMENTS, min_size=4, max_size=20), st.booleans())
    def test_the_last_one_counts(self, steps: list[Step], times: list[float], sharing: bool) -> None:
        """Starts, stops, syncs and crashes at any time, however long each takes: the end is what was asked for last.

        A configuration that has not held may have been taken back.
        """
        clock = cast(Any, Clock())
        driver = slow(clock, times, sharing)
        record, generations = MemoryRecord(), Generations()
        runner = Runner(clock, LogRing(clock, 100), record, generations, nothing, LIMITS)
        expected: State = None
        for step in steps:
            step.ask(runner, driver).addErrback(lambda failure: failure.trap(NodeError))
            expected = step.after(expected)
            clock.advance(step.pause)
        clock.pump([1] * 300)
        self.assertEqual(runner.status.state, "running" if expected else "stopped")
        if sharing and expected and runner.desired.accepted and "crash" in [step.kind for step in steps]:
            expected = runner.desired.accepted.fingerprint[1], expected[1]
        found = [(" ".join(core.plan.config.split()), frozenset(core.accounts["a"])) for core in driver.running]
        self.assertEqual(found[-1:], [expected] if expected else [])
        self.assertEqual(set(driver.running), set(generations.serving))
        for core in generations.draining:
            self.assertLessEqual(core.accounts["a"].items(), runner.desired.target["a"].items())
        config = " ".join(Backend.FromString(record.request).config.split())
        self.assertEqual((config, frozenset(record.kept)), expected or ("", frozenset()))
        ensureDeferred(runner.close())
        clock.pump([1] * 30)
        self.assertEqual((driver.running, clock.getDelayedCalls()), ([], []))


class Answer:
    """How a call was answered, if it was. What comes when the node is dead (`late`) reaches nobody."""

    good = late = False
    fault: BaseException | None = None

    @property
    def open(self) -> bool:
        return not (self.good or self.late or self.fault)

    def success(self, _: object) -> None:
        self.good = not self.late

    def failure(self, failure: Failure) -> None:
        self.fault = failure.value


class Life:
    """A node from its start to its end, with what an earlier one left."""

    def __init__(self, times: list[float], record: MemoryRecord, sharing: bool) -> None:
        self.clock = cast(Any, Clock())
        self.driver = slow(self.clock, times, sharing, proving=True)
        self.record = record
        self.runner = Runner(self.clock, LogRing(self.clock, 100), record, Generations(), nothing, LIMITS)
        if record.request:
            request = Backend.FromString(record.request)
            request.users.extend(map(User.FromString, record.kept.values()))
            resumed = ensureDeferred(self.runner.resume(self.driver, request, lambda: None))
            resumed.addErrback(lambda failure: failure.trap(Aborted))

    def recover(self) -> None:
        """From now on nothing goes wrong."""
        self.driver.faults, self.driver.unable, self.driver.unchecked = [], False, None
        for core in self.driver.running:
            core.silent = False

    def end(self) -> None:
        """Its cores end before it."""
        ensureDeferred(self.runner.close())
        self.clock.pump([1] * 30)

    def left(self) -> MemoryRecord:
        """What the next node finds if this one is dead from now on."""
        left = MemoryRecord()
        left.request, left.kept = self.record.request, dict(self.record.kept)
        return left

    def act(self, step: Step) -> Deferred[None]:
        """What goes wrong, too: the next launch, or every call to the core for some seconds."""
        if step.kind == "fault":
            self.driver.faults.append(CoreFailed("no"))
        elif step.kind == "unchecked":
            self.driver.unchecked = CoreFailed("no") if step.users else InvalidConfig("no")
            self.clock.callLater(STALLS[step.grace], setattr, self.driver, "unchecked", None)
        elif step.kind == "unable":
            self.driver.unable = not self.driver.unable
        elif step.kind == "stall":
            for core in self.driver.running:
                core.silent = True
                self.clock.callLater(STALLS[step.grace], setattr, core, "silent", False)
        else:
            return step.ask(self.runner, self.driver)
        return succeed(None)


WORDS = ("start", "stop", "sync all", "add", "remove")
# Seconds: shorter than a call may take, longer than that, and so long that the core is ended.
STALLS = {0.0: 3.0, 5.0: 8.0, GRACE: 30.0}
TROUBLE = ("crash", "fault", "stall", "unable", "kill", "end", "dear", "unchecked", "overlap")


def steps_of(kinds: Sequence[str], pauses: Sequence[float]) -> st.SearchStrategy[Step]:
    return st.builds(
        Step,
        st.sampled_from(kinds),
        st.sampled_from(["a", "a  ", "a x", "a bad"]),
        st.sampled_from([5.0, 0.0, GRACE]),
        st.frozensets(st.sampled_from(["ann", "bob", "cy"])),
        st.sampled_from(pauses),
    )


# Something is said, or goes wrong, or is said just when something goes wrong.
EVENTS = st.one_of(
    st.tuples(steps_of([*WORDS, *TROUBLE], [0.0, 0.125, 1.0, 7.0])),
    st.tuples(
        steps_of(["start"], [1.0]), steps_of(TROUBLE, [0.0]), steps_of(TROUBLE, [0.0, 0.125]), steps_of(WORDS, [0.0])
    ),
    st.tuples(steps_of(["start"], [1.0]), steps_of(["dear"], [0.0]), *[steps_of(WORDS, [0.0, 0.375, 4.0])] * 3),
)


class Truth(SynchronousTestCase):
    @settings(deadline=None, max_examples=200)
    @example([(replace(start("a", "ann"), pause=1.0), trouble("stall"), start())], [0.0] * 4, False)
    @example(
        [(replace(start(), pause=7.0), trouble("kill"), sync_all("ann")), (trouble("kill"),)],
        [0.0, 1.0, 0.0, 0.0],
        False,
    )
    @example(
        [(replace(start("a", "bob"), pause=1.0), trouble("dear"), replace(start(), pause=1.0), sync_all("ann"))],
        [0.0, 0.0, 1.0, 0.0],
        False,
    )
    @example(
        [
            (start(),),
            (start(),),
            (
                replace(start(), pause=1.0),
                trouble("dear"),
                replace(start("a", "bob"), pause=4.0),
                replace(sync_all("ann"), pause=4.0),
                start(),
            ),
        ],
        [0.5, 2.0, 0.0, 2.0, 0.0, 0.0, 0.0, 0.0],
        True,
    )
    @example(
        [
            (replace(start(), pause=1.0), start("a", "ann"), replace(start("a x", "ann"), pause=1.0)),
            (trouble("dear"), replace(sync_all(), pause=4.0)),
        ],
        [0.0, 1.0, 0.0, 0.0],
        True,
    )
    @example(
        [
            (start(), trouble("unable"), replace(start(), pause=1.0), start("a", "ann")),
            (replace(sync_all("ann"), grace=GRACE, pause=4.0), replace(start("a x"), pause=1.0)),
            (trouble("dear"), replace(sync_all(), pause=4.0), start()),
        ],
        [0.0, 0.0, 0.0, 0.5],
        True,
    )
    @example(
        [
            *[(replace(start(), grace=5.0),)] * 6,
            (replace(start("a x"), pause=1.0), trouble("crash"), trouble("fault"), start("a", "ann")),
            (
                replace(start("a x"), pause=1.0),
                trouble("dear"),
                replace(start("a x", "ann"), pause=4.0),
                Step("add", "a", 5.0, frozenset({"ann"}), 0.0),
                replace(start(), pause=4.0),
            ),
            (replace(start(), pause=1.0), trouble("crash"), trouble("crash"), start()),
            (replace(start(), pause=1.0), trouble("crash"), trouble("crash"), Step("stop", "a", 5.0, frozenset(), 0.0)),
        ],
        [0.0, 1.0, 1.5, 0.0],
        False,
    )
    @given(st.lists(EVENTS, max_size=12), st.lists(MOMENTS, min_size=4, max_size=20), st.booleans())
    def test_disk_memory_and_core(self, events: list[tuple[Step, ...]], times: list[float], sharing: bool) -> None:
        """Whatever goes wrong meanwhile, in the end they are equal, and what was answered with success is the case."""
        life, said = Life(times, MemoryRecord(), sharing), list[tuple[Step, Answer]]()
        wrong: list[str] = []
        for step in chain.from_iterable(events):
            if step.kind in ("kill", "end"):
                life = self.another(life, step.kind == "end", times, said)
            elif step.kind in WORDS:
                answer = Answer()
                said.append((step, answer))
                done = life.act(step).addCallbacks(answer.success, answer.failure)
                done.addCallback(self.is_done, life, said, len(said) - 1, wrong)
            else:
                life.act(step)
            life.clock.pump([0.125] * int(step.pause * 8) or [0.0])
        life.recover()
        while any(answer.open for _, answer in said):
            life.clock.advance(0.5)
        life.clock.pump([0.5] * 40)
        self.compare_removed(life)
        life.clock.pump([0.5] * 360)
        self.assertEqual(wrong, [])
        self.compare(life)
        self.compare_removed(life)
        self.say_again(life, refusing="dear" in [step.kind for step in chain.from_iterable(events)])
        unforeseen = [answer.fault for _, answer in said if not isinstance(answer.fault or NotInitialized(), NodeError)]
        self.assertEqual(unforeseen, [])
        for name in ("ann", "bob", "cy"):
            wanted = last_word(name, said)
            # Users who came while a first Start was under way go with it where it fails.
            if wanted is False or (wanted and life.record.request):
                self.assertEqual(name in life.record.kept, wanted, name)
        life.end()
        self.assertEqual((life.driver.running, life.clock.getDelayedCalls()), ([], []))

    def another(self, life: Life, orderly: bool, times: list[float], said: list[tuple[Step, Answer]]) -> Life:
        """The node after this one, which ends in good order or is killed; then the rest of it is for nobody."""
        if orderly:
            life.end()
        left = life.left()
        for _, answer in said:
            answer.late = True
        if not orderly:
            life.end()
        return Life(times, left, isinstance(life.driver, SharingDriver))

    def is_done(self, _: object, life: Life, said: list[tuple[Step, Answer]], place: int, wrong: list[str]) -> None:
        """What is answered with success is the case at once, unless something else was said meanwhile."""
        word, later = said[place], said[place + 1 :]
        runs, status = life.runner._generations, life.runner.status
        ends = status.state is Status.STARTING or (status.stopped and not life.runner._grace)
        for name in () if ends or word[0].kind == "stop" else ("ann", "bob", "cy"):
            if any(concerns(name, step) for step, _ in later):
                continue
            if last_word(name, [word]) is False:
                wrong += [f"{name} is in" for run in runs.serving if run.alive and name in run.accounts["a"]]
            elif last_word(name, [word]) and word[0].kind != "start" and runs.current and runs.current.alive:
                wrong += [f"{name} is out"] if name not in runs.current.accounts["a"] else []

    def compare(self, life: Life) -> None:
        config = Backend.FromString(life.record.request).config
        cores = life.driver.running
        self.assertEqual([core.plan.config.split() for core in cores], [config.split()] * (len(cores) or bool(config)))
        self.assertEqual(life.runner.status.state == "running", bool(config))
        self.assertEqual(life.runner.desired.roster.users, life.record.kept)

    def compare_removed(self, life: Life) -> None:
        """No run that serves has somebody who was removed, without waiting for the next comparison."""
        for run in life.runner._generations.serving:
            self.assertLessEqual(run.accounts["a"].items(), life.runner.desired.target["a"].items())

    def say_again(self, life: Life, refusing: bool) -> None:
        """Users whom a new run refused are taken when they are said again; all others are in."""
        self.assertEqual(life.driver.running[-1:], [*filter(None, [life.runner._generations.current])])
        for core in () if refusing else life.driver.running[-1:]:
            self.assertEqual(core.accounts, life.runner.desired.target)
        if life.runner.status.running:
            users = list(map(User.FromString, life.record.kept.values()))
            said = ensureDeferred(life.runner.users.update(users))
            life.clock.pump([0.5] * 40)
            self.successResultOf(said)
            self.assertEqual(life.driver.running[-1].accounts, life.runner.desired.target)


def concerns(name: str, step: Step) -> bool:
    """Whether something is said of the user."""
    return step.kind in ("start", "stop", "sync all") or name in step.users


def last_word(name: str, said: list[tuple[Step, Answer]]) -> bool | None:
    """Whether the user is in by what was said of him last; None where that was refused or not answered."""
    for step, answer in reversed(said):
        if concerns(name, step):
            return (name in step.users and step.kind not in ("stop", "remove")) if answer.good else None
    return None


async def nothing(_: Generation) -> bool:
    """There are no counters."""
    return False
