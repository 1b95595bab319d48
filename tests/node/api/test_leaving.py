"""Handing the runs of a core over from one node process to the next: all of them, unchanged, or back again."""

from __future__ import annotations

import gc
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from twisted.internet.defer import Deferred, ensureDeferred, fail
from twisted.internet.task import Clock

from node.api.leaving import Leaving
from node.backend.drain import Limits
from node.backend.generations import Generations
from node.backend.probation import SECONDS as PROBATION
from node.backend.runner import Runner
from node.contract.accounts import Accounts
from node.contract.driver import Generation, Gone, Left, NotNow, Together
from node.errors import CoreFailed
from protos.handover_pb2 import Handover, Run
from protos.service_pb2 import Backend, User
from tests.harness.memory import Gate, MemoryGeneration, MemoryPlan, SharedGeneration, SharingDriver
from tests.harness.overlap import ANN, BOB, CY, OverlapTests


class LeavingGeneration(SharedGeneration):
    """`left`: it was left to the next process. `fault`: why it cannot be left."""

    def __init__(self, clock: Clock, plan: MemoryPlan, accounts: Mapping[str, Accounts], stopping: Gate) -> None:
        super().__init__(clock, plan, accounts, stopping)
        self.left = False
        self.fault: CoreFailed | None = None

    @property
    def number(self) -> int:
        """A number in place of the process number."""
        return 1 + self.driver.cores.index(self)

    async def leave(self) -> Left:
        if self.fault:
            raise self.fault
        self.left = True
        return Left(self.number, [100 + self.number], b"%d" % self.number)

    def stay(self) -> None:
        self.left = False


@dataclass(frozen=True)
class LeavingPlan(MemoryPlan):
    async def recover(self, left: bytes) -> Generation:
        driver = cast(LeavingDriver, self.driver)
        if driver.faults:
            raise driver.faults.pop(0)
        core = cast(LeavingGeneration, driver.cores[int(left) - 1])
        if not core.alive:
            raise Gone("it has ended")
        assert self.config == core.plan.config
        return core


class LeavingDriver(SharingDriver):
    """A driver whose cores can be left. `there` are the pids that `remain` received."""

    kind: type[MemoryGeneration] = LeavingGeneration

    def __init__(self, clock: Clock | None = None) -> None:
        super().__init__(clock)
        self.there: Sequence[int] | None = None
        self.rehearsals: list[bool] = []

    async def prepare(self, config_text: str, exclude: frozenset[str]) -> LeavingPlan:
        made = await super().prepare(config_text, exclude)
        return LeavingPlan(made.config, made.tags, self)

    async def leave(self) -> Together:
        return Together(b"together", [99])

    def rehearse(self, begin: bool) -> None:
        self.rehearsals.append(begin)

    def go_on(self, packed: bytes) -> None:
        assert packed == b"together"

    async def regain(self, runs: Sequence[Generation]) -> None:
        raise AssertionError("no node was killed")

    def remain(self, pids: Collection[int]) -> None:
        self.there = sorted(pids)


class Counters:
    """The counters of each run."""

    def __init__(self) -> None:
        self.counters: dict[Generation, Mapping[str, int]] = {}
        self.reading: Callable[[], Awaitable[None]] | None = None

    async def read(self) -> bool:
        if self.reading is not None:
            await self.reading()
        return False

    def known(self, run: Generation) -> Mapping[str, int]:
        return self.counters.get(run, {})

    def go_on(self, run: Generation, known: Mapping[str, int]) -> None:
        self.counters[run] = dict(known)


class Executed(Exception):
    """The next process has taken over."""


class WentBack(BaseException):
    """The hand-over failed, and the last process goes on."""


class LeavingTests(OverlapTests):
    def setUp(self) -> None:
        super().setUp()
        self.driver: LeavingDriver = LeavingDriver(self.clock)
        self.traffic = Counters()
        self.leaving = Leaving(self.runner, {0: self.driver}, self.traffic)
        self.fates: list[object] = []
        self.way_back = True

    # Satisfies `Heirs`.

    def taken(self, pids: Collection[int]) -> None:
        self.fates.append(sorted(pids))

    def go_back(self, reason: str) -> None:
        self.fates.append(reason)
        if self.way_back:
            raise WentBack

    def failed(self, reason: str) -> None:
        self.fates.append(f"failed: {reason}")

    def leave(self, several: bool = True) -> Deferred[Handover]:
        async def work() -> Handover:
            found: list[Handover] = []

            async def go(handover: Handover) -> None:
                assert all(core.left for core in self.cores)
                found.append(Handover.FromString(handover.SerializeToString()))
                raise Executed

            try:
                await self.leaving.leave(several, go)
            except Executed:
                return found[0]
            return Handover()

        return ensureDeferred(work())

    @property
    def cores(self) -> list[LeavingGeneration]:
        return [core for core in self.driver.running if isinstance(core, LeavingGeneration)]

    def numbers(self, runs: Sequence[Generation]) -> list[int]:
        return [run.number for run in runs if isinstance(run, LeavingGeneration)]

    def next_program(self, handover: Handover, config: str, *users: User) -> None:
        """Begin another node process with this hand-over; nothing is kept of the one before."""
        for call in tuple(self.clock.getDelayedCalls()):
            call.cancel()
        for core in self.driver.cores:
            core._waiting.clear()
        self.generations, self.traffic = Generations(), Counters()
        limits = Limits(timeout=60.0, generations=2)
        self.runner = Runner(self.clock, self.ring, self.record, self.generations, self.read, limits)
        self.leaving = Leaving(self.runner, {0: self.driver}, self.traffic)
        self.leaving.inherit(handover, self)
        request = Backend(config=config, users=users)
        ensureDeferred(self.runner.resume(self.driver, request, lambda: None))

    def upgrade(self, config: str, *users: User) -> Handover:
        handover = self.successResultOf(self.leave())
        self.next_program(handover, config, *users)
        return handover


class Upgrades(LeavingTests):
    def test_all_are_adopted(self) -> None:
        """Each run has its configuration, its place and its counters."""
        runs = [self.started("a" + " x" * number, ANN, BOB) for number in range(3)]
        self.traffic.counters = {run: {"up": number} for number, run in enumerate(runs)}
        handover = self.upgrade("a x x", ANN, BOB)
        self.assertEqual([each.pid for each in (handover.run, *handover.draining)], [3, 1, 2])
        self.assertEqual([*handover.together.descriptors], [99])
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

        async def later() -> Together:
            self.traffic.counters[run] = {"up": 2}
            return Together(b"together", [99])

        leave, self.driver.leave = self.driver.leave, later  # type: ignore[method-assign]
        self.failureResultOf(self.leave(), NotNow)
        self.driver.leave = leave  # type: ignore[method-assign]
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
        self.assertEqual([(each.pid, each.backend) for each in handover.draining], [(1, b"")])
        self.next_program(handover, "a", ANN, CY)
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
        self.next_program(handover, "a x x", ANN)
        self.assertEqual((self.current, self.generations.draining), (runs[2], (runs[1],)))
        self.assertEqual((self.fates, self.driver.there), ([[2, 3]], [2, 3]))

    def test_the_current_run_ends_in_between(self) -> None:
        """The next node starts another run beside the draining ones, which do not replace it."""
        runs = [self.started("a" + " x" * number, ANN) for number in range(2)]
        handover = self.successResultOf(self.leave())
        runs[1].die()
        self.next_program(handover, "a x", ANN)
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
            self.next_program(handover, "a x x", ANN)
            gc.collect()
            self.assertEqual((self.fates[-1:], len(self.flushLoggedErrors(WentBack))), (["no way"], 1))
            self.assertTrue(all(run.alive for run in runs))
            self.next_program(handover, "a x x", ANN)
            self.assertEqual((self.current, self.generations.draining), (runs[2], (*runs[:2],)))

    def test_no_way_back(self) -> None:
        """If the last process is gone, the next one leaves out only the run that it cannot adopt."""
        runs = [self.started("a" + " x" * number, ANN) for number in range(3)]
        handover = self.successResultOf(self.leave())
        self.way_back, self.driver.faults = False, []
        handover.draining[0].backend = Backend(config="a bad").SerializeToString()
        self.next_program(handover, "a x x", ANN)
        self.assertEqual((self.current, self.generations.draining), (runs[2], (runs[1],)))
        self.assertEqual(self.fates, ["the core cannot read it", [2, 3]])
        runs[0].die()

    def test_a_hand_over_of_an_earlier_version(self) -> None:
        """Such a hand-over has one core, and does not describe others."""
        run = self.started("a", ANN)
        handover = self.successResultOf(self.leave())
        old = Handover(run=Run(pid=handover.run.pid, core=handover.run.core), together=handover.together)
        self.next_program(old, "a", ANN)
        self.assertEqual((self.current, self.generations.draining), (run, ()))


class Rehearsals(LeavingTests):
    def setUp(self) -> None:
        super().setUp()
        for words in ("a", "a x", "a y"):
            self.started(words, ANN)

    def test_configurations_of_a_rehearsal(self) -> None:
        """The core reads each configuration once; its answers are dropped when all runs are left, or could not be."""
        prepared: list[str] = []
        prepare = self.driver.prepare

        async def told(config_text: str, exclude: frozenset[str]) -> LeavingPlan:
            prepared.append(config_text)
            return await prepare(config_text, exclude)

        self.patch(self.driver, "prepare", told)
        self.successResultOf(ensureDeferred(self.leaving.rehearse()))
        self.assertEqual((prepared, self.driver.rehearsals), (["a y", "a", "a x"], [True]))
        self.successResultOf(self.leave())
        self.assertEqual(self.driver.rehearsals, [True, False])

    def test_a_refused_configuration(self) -> None:
        """If the core refuses the configuration, there is no upgrade, and all runs go on."""
        self.patch(self.driver, "prepare", lambda *_: fail(CoreFailed("it cannot be read")))
        self.failureResultOf(ensureDeferred(self.leaving.rehearse()), CoreFailed)
        self.assertEqual(self.driver.rehearsals, [True, False])


class Waits(LeavingTests):
    def refused(self, several: bool = True) -> str:
        reason = self.runner.unsteady(several)
        self.assertEqual(str(self.failureResultOf(self.leave(several), NotNow).value), reason)
        return reason

    def test_for_a_start(self) -> None:
        self.started("a", ANN)
        self.driver.launching.shut = True
        start = self.start("a x", ANN)
        self.assertEqual(self.runner.unsteady(True), "the backend is starting")
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
        self.assertEqual(self.runner.unsteady(True), "")

    def test_for_a_drain_where_the_next_goes_on_with_one_alone(self) -> None:
        old = self.started("a", ANN)
        self.started("a x", ANN)
        self.assertIn("can take over one core only", self.refused(several=False))
        old.connections = 0
        self.pass_time(PROBATION + 2)
        handover = self.successResultOf(self.leave(several=False))
        self.assertEqual((handover.run.pid, [*handover.draining]), (2, []))

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
