"""The registry of runs: current, draining and ending ones, and what happens to each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

from hypothesis import given
from hypothesis import strategies as st
from twisted.internet.defer import Deferred, ensureDeferred
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from drivers.pretended.scripted import Gate, MemoryDriver, MemoryGeneration, MemoryPlan
from node.backend.wind_down import CALLER, WindDown
from node.base.errors import UsersRefused
from node.base.logs import LogRing
from node.contract.driver import Generation
from node.contract.generations import Follower, Generations
from protos.service_pb2 import Backend, User
from tests.harness.memory import MemoryRecord, person
from tests.harness.whole import make_runner


def core(clock: Clock | None = None, stopping: Gate | None = None) -> MemoryGeneration:
    return MemoryGeneration(clock or Clock(), MemoryPlan("a", ("a",)), {"a": {}}, stopping or Gate())


class Moved(Follower):
    """Calls `told` whenever a run is in another stage."""

    def __init__(self, told: Callable[[], object]) -> None:
        self.moved = told  # type: ignore[assignment,method-assign]


class GenerationsTests(SynchronousTestCase):
    def test_the_life_of_one(self) -> None:
        """A run serves and counts, then drains, then only counts, then it is gone."""
        generations, one, other = Generations(), core(), core()
        generations.adopt(one)
        self.assertEqual((generations.current, generations.serving, generations.counting), (one, (one,), (one,)))
        generations.adopt(other)
        self.assertEqual((generations.current, generations.draining), (other, (one,)))
        self.assertEqual((generations.serving, generations.counting), ((other, one), (other, one)))
        generations.end(one)
        self.assertEqual((generations.serving, generations.counting), ((other,), (other, one)))
        self.assertFalse(generations.gone(one))
        self.assertEqual(generations.counting, (other,))

    def test_one_that_dies(self) -> None:
        """A run that dies while it serves has crashed."""
        generations, one, other = Generations(), core(), core()
        generations.adopt(one)
        generations.adopt(other)
        self.assertTrue(generations.gone(other))
        self.assertTrue(generations.gone(one))
        self.assertFalse(generations.gone(one))
        self.assertEqual((generations.current, generations.counting), (None, ()))

    def test_taken_back(self) -> None:
        """A draining run may become the current one again; the previous one drains then."""
        generations, one, other = Generations(), core(), core()
        generations.adopt(one)
        generations.adopt(other)
        generations.adopt(one)
        self.assertEqual((generations.current, generations.draining), (one, (other,)))

    def test_one_takes_over(self) -> None:
        """A takeover is one change: watchers never see a moment without a current run."""
        generations, one, other, told = Generations(), core(), core(), list[Generation | None]()
        generations.adopt(one)
        generations.follow(Moved(lambda: told.append(generations.current)))
        generations.adopt(other)
        self.assertEqual(told, [other])

    def test_watchers(self) -> None:
        """Watchers are called after each change of a run's stage."""
        generations, one, told = Generations(), core(), list[int]()
        generations.follow(Moved(lambda: told.append(len(generations.counting))))
        generations.adopt(one)
        generations.end(one)
        generations.end(one)
        generations.gone(one)
        generations.gone(one)
        self.assertEqual(told, [1, 1, 0])


@given(st.lists(st.tuples(st.sampled_from(["adopt", "retire", "end", "gone"]), st.integers(0, 4))))
def test_each_is_in_one_place(steps: list[tuple[str, int]]) -> None:
    """Whatever is done, no run is in two stages, and one that is gone is in none."""
    generations, cores = Generations(), [core() for _ in range(5)]
    for name, number in steps:
        if name == "retire":
            generations.retire()
        else:
            getattr(generations, name)(cores[number])
        if name == "gone":
            assert cores[number] not in generations.counting
        assert len(generations.counting) == len(set(generations.counting))
        assert generations.counting[: len(generations.serving)] == generations.serving
        assert (generations.current is None) or generations.serving[0] is generations.current


class TwoCores(SynchronousTestCase):
    """A backend with a draining core beside the current one."""

    def setUp(self) -> None:
        self.clock = cast(Any, Clock())
        self.driver = MemoryDriver(self.clock)
        self.generations = Generations()
        self.moving: set[Generation] = set()
        self.read: list[Generation] = []
        self.runner = make_runner(self.clock, LogRing(self.clock, 100), MemoryRecord(), self.generations, self._count)
        request = Backend(config="a", users=[person("ann", "one", "a")])
        self.successResultOf(ensureDeferred(self.runner.start(self.driver, request)))
        [self.old] = self.driver.running
        self.new = MemoryGeneration(self.clock, self.old.plan, self.old.accounts, self.driver.stopping)
        self.runner.supervisor._adopt(self.new)

    def tearDown(self) -> None:
        self.moving.clear()
        self.driver.stopping.open()
        closed = ensureDeferred(self.runner.close())
        self.clock.pump([0.125] * 40)
        self.successResultOf(closed)
        self.assertEqual((self.driver.running, self.new.alive, self.clock.getDelayedCalls()), ([], False, []))

    async def _count(self, generation: Generation) -> bool:
        self.read.append(generation)
        return generation in self.moving

    def test_the_current_one_dies(self) -> None:
        """It is restarted, and the state says so; the draining one is not mistaken for it."""
        self.driver.launching.shut = True
        self.new.die()
        self.clock.pump([0.0])
        self.assertEqual((self.runner.status.state, self.generations.current), ("restarting", None))
        self.driver.launching.open()
        self.clock.pump([0.0])
        self.assertEqual(self.runner.status.state, "running")
        self.assertIsNot(self.generations.current, self.old)

    def test_the_draining_one_dies(self) -> None:
        """That costs its connections, and nothing else."""
        self.old.die()
        self.clock.pump([0.0])
        self.assertEqual((self.runner.status.state, self.generations.serving), ("running", (self.new,)))

    def test_a_stop(self) -> None:
        """A Stop ends both in parallel, and returns when both are gone."""
        self.driver.stopping.shut = True
        stopped = ensureDeferred(self.runner.stop("asked"))
        self.assertEqual((self.old.wound_down, self.new.wound_down), (True, True))
        self.assertEqual(self.generations.serving, ())
        self.assertNoResult(stopped)
        self.driver.stopping.open()
        self.successResultOf(stopped)

    def users(self, *users: User) -> Deferred[None]:
        return ensureDeferred(self.runner.users.replace(users))

    def test_a_removed_user(self) -> None:
        """A removed user is out of every run, by one call, a partial update or a whole set; so is an old credential."""
        ann, bob = person("ann", "one", "a"), person("bob", "two", "a")

        async def by_himself() -> None:
            touched, _ = await self.runner.users.put(person("bob"))
            await self.runner.users.settle(touched)

        ways: dict[str, Callable[[], Deferred[None]]] = {
            "by himself": lambda: ensureDeferred(by_himself()),
            "with others": lambda: ensureDeferred(self.runner.users.update([person("bob")])),
            "missing in a set": lambda: self.users(ann),
            "another credential": lambda: self.users(ann, person("bob", "new", "a")),
        }
        for name, remove in ways.items():
            self.successResultOf(self.users(ann, bob))
            self.old.accounts["a"]["bob"] = b"two"
            self.successResultOf(remove())
            self.assertEqual(self.old.accounts, {"a": {"ann": b"one"}}, name)
            self.assertEqual(self.new.accounts, self.runner.desired.target, name)

    def test_another_spelling(self) -> None:
        """A user whose e-mail changes only in spelling keeps their connections to a draining core."""
        self.patch(MemoryPlan, "same_credential", lambda _, one, other: one.lower() == other.lower())
        self.successResultOf(self.users(person("ann", "ONE", "a")))
        self.assertEqual((self.old.accounts["a"], self.new.accounts["a"]), ({"ann": b"one"}, {"ann": b"ONE"}))

    def test_a_new_user(self) -> None:
        """A new user is let in by the current run only: draining ones get no new connections."""
        self.successResultOf(self.users(person("ann", "one", "a"), person("cy", "three", "a")))
        self.assertEqual((set(self.old.accounts["a"]), set(self.new.accounts["a"])), ({"ann"}, {"ann", "cy"}))

    def test_one_of_another_configuration(self) -> None:
        """A draining run of another configuration keeps wanted users, whatever its inbounds are called now."""
        self.old.accounts = {"old": {"ann": b"one", "bob": b"two"}}
        self.old.plan = replace(self.old.plan, tags=("old",))
        self.successResultOf(self.users(person("ann", "one", "a")))
        self.assertEqual(self.old.accounts, {"old": {"ann": b"one"}})

    def test_one_that_keeps_a_removed_user(self) -> None:
        """A draining run that does not remove a user is ended; the current one and its users are not affected."""
        self.driver.dear = lambda change: change.key == "ann" and self.old.alive
        done = self.users()
        self.clock.pump([0.125] * 8)
        self.successResultOf(done)
        self.assertEqual((self.old.alive, self.new.alive), (False, True))
        self.assertEqual(self.runner.status.state, "running")

    def test_one_that_does_not_answer(self) -> None:
        """The caller gets an error, the current run is changed all the same, and this one when it answers."""
        self.old.silent = True
        done = self.users()
        self.clock.pump([0.125] * 60)
        self.failureResultOf(done, UsersRefused)
        self.assertEqual(self.new.accounts, {"a": {}})
        self.old.silent = False
        self.clock.pump([0.125] * 8)
        self.assertEqual(self.old.accounts, {"a": {}})

    def test_an_end_waits_for_its_own_counters(self) -> None:
        """A run's end waits for its own counters, for a while, but not for other runs."""
        self.moving.add(self.new)
        self.successResultOf(self.end(self.old))
        self.assertEqual((self.old.alive, self.read), (False, [self.old]))
        ended = self.end(self.new)
        self.assertNoResult(ended)
        self.clock.pump([0.125] * int(8 * CALLER.rest + 1))
        self.successResultOf(ended)

    def end(self, generation: MemoryGeneration) -> Deferred[None]:
        reactor: Any = self.clock
        return ensureDeferred(WindDown(reactor, self.generations, self._count, self.runner.journal).end(generation))
