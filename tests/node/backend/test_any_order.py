"""Property tests: whatever calls and faults come, in any order, the end state is what was asked for last."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, cycle
from typing import Any, cast

from hypothesis import example, given, settings
from hypothesis import strategies as st
from twisted.internet.defer import Deferred, ensureDeferred, succeed
from twisted.internet.task import Clock, deferLater
from twisted.python.failure import Failure
from twisted.trial.unittest import SynchronousTestCase

from drivers.pretended.scripted import Gate, MemoryDriver, MemoryGeneration, SharedGeneration, SharingDriver
from node.backend.control import Settled
from node.backend.faults import in_background
from node.backend.options import BackendOptions
from node.backend.roster import Limiter
from node.backend.runner import Runner
from node.backend.state import State as Status
from node.base.errors import (
    Aborted,
    CoreFailed,
    InvalidConfig,
    NodeError,
    NotInitialized,
)
from node.base.logs import LogRing
from node.contract.accounts import Change
from node.contract.driver import Generation
from node.contract.generations import Generations
from protos.service_pb2 import Backend, User
from tests.harness.memory import MemoryRecord, person
from tests.harness.runner import GRACE
from tests.harness.whole import make_runner


@dataclass(frozen=True)
class Step:
    """A call of a controller, or a fault; and the state after it: a configuration and its users, or nothing."""

    kind: str
    config: str
    grace: float
    users: frozenset[str]
    # The seconds until the next step.
    pause: float

    def ask(self, runner: Runner, driver: MemoryDriver) -> Deferred[None]:
        # The same call at another time may come with another credential.
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


# Which of the running cores crash: all, the first, the last.
CRASHES = {0.0: slice(None), 5.0: slice(1), GRACE: slice(-1, None)}
# Changes that need a new run: none, all, or those that add users.
DEAR: dict[float, Callable[[Change], bool]] = {
    0.0: lambda _: False,
    5.0: lambda _: True,
    GRACE: lambda change: change.packed is not None,
}


async def overlap(runner: Runner, driver: MemoryDriver) -> None:
    """Have a new run of the same core replace the current one, which drains."""

    async def work(settled: Settled) -> None:
        if not (runner.status.running and runner.generations.current):
            return
        if isinstance(runner.generations.current, SharedGeneration):
            # The next removal triggers a new run.
            runner.generations.current.lingering = True
            return
        plan = cast(MemoryGeneration, runner.generations.current).plan
        runner.status.enter(Status.STARTING)
        settled()
        await runner._settling.idle()
        driver.cores.append(MemoryGeneration(driver.clock, plan, runner.desired.target, driver.stopping))
        runner.status.enter(Status.RUNNING)
        runner.supervisor._adopt(driver.cores[-1])
        await runner._settling.settle_all()

    await runner._control.run(work, core=True)


def start(config: str = "a", *users: str) -> Step:
    return Step("start", config, 0.0, frozenset(users), 0.0)


def sync_all(*users: str) -> Step:
    return Step("sync all", "", 0.0, frozenset(users), 0.0)


def trouble(kind: str) -> Step:
    return Step(kind, "", 5.0, frozenset(), 0.0)


def slow(clock: Clock, times: list[float], sharing: bool, proving: bool = False) -> MemoryDriver:
    """A driver whose steps take these times, in turn."""
    driver = SharingDriver(clock) if sharing else MemoryDriver(clock)
    gates = [driver.reading, driver.launching, driver.stopping, driver.applying]
    for number, gate in enumerate(gates):
        make_slow(clock, gate, cycle(times[number::4]))
    if isinstance(driver, SharingDriver) and proving:
        make_slow(clock, driver.proving, cycle(times))
        make_slow(clock, driver.leading, cycle(times[::-1]))
    return driver


def make_slow(clock: Clock, gate: Gate, times: Iterator[float]) -> None:
    async def passed() -> None:
        await deferLater(clock, next(times))

    gate.passed = passed  # type: ignore[method-assign]


class Off(Limiter):
    """The test decides who is off."""

    def __init__(self) -> None:
        self.off = frozenset[str]()
        self.ever = frozenset[str]()

    def install(self, said: Mapping[str, bytes], users: Collection[str]) -> frozenset[str]:
        return self.off

    def follow(self, key: str) -> bool:
        return key in self.off


# Not longer than a test waits.
LIMITS = BackendOptions(drain_timeout=60.0, drain_generations=2)


class ManyAtOnce(SynchronousTestCase):
    @settings(deadline=None, max_examples=3 * settings().max_examples)
    @example([start(), start(), start("a", "ann"), sync_all()], [0.0, 0.0, 0.0, 1.0], False)
    @example([start(), start("a x"), start("a x", "ann"), sync_all()], [0.0, 0.0, 0.0, 0.0, 1.0], False)
    @given(st.lists(STEPS, max_size=50), st.lists(MOMENTS, min_size=4, max_size=20), st.booleans())
    def test_the_last_one_counts(self, steps: list[Step], times: list[float], sharing: bool) -> None:
        """Starts, Stops, syncs and crashes at any time, however long each takes: the last call decides the end state.

        A configuration that failed on probation may have been taken back.
        """
        clock = cast(Any, Clock())
        driver = slow(clock, times, sharing)
        record, generations = MemoryRecord(), Generations()
        runner = make_runner(clock, LogRing(clock, 100), record, generations, nothing, LIMITS)
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
        self.assertEqual((driver.running, clock.getDelayedCalls(), driver.unread), ([], [], []))


class Answer:
    """The reply to a call, if there was one. A reply after the node's death (`late`) reaches no caller."""

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
    """A node from its start to its end, with what an earlier one saved."""

    def __init__(self, times: list[float], record: MemoryRecord, sharing: bool) -> None:
        self.clock = cast(Any, Clock())
        self.driver = slow(self.clock, times, sharing, proving=True)
        self.record = record
        self.runner = make_runner(self.clock, LogRing(self.clock, 100), record, Generations(), nothing, LIMITS)
        self.limiter = Off()
        self.runner.desired.limiter = self.limiter
        if record.request:
            request = Backend.FromString(record.request)
            users = [*record.kept.values()]
            resumed = ensureDeferred(self.runner.resume(self.driver, request, users, lambda: None))
            resumed.addErrback(lambda failure: failure.trap(Aborted))

    def recover(self) -> None:
        """Let nothing fail from now on."""
        self.driver.faults, self.driver.unable, self.driver.unchecked = [], False, None
        for core in self.driver.running:
            core.silent = False
        self.put_off(frozenset())

    def put_off(self, users: frozenset[str]) -> None:
        """Turn off these users and no others, by their limits."""
        self.limiter.off, self.limiter.ever = users, self.limiter.ever | users
        ensureDeferred(self.runner.users.keep_out(users)).addErrback(lambda failure: failure.trap(NodeError))

    def end(self) -> None:
        """End the cores, then the node."""
        ensureDeferred(self.runner.close())
        self.clock.pump([1] * 30)

    def left(self) -> MemoryRecord:
        """What the next node finds if this one dies now."""
        left = MemoryRecord()
        left.request, left.kept = self.record.request, dict(self.record.kept)
        return left

    def act(self, step: Step) -> Deferred[None]:
        """Perform a step; faults, too: a failing next launch, or no answers from the core for some seconds."""
        if step.kind == "fault":
            self.driver.faults.append(CoreFailed("no"))
        elif step.kind == "unchecked":
            self.driver.unchecked = CoreFailed("no") if step.users else InvalidConfig("no")
            self.clock.callLater(STALLS[step.grace], setattr, self.driver, "unchecked", None)
        elif step.kind == "off":
            self.put_off(step.users)
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
# Seconds: less than a call may take, more than that, and long enough for the core to be killed.
STALLS = {0.0: 3.0, 5.0: 8.0, GRACE: 30.0}
TROUBLE = ("crash", "fault", "stall", "unable", "kill", "end", "dear", "unchecked", "overlap", "off")


def steps_of(kinds: Sequence[str], pauses: Sequence[float]) -> st.SearchStrategy[Step]:
    return st.builds(
        Step,
        st.sampled_from(kinds),
        st.sampled_from(["a", "a  ", "a x", "a bad"]),
        st.sampled_from([5.0, 0.0, GRACE]),
        st.frozensets(st.sampled_from(["ann", "bob", "cy"])),
        st.sampled_from(pauses),
    )


# A call, a fault, or a call just as a fault happens.
EVENTS = st.one_of(
    st.tuples(steps_of([*WORDS, *TROUBLE], [0.0, 0.125, 1.0, 7.0])),
    st.tuples(
        steps_of(["start"], [1.0]), steps_of(TROUBLE, [0.0]), steps_of(TROUBLE, [0.0, 0.125]), steps_of(WORDS, [0.0])
    ),
    st.tuples(steps_of(["start"], [1.0]), steps_of(["dear"], [0.0]), *[steps_of(WORDS, [0.0, 0.375, 4.0])] * 3),
)


class Truth(SynchronousTestCase):
    @settings(deadline=None, max_examples=2 * settings().max_examples)
    @example([(replace(start("a", "ann"), pause=1.0), trouble("stall"), start())], [0.0] * 4, False)
    # A run that starts for a user drains when the next one starts for their removal, and has to lose them, too.
    @example(
        [
            tuple(Step(kind, "a", 5.0, frozenset(), pause) for kind, pause in [("start", 1.0), ("start", 0.0)]),
            (
                Step("start", "a", 5.0, frozenset({"ann"}), 1.0),
                Step("dear", "a", 5.0, frozenset(), 0.0),
                Step("add", "a", 5.0, frozenset(), 0.0),
                Step("add", "a", 5.0, frozenset(), 4.0),
                Step("remove", "a", 5.0, frozenset({"ann"}), 0.0),
            ),
        ],
        [0.0, 1.0, 0.0, 2.0],
        True,
    )
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
        """Whatever faults come, in the end disk, memory and core agree, and every call that succeeded is in force."""
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
        # Work that outlasted its caller's patience has to end, too; the next audit comes later than that.
        life.clock.pump([0.5] * 100)
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
            # Users who came during a first Start are lost with it if it fails.
            if wanted is False or (wanted and life.record.request):
                self.assertEqual(name in life.record.kept, wanted, name)
        life.end()
        self.assertEqual((life.driver.running, life.clock.getDelayedCalls()), ([], []))
        self.assertEqual(life.driver.unread, [])

    def another(self, life: Life, orderly: bool, times: list[float], said: list[tuple[Step, Answer]]) -> Life:
        """Replace the node: the old one ends in order or is killed; its late replies reach no caller."""
        if orderly:
            life.end()
        left = life.left()
        for _, answer in said:
            answer.late = True
        if not orderly:
            life.end()
        return Life(times, left, isinstance(life.driver, SharingDriver))

    def is_done(self, _: object, life: Life, said: list[tuple[Step, Answer]], place: int, wrong: list[str]) -> None:
        """A call that succeeded is in force at once, unless another call came meanwhile."""
        word, later = said[place], said[place + 1 :]
        runs, status = life.runner.generations, life.runner.status
        ends = status.state is Status.STARTING or (status.stopped and not life.runner._starts._grace.pending)
        for name in () if ends or word[0].kind == "stop" else ("ann", "bob", "cy"):
            if name in life.limiter.ever or any(concerns(name, step) for step, _ in later):
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
        """No serving run has a removed user, even before the next audit.

        A run that waits for a Start is not ended for a removal that it cannot take.
        """
        for run in () if life.runner._starts._grace.pending else life.runner.generations.serving:
            self.assertLessEqual(run.accounts["a"].items(), life.runner.desired.target["a"].items())

    def say_again(self, life: Life, refusing: bool) -> None:
        """Users whom a new run refused are accepted when they are sent again; all others are in."""
        self.assertEqual(life.driver.running[-1:], [*filter(None, [life.runner.generations.current])])
        for core in () if refusing else life.driver.running[-1:]:
            self.assertEqual(core.accounts, life.runner.desired.target)
        if life.runner.status.running:
            users = list(map(User.FromString, life.record.kept.values()))
            said = ensureDeferred(life.runner.users.update(users))
            life.clock.pump([0.5] * 40)
            self.successResultOf(said)
            self.assertEqual(life.driver.running[-1].accounts, life.runner.desired.target)


def concerns(name: str, step: Step) -> bool:
    """Whether the step concerns the user."""
    return step.kind in ("start", "stop", "sync all") or name in step.users


def last_word(name: str, said: list[tuple[Step, Answer]]) -> bool | None:
    """Whether the user is in, by the last call about them; None if that was refused or not answered."""
    for step, answer in reversed(said):
        if concerns(name, step):
            return (name in step.users and step.kind not in ("stop", "remove")) if answer.good else None
    return None


async def nothing(_: Generation) -> bool:
    """There are no counters."""
    return False
