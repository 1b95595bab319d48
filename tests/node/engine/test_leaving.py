"""Handing the runs of a core over from one node process to the next: all of them, unchanged, or back again."""

from __future__ import annotations

import gc
import os
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

from twisted.internet.defer import Deferred, ensureDeferred, fail, succeed
from twisted.internet.task import Clock

from drivers.pretended.scripted import Gate, MemoryGeneration, MemoryPlan, SharedGeneration, SharingDriver
from node.backend.options import BackendOptions
from node.backend.probation import SECONDS as PROBATION
from node.base.errors import CoreFailed
from node.contract.accounts import Accounts
from node.contract.driver import Generation, Plan
from node.contract.generations import Generations
from node.contract.leaving import Gone, Leaves, NotNow
from node.engine import leaving
from node.engine.leaving import Leaving, config_of, mark_of
from protos.handover_pb2 import Handover, Run
from protos.service_pb2 import Backend, User
from tests.harness.overlap import ANN, BOB, CY, OverlapTests
from tests.harness.whole import make_runner


class LeavingGeneration(SharedGeneration):
    """`left`: it was left to the next process. `fault`: why it cannot be left."""

    counts_in_node = False

    def __init__(self, clock: Clock, plan: MemoryPlan, accounts: Mapping[str, Accounts], stopping: Gate) -> None:
        super().__init__(clock, plan, accounts, stopping)
        self.left = False
        self.fault: CoreFailed | None = None

    @property
    def number(self) -> int:
        """A number in place of the process number."""
        return 1 + self.driver.cores.index(self)

    @property
    def pid(self) -> int | None:
        return self.number

    async def leave(self) -> None:
        if self.fault:
            raise self.fault
        self.left = True

    def packed(self, exact: bool) -> bytes:
        if self.fault:
            raise self.fault
        assert self.left or not exact
        return b"%d" % self.number

    def stay(self) -> None:
        self.left = False

    open_ports: Sequence[int] = ()

    async def close_door(self, *, empty: bool = False) -> None:
        raise NotImplementedError

    async def open_door(self) -> None:
        cast(LeavingDriver, self.driver).steps.append(f"open {self.number}")


@dataclass(frozen=True)
class LeavingPlan(MemoryPlan):
    async def recover(self, left: bytes, exact: bool) -> Leaves:
        driver = cast(LeavingDriver, self.driver)
        assert exact == driver.exact
        if driver.faults:
            raise driver.faults.pop(0)
        core = cast(LeavingGeneration, driver.cores[int(left) - 1])
        if not core.alive:
            raise Gone("it has ended")
        assert self.config == core.plan.config
        return core


class LeavingDriver(SharingDriver):
    """A driver whose cores can be left. `there` are those that still live, as it was noted; `steps` what came when."""

    kind: type[MemoryGeneration] = LeavingGeneration

    def __init__(self, clock: Clock | None = None) -> None:
        super().__init__(clock)
        self.there: Sequence[int] | None = None
        self.rehearsals: list[bool] = []
        self.prepared: list[str] = []
        self.steps: list[str] = []
        # Whether the next process finds everything exactly.
        self.exact = True

    async def prepare(self, config_text: str, exclude: frozenset[str]) -> LeavingPlan:
        self.prepared.append(config_text)
        made = await super().prepare(config_text, exclude)
        return LeavingPlan(made.config, made.tags, self)

    async def leave(self) -> bytes:
        return b"together"

    def rehearse(self, begin: bool) -> None:
        self.rehearsals.append(begin)

    def go_on(self, packed: bytes) -> None:
        assert packed == (b"together" if self.exact else b"")

    async def recover(self, plan: Plan, left: bytes, exact: bool) -> Leaves:
        return await cast(LeavingPlan, plan).recover(left, exact)

    async def remain(self, pids: Collection[int], lead: int | None) -> None:
        self.steps.append("remain")
        self.there = sorted(pids)


class Counters:
    """The counters of each run."""

    def __init__(self) -> None:
        self.counters: dict[Generation, Mapping[str, int]] = {}
        self.reading: Callable[[], Awaitable[None]] | None = None
        self.is_paused = False

    @contextmanager
    def paused(self) -> Iterator[None]:
        self.is_paused = True
        yield
        self.is_paused = False

    async def read(self) -> bool:
        if self.reading is not None:
            await self.reading()
        return False

    def known(self, run: Generation) -> Mapping[str, int]:
        return self.counters.get(run, {})

    def go_on(self, run: Generation, known: Mapping[str, int]) -> None:
        self.counters[run] = dict(known)


class Exited(Exception):
    """The process has exited, and the next one takes over."""


class WentBack(BaseException):
    """The hand-over failed, and the last process goes on."""


def mark(run: Generation | None) -> str:
    return f"mark {run.number}" if isinstance(run, LeavingGeneration) else ""


class LeavingTests(OverlapTests):
    def setUp(self) -> None:
        super().setUp()
        self.driver: LeavingDriver = LeavingDriver(self.clock)
        self.traffic = Counters()
        self.leaving = Leaving(self.runner, {0: self.driver}, cast(Any, self.traffic))
        self.fates: list[object] = []
        self.way_back = True
        self.patch(leaving, "mark_of", mark)

    # Satisfies `Heirs`.

    async def end_others(self) -> None:
        self.driver.steps.append("end others")

    def taken(self, pids: Collection[int]) -> None:
        self.fates.append(sorted(pids))

    def go_back(self, reason: str) -> None:
        self.fates.append(reason)
        if self.way_back:
            raise WentBack

    def failed(self, reason: str) -> None:
        self.fates.append(f"failed: {reason}")

    def leave(self) -> Deferred[Handover]:
        async def work() -> Handover:
            found: list[Handover] = []

            async def go(handover: Handover) -> None:
                assert all(core.left for core in self.cores)
                found.append(Handover.FromString(handover.SerializeToString()))
                # As the node does.
                found[0].exact = True
                raise Exited

            try:
                await self.leaving.leave(go)
            except Exited:
                return found[0]
            return Handover()

        return ensureDeferred(work())

    @property
    def cores(self) -> list[LeavingGeneration]:
        return [core for core in self.driver.running if isinstance(core, LeavingGeneration)]

    def numbers(self, runs: Sequence[Generation]) -> list[int]:
        return [run.number for run in runs if isinstance(run, LeavingGeneration)]

    def next_process(self, handover: Handover, config: str, *users: User, **booked: Mapping[str, int]) -> None:
        """Begin another node process with this hand-over; nothing is kept of the one before.

        `booked`: the counters on disk, by mark.
        """
        for call in tuple(self.clock.getDelayedCalls()):
            call.cancel()
        for core in self.driver.cores:
            core._waiting.clear()
        self.generations, self.traffic = Generations(), Counters()
        limits = BackendOptions(drain_timeout=60.0, drain_generations=2)
        self.runner = make_runner(self.clock, self.ring, self.record, self.generations, self.read, limits)
        self.leaving = Leaving(self.runner, {0: self.driver}, cast(Any, self.traffic))
        self.leaving.booked = {name.replace("_", " "): counters for name, counters in booked.items()}
        self.driver.exact = handover.exact
        self.leaving.inherit(handover, self)
        saved = [user.SerializeToString() for user in users]
        ensureDeferred(self.runner.resume(self.driver, Backend(config=config), saved, lambda: None))

    def upgrade(self, config: str, *users: User) -> Handover:
        handover = self.successResultOf(self.leave())
        self.next_process(handover, config, *users)
        return handover


class Upgrades(LeavingTests):
    def test_all_are_adopted(self) -> None:
        """Each run has its configuration, its place and its counters."""
        runs = [self.started("a" + " x" * number, ANN, BOB) for number in range(3)]
        self.traffic.counters = {run: {"up": number} for number, run in enumerate(runs)}
        handover = self.upgrade("a x x", ANN, BOB)
        self.assertEqual([each.pid for each in (handover.run, *handover.draining)], [3, 1, 2])
        self.assertEqual(handover.common, b"together")
        self.assertEqual((self.current, self.generations.draining), (runs[2], (*runs[:2],)))
        self.assertEqual([self.traffic.counters[run] for run in runs], [{"up": number} for number in range(3)])
        self.assertEqual((self.fates, self.driver.there), ([[1, 2, 3]], [1, 2, 3]))
        self.assertEqual([run.left for run in self.cores], [False] * 3)
        for run in runs[:2]:
            run.connections = 0
        self.pass_time(PROBATION + 2)
        self.assertEqual([run.alive for run in runs], [False, False, True])

    def test_several_hand_overs(self) -> None:
        """The time to drain continues from where it was."""
        old = self.started("a", ANN)
        new = self.started("a x", ANN)
        for _ in range(5):
            self.pass_time(11)
            self.upgrade("a x", ANN)
        self.assertTrue(old.alive)
        self.pass_time(7)
        self.assertEqual((old.alive, self.generations.counting), (False, (new,)))

    def test_what_is_booked_meanwhile(self) -> None:
        """Counters that a slow core reports while it is being left would be booked twice: it is left later."""
        run = self.started("a", ANN)
        self.traffic.counters[run] = {"up": 1}

        async def later() -> bytes:
            self.assertTrue(self.traffic.is_paused, "there are no regular readings")
            self.traffic.counters[run] = {"up": 2}
            return b"together"

        leave, self.driver.leave = self.driver.leave, later  # type: ignore[method-assign]
        self.failureResultOf(self.leave(), NotNow)
        self.driver.leave = leave  # type: ignore[method-assign]
        self.traffic.is_paused = False
        self.assertEqual(dict(self.successResultOf(self.leave()).run.counters), {"up": 2})

    def test_a_removed_user(self) -> None:
        """After the hand-over a draining run cuts a removed user, too; other users stay."""
        old = self.started("a", ANN, BOB)
        self.started("a x", ANN, BOB)
        self.upgrade("a x", ANN, BOB)
        self.successResultOf(self.remove("ann"))
        self.assertEqual(self.names(old), {"bob"})

    def test_runs_of_the_same_configuration(self) -> None:
        """The core does not read it again for each."""
        old = self.started("a", ANN)
        self.driver.dear = lambda change: change.key == "cy"
        self.sync(ANN, CY)
        self.pass_time(1)
        handover = self.successResultOf(self.leave())
        self.assertEqual([each.pid for each in handover.draining], [1])
        self.driver.prepared.clear()
        self.next_process(handover, "a", ANN, CY)
        self.assertEqual(self.driver.prepared, ["a"])
        self.assertEqual((self.generations.draining, self.names(self.current)), ((old,), {"ann", "cy"}))

    def test_a_run_on_probation(self) -> None:
        """In its remaining time the run before it can still replace it."""
        old = self.started("a", ANN)
        new = self.started("a x", ANN)
        self.pass_time(2)
        self.upgrade("a x", ANN)
        new.die()
        self.pass_time(0.5)
        self.assertEqual((self.current, self.driver.led, self.state[0]), (old, old, "running"))

    def test_a_run_after_its_probation(self) -> None:
        """If such a run ends, the node starts another one."""
        old = self.started("a", ANN)
        new = self.started("a x", ANN)
        self.pass_time(2)
        self.upgrade("a x", ANN)
        self.pass_time(PROBATION)
        new.die()
        self.pass_time(2)
        self.assertNotIn(self.current, (old, new))
        self.assertTrue(old.alive)

    def test_a_draining_run_that_ends_in_between(self) -> None:
        """The others are adopted."""
        runs = [self.started("a" + " x" * number, ANN) for number in range(3)]
        handover = self.successResultOf(self.leave())
        runs[0].die()
        self.next_process(handover, "a x x", ANN)
        self.assertEqual((self.current, self.generations.draining), (runs[2], (runs[1],)))
        self.assertEqual((self.fates, self.driver.there), ([[2, 3]], [2, 3]))

    def test_the_current_run_ends_in_between(self) -> None:
        """The next node starts another run beside the draining ones, which do not replace it."""
        runs = [self.started("a" + " x" * number, ANN) for number in range(2)]
        handover = self.successResultOf(self.leave())
        runs[1].die()
        self.next_process(handover, "a x", ANN)
        self.assertEqual((self.generations.draining, runs[0].alive), ((runs[0],), True))
        self.assertEqual((self.numbers([self.current]), self.state), ([3], ("running", "")))
        self.current.die()
        self.pass_time(2)
        self.assertEqual(self.numbers([self.current]), [4])

    def test_going_back(self) -> None:
        """If one run cannot be adopted, all go back; the first report of it ends the next process."""
        runs = [self.started("a" + " x" * number, ANN) for number in range(3)]
        for position in range(3):
            handover = self.successResultOf(self.leave())
            self.driver.faults = [Gone("it has ended")] * position + [CoreFailed("no way")]
            self.next_process(handover, "a x x", ANN)
            gc.collect()
            self.assertEqual((self.fates[-1:], len(self.flushLoggedErrors(WentBack))), (["no way"], 1))
            self.assertTrue(all(run.alive for run in runs))
            self.next_process(handover, "a x x", ANN)
            self.assertEqual((self.current, self.generations.draining), (runs[2], (*runs[:2],)))

    def test_no_way_back(self) -> None:
        """If the last process is gone, the next one leaves out only the run that it cannot adopt."""
        runs = [self.started("a" + " x" * number, ANN) for number in range(3)]
        handover = self.successResultOf(self.leave())
        self.way_back, self.driver.faults = False, []
        handover.draining[0].backend = Backend(config="a bad").SerializeToString()
        self.next_process(handover, "a x x", ANN)
        self.assertEqual((self.current, self.generations.draining), (runs[2], (runs[1],)))
        self.assertEqual(self.fates, ["the core cannot read it", [2, 3]])
        runs[0].die()

    def test_little_is_known(self) -> None:
        """Another version may describe a run by less."""
        run = self.started("a", ANN)
        handover = self.successResultOf(self.leave())
        left = Run(pid=handover.run.pid, core=handover.run.core)
        self.next_process(Handover(run=left, common=handover.common, exact=True), "a", ANN)
        self.assertEqual((self.current, self.generations.draining), (run, ()))

    def test_inbounds_stay_as_they_were(self) -> None:
        """Listeners that the version before has closed are not opened."""
        self.started("a", ANN)
        self.upgrade("a", ANN)
        self.assertEqual(self.driver.steps, ["end others", "remain"])


class Rehearsals(LeavingTests):
    def setUp(self) -> None:
        super().setUp()
        for words in ("a", "a x", "a y"):
            self.started(words, ANN)

    def test_configurations_of_a_rehearsal(self) -> None:
        """Each is read once, and no answers are kept when all runs are left, or could not be."""
        self.driver.prepared.clear()
        self.successResultOf(ensureDeferred(self.leaving.rehearse()))
        self.assertEqual((self.driver.prepared, self.driver.rehearsals), (["a y", "a", "a x"], [True]))
        self.successResultOf(self.leave())
        self.assertEqual(self.driver.rehearsals, [True, False])

    def test_a_refused_configuration(self) -> None:
        """If the core refuses the configuration, there is no upgrade, and all runs go on."""
        self.patch(self.driver, "prepare", lambda *_: fail(CoreFailed("it cannot be read")))
        self.failureResultOf(ensureDeferred(self.leaving.rehearse()), CoreFailed)
        self.assertEqual(self.driver.rehearsals, [True, False])


class Waits(LeavingTests):
    def refused(self) -> str:
        reason = self.runner.unsteady()
        self.assertEqual(str(self.failureResultOf(self.leave(), NotNow).value), reason)
        return reason

    def test_for_a_start(self) -> None:
        self.started("a", ANN)
        self.driver.launching.shut = True
        start = self.start("a x", ANN)
        self.assertEqual(self.runner.unsteady(), "the backend is starting")
        leaving = self.leave()
        self.assertNoResult(leaving)
        self.driver.launching.open()
        self.successResultOf(start)
        self.assertEqual([each.pid for each in self.successResultOf(leaving).draining], [1])

    def test_a_run_that_ends(self) -> None:
        """A core that is ending is not left: the hand-over is refused."""
        old = self.started("a", ANN)
        self.started("a x", ANN)
        old.connections = 0
        self.driver.stopping.shut = True
        self.pass_time(PROBATION + 2)
        self.assertEqual(self.refused(), "a core is ending")
        self.driver.stopping.open()
        self.assertEqual(self.runner.unsteady(), "")

    def test_for_the_grace_of_a_stop(self) -> None:
        self.started("a", ANN)
        self.successResultOf(ensureDeferred(self.runner.stop("asked", 30.0)))
        self.assertIn("waits for its Start", self.refused())

    def test_a_run_that_cannot_be_left(self) -> None:
        """All runs stay, and end as usual."""
        old, new = self.started("a", ANN), self.started("a x", ANN)
        cast(LeavingGeneration, new).fault = CoreFailed("not now")
        self.assertEqual(str(self.failureResultOf(self.leave(), NotNow).value), "not now")
        self.assertEqual([run.left for run in self.cores], [False, False])
        old.connections = 0
        self.pass_time(PROBATION + 2)
        self.assertFalse(old.alive)

    def test_no_run_ends_meanwhile(self) -> None:
        """While runs are being left, none ends, neither idle nor by the time limit."""
        old, gate = self.started("a", ANN), Gate()
        self.started("a x", ANN)
        old.connections, gate.shut = 0, True
        self.traffic.reading = gate.passed
        leaving = self.leave()
        self.pass_time(70)
        self.assertTrue(old.alive)
        gate.open()
        self.assertEqual([each.pid for each in self.successResultOf(leaving).draining], [1])
        self.pass_time(2)
        self.assertFalse(old.alive)

    def test_nothing_runs(self) -> None:
        self.assertEqual(self.successResultOf(self.leave()), Handover())


class Kills(LeavingTests):
    """The node is killed: the next one has what was described in time, and what is on disk."""

    def described(self, saved: Collection[Generation] = ()) -> Handover:
        return Handover.FromString(self.leaving.describe(saved=saved).SerializeToString())

    def test_all_are_adopted(self) -> None:
        """The counters are those on disk; cores that are not known end before the driver has the kernel's order."""
        runs = [self.started("a" + " x" * number, ANN, BOB) for number in range(3)]
        self.traffic.counters = {run: {"up": 100} for run in runs}
        handover = self.described(runs)
        self.assertEqual(handover.common, b"")
        self.assertEqual([*handover.run.counters], [])
        self.assertEqual([each.saved for each in (handover.run, *handover.draining)], [True] * 3)
        booked = {f"mark_{number}": {"": 0, "up": number} for number in (1, 2, 3)}
        self.next_process(handover, "a x x", ANN, BOB, **booked)
        self.assertEqual((self.current, self.generations.draining), (runs[2], (*runs[:2],)))
        self.assertEqual([self.traffic.counters[run] for run in runs], [{"up": number} for number in (1, 2, 3)])
        self.assertEqual((self.fates, self.driver.there), ([[1, 2, 3]], [1, 2, 3]))
        self.assertEqual(self.driver.steps, ["end others", "remain", "open 3"])
        self.assertTrue(self.leaving.inherits)

    def test_a_core_whose_bytes_the_node_adds_up(self) -> None:
        """A counter that was booked after the last description does not count from zero."""
        (run,) = [self.started("a", ANN)]
        self.patch(LeavingGeneration, "counts_in_node", True)
        reading = {"lower": 5, "higher": 9}
        self.patch(LeavingGeneration, "counters", lambda _: succeed(reading))
        booked = {"mark_1": {"": 0, "lower": 7, "higher": 7, "gone": 7}}
        self.next_process(self.described([run]), "a", ANN, **booked)
        self.assertEqual(self.traffic.counters[run], {"lower": 5, "higher": 7, "gone": 7})

    def test_while_the_run_was_replaced(self) -> None:
        """That run is current whose configuration is on disk: the new one, or still the one before it."""
        for config, current in ("a", 0), ("a x", 1):
            runs = [self.started("a", ANN), self.started("a x", ANN)]
            handover = self.described()
            self.next_process(handover, config, ANN)
            self.assertEqual((self.current, self.generations.draining), (runs[current], (runs[1 - current],)))
            self.tearDown()
            self.setUp()

    def test_the_new_run_drains_then(self) -> None:
        """It has had its first connections, which are not cut: it began to drain only now."""
        self.clock.advance(1000.0)
        runs = [self.started("a", ANN), self.started("a x", ANN)]
        self.next_process(self.described(), "a", ANN)
        self.pass_time(5)
        self.assertEqual((self.current, runs[1].alive), (runs[0], True))

    def test_the_run_before_drains_then(self) -> None:
        """The node is killed while the new run takes over: the connections of the one before are not cut."""
        self.clock.advance(1000.0)
        old = self.started("a", ANN)
        self.driver.leading.shut = True
        start = self.start("a x", ANN)
        start.addErrback(lambda _: None)
        handover = self.described()
        self.assertEqual((handover.run.pid, [each.pid for each in handover.draining]), (1, [2]))
        self.driver.leading.open()
        self.next_process(handover, "a x", ANN)
        self.pass_time(5)
        self.assertEqual((self.numbers([self.current]), old.alive), ([2], True))

    def test_the_younger_of_equals_is_current(self) -> None:
        """A run was replaced by one with the same configuration."""
        old = self.started("a", ANN)
        self.driver.dear = lambda change: change.key == "cy"
        self.sync(ANN, CY)
        self.pass_time(1)
        new = self.current
        self.next_process(self.described(), "a", ANN, CY)
        self.assertEqual((self.current, self.generations.draining), (new, (old,)))

    def test_draining_runs_without_counters(self) -> None:
        """Those that the disk once had are left out, as they would be counted twice; others count from zero."""
        runs = [self.started("a" + " x" * number, ANN) for number in range(3)]
        handover = self.described([runs[0], runs[2]])
        self.next_process(handover, "a x x", ANN, mark_3={"up": 3})
        self.assertEqual((self.current, self.generations.draining), (runs[2], (runs[1],)))
        self.assertEqual((self.traffic.counters, self.fates), ({runs[2]: {"up": 3}, runs[1]: {}}, [[2, 3]]))
        runs[0].die()

    def test_a_current_run_without_counters(self) -> None:
        """One that began just now counts from zero; otherwise the disk has failed, and another is started."""
        run = self.started("a", ANN)
        self.next_process(self.described(), "a", ANN)
        self.assertEqual((self.current, self.traffic.counters), (run, {run: {}}))
        handover = self.described([run])
        run.die()
        self.next_process(handover, "a", ANN)
        self.assertEqual(self.fates, [[1], "failed: the state file has no counters of the core"])
        self.assertEqual((self.numbers([self.current]), self.driver.there, self.state[0]), ([2], [], "running"))

    def test_after_a_crash(self) -> None:
        """The node waits to restart the newest run: those that drain go on, and the next one starts beside them."""
        runs = [self.started("a" + " x" * number, ANN) for number in range(3)]
        self.pass_time(PROBATION + 1)
        self.driver.faults = [CoreFailed("no")] * 2
        runs[2].die()
        self.pass_time(0.5)
        self.assertEqual((self.state[0], self.generations.current), ("restarting", None))
        self.traffic.counters = {run: {"up": 100} for run in runs}
        self.assertEqual(self.leaving.marks(), {runs[0]: "mark 1", runs[1]: "mark 2"})
        handover = self.described(runs)
        self.assertFalse(handover.HasField("run"))
        self.driver.faults.clear()
        self.next_process(handover, "a x x", ANN, mark_1={"up": 1}, mark_2={"up": 2})
        self.assertEqual((self.numbers([self.current]), self.generations.draining), ([4], (*runs[:2],)))
        self.assertEqual((self.fates, self.driver.there, self.state[0]), ([[1, 2]], [1, 2], "running"))
        self.assertEqual([self.traffic.counters[run] for run in runs[:2]], [{"up": 1}, {"up": 2}])
        self.assertNotIn("open", " ".join(self.driver.steps))

    def test_another_configuration_is_on_disk(self) -> None:
        """No run has it: it is started, and the others end."""
        run = self.started("a", ANN)
        handover = self.described()
        run.die()
        self.next_process(handover, "b", ANN)
        self.assertEqual(self.fates, ["failed: no core runs the configuration that was accepted last"])
        self.assertEqual((self.numbers([self.current]), self.driver.steps), ([2], ["remain"]))

    def test_nothing_is_resumed(self) -> None:
        """The disk has no backend: what was left ends."""
        self.started("a", ANN).die()
        self.leaving = Leaving(self.runner, {0: self.driver}, cast(Any, self.traffic))
        self.driver.exact = False
        self.leaving.inherit(Handover(run=Run(pid=1, core=b"1")), self)
        self.successResultOf(ensureDeferred(self.leaving.require_heir()))
        self.assertEqual((len(self.fates), self.driver.there), (1, []))
        self.successResultOf(ensureDeferred(self.leaving.require_heir()))
        self.assertEqual(len(self.fates), 1)

    def test_runs_that_cannot_be_described(self) -> None:
        """A draining run is left out; without the current one nothing is left. Where it must be exact, that fails."""
        old, new = (cast(LeavingGeneration, self.started(words, ANN)) for words in ("a", "a x"))
        old.fault = CoreFailed("it has ended")
        self.assertEqual((self.described().run.pid, [*self.described().draining]), (2, []))
        old.left = new.left = True
        with self.assertRaises(CoreFailed):
            self.leaving.describe(exact=True)
        new.fault = old.fault
        self.assertEqual(self.described(), Handover())
        with self.assertRaises(CoreFailed):
            self.leaving.describe(exact=True)

    def test_nothing_runs(self) -> None:
        self.assertEqual((self.described(), self.leaving.marks()), (Handover(), {}))

    def test_what_is_described(self) -> None:
        """Each run by its mark and its configuration, and how it drains."""
        self.clock.advance(7.0)
        runs = [self.started("a", ANN), self.started("a x", ANN)]
        handover = self.described()
        self.assertEqual(self.leaving.marks(), {runs[1]: "mark 2", runs[0]: "mark 1"})
        accepted = self.runner.desired.accepted
        assert accepted is not None
        self.assertEqual((handover.run.mark, handover.run.config), ("mark 2", config_of(accepted)))
        [draining] = handover.draining
        self.assertEqual((draining.mark, draining.since), ("mark 1", self.clock.seconds()))
        backend = Backend.FromString(draining.backend)
        self.assertEqual((backend.config, [*backend.users]), ("a", []))
        self.assertNotEqual(draining.config, handover.run.config)
        self.assertTrue(draining.HasField("way_back"))


class Numbered:
    def __init__(self, pid: int | None) -> None:
        self.pid = pid


def test_marks() -> None:
    """Each process has another mark, for as long as it lives."""
    here, parent = (mark_of(cast(Any, Numbered(pid))) for pid in (os.getpid(), os.getppid()))
    assert here and parent and here != parent and mark_of(cast(Any, Numbered(os.getpid()))) == here
    assert mark_of(cast(Any, Numbered(None))) == mark_of(cast(Any, Numbered(1 << 30))) == ""
