"""Routing changes while a core runs: later runs have them, whatever happens in between."""

from __future__ import annotations

from collections.abc import Collection, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

from twisted.internet.defer import Deferred, ensureDeferred
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from drivers.pretended.scripted import Gate, MemoryDriver, MemoryGeneration, MemoryPlan, SharedGeneration, SharingDriver
from node.backend import routing
from node.backend.health import AUDIT
from node.backend.options import BackendOptions
from node.backend.runner import Runner
from node.backend.wind_down import CALLER
from node.base.errors import (
    CoreFailed,
    InvalidConfig,
    InvalidRequest,
    NotInitialized,
    NotStarted,
    UnknownName,
    Unsupported,
)
from node.base.logs import LogRing
from node.contract.driver import Generation, Plan
from node.contract.generations import Generations
from node.contract.routing import Routing
from protos import service_pb2 as pb
from protos.service_pb2 import Backend
from tests.harness.memory import MemoryRecord, person
from tests.harness.whole import make_runner

GRACE = 30.0


@dataclass(frozen=True)
class RoutingPlan(MemoryPlan):
    """Its rules are the texts of the added ones, which are also their tags; it has a balancer `b`."""

    routing: Routing = field(default_factory=Routing)
    balancers: Collection[str] = ("b",)

    @property
    def rule_tags(self) -> Collection[str]:
        return [rule.tag for rule in self.routing.added]

    async def rerouted(self, routing: Routing) -> RoutingPlan:
        await cast(RoutingDriver, self.driver).converting.passed()
        if any(rule.text == "bad" for rule in routing.added):
            raise InvalidConfig("no rule")
        return replace(self, routing=replace(routing, added=tuple(r._replace(tag=r.text) for r in routing.added)))


class RoutingGeneration(SharedGeneration):
    """`has` is its routing, `fault` the error of changes to it."""

    def __init__(self, clock: Clock, plan: MemoryPlan, *others: Any) -> None:
        super().__init__(clock, plan, *others)
        self.has = cast(RoutingPlan, plan).routing
        self.fault: Exception | None = None

    @property
    def tags(self) -> list[str]:
        return [rule.tag for rule in self.has.added]

    async def reroute(self, plan: Plan) -> None:
        await cast(RoutingDriver, self.driver).routing.passed()
        if self.fault:
            raise self.fault
        self.has = cast(RoutingPlan, plan).routing

    async def rules(self) -> Sequence[pb.RoutingRule]:
        return []

    async def balancer(self, tag: str) -> pb.BalancerInfoResponse:
        return pb.BalancerInfoResponse()

    async def test_route(self, request: pb.TestRouteRequest) -> pb.RouteResult:
        return pb.RouteResult()


class RoutingDriver(SharingDriver):
    kind: type[MemoryGeneration] = RoutingGeneration

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock)
        self.converting, self.routing = Gate(), Gate()

    def require_room(self) -> None:
        """Two runs may be there at once."""

    async def prepare(self, config_text: str, exclude: frozenset[str]) -> MemoryPlan:
        plan = await super().prepare(config_text, exclude)
        return RoutingPlan(plan.config, plan.tags, plan.driver)


async def nothing_moves(_: Generation) -> bool:
    return False


class RoutingTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.clock = cast(Any, Clock())
        self.driver = RoutingDriver(self.clock)
        self.record = MemoryRecord()
        self.generations = Generations()
        self.runner = self.node()

    def node(self, upgrade: bool = False) -> Runner:
        ring = LogRing(self.clock, 1000)
        options = BackendOptions(upgrade=upgrade)
        return make_runner(self.clock, ring, self.record, self.generations, nothing_moves, options)

    def tearDown(self) -> None:
        for gate in (self.driver.converting, self.driver.routing, self.driver.launching):
            gate.open()
        closed = ensureDeferred(self.runner.close())
        self.pass_time(2 * CALLER.answer + 1)
        self.successResultOf(closed)
        self.assertEqual(self.clock.getDelayedCalls(), [])

    def pass_time(self, seconds: float) -> None:
        for _ in range(int(seconds * 8)):
            self.clock.advance(0.125)

    def begin(self, work: Coroutine[Any, Any, Any]) -> Deferred[Any]:
        return ensureDeferred(work)

    def start(self, config: str = "a one", driver: MemoryDriver | None = None) -> Deferred[Any]:
        backend = Backend(config=config, users=[person("ann", "one", "a")])
        return self.begin(self.runner.start(driver or self.driver, backend))

    def started(self, config: str = "a one") -> RoutingGeneration:
        waiting = self.start(config)
        self.pass_time(1)
        self.successResultOf(waiting)
        return self.core

    @property
    def core(self) -> RoutingGeneration:
        return cast(RoutingGeneration, self.generations.current)

    def add(self, text: str, reset: bool = False) -> Deferred[Any]:
        return self.begin(self.runner.router.add(text, reset))

    def added(self, *texts: str) -> None:
        for text in texts:
            self.successResultOf(self.add(text))

    def recorded(self) -> list[str]:
        return [rule.text for rule in Routing.unpack(self.record.changes).added]

    def test_it_is_in_force_and_recorded(self) -> None:
        self.started()
        self.added("x", "y")
        self.assertEqual((self.core.tags, self.recorded()), (["x", "y"], ["x", "y"]))
        self.successResultOf(self.begin(self.runner.router.remove("x")))
        self.successResultOf(self.begin(self.runner.router.lead("b", "out")))
        self.assertEqual((self.core.tags, self.core.has.targets), (["y"], {"b": "out"}))
        self.successResultOf(self.add("z", reset=True))
        self.assertEqual((self.core.tags, self.core.has.cleared), (["z"], True))
        self.assertEqual(Routing.unpack(self.record.changes), self.core.has)

    def test_what_is_refused_changes_nothing(self) -> None:
        """A change refused by the driver or by the core, and names that do not exist."""
        self.started()
        self.added("x")
        self.failureResultOf(self.add("bad"), InvalidConfig)
        self.core.fault = InvalidConfig("no")
        self.failureResultOf(self.add("y"), InvalidConfig)
        self.failureResultOf(self.begin(self.runner.router.lead("c", "")), UnknownName)
        self.failureResultOf(self.begin(self.runner.router.remove("")), InvalidRequest)
        self.successResultOf(self.begin(self.runner.router.remove("gone")))
        self.core.die()
        self.pass_time(1)
        self.assertEqual((self.core.tags, self.recorded()), (["x"], ["x"]))

    def test_a_crash(self) -> None:
        before = self.started()
        self.added("x")
        before.die()
        self.pass_time(1)
        self.assertIsNot(self.core, before)
        self.assertEqual(self.core.tags, ["x"])

    def test_a_rule_that_ends_the_core(self) -> None:
        """The next core does not have it."""
        core = self.started()
        core.fault = CoreFailed("it is gone")
        self.driver.routing.shut = True
        waiting = self.add("x")
        core.die()
        self.driver.routing.open()
        self.failureResultOf(waiting, CoreFailed)
        self.pass_time(1)
        self.assertEqual((self.core.tags, self.recorded()), ([], []))

    def test_a_core_that_does_not_answer_in_time(self) -> None:
        """It has the rule when it answers."""
        core = self.started()
        core.fault = CoreFailed("no answer")
        self.failureResultOf(self.add("x"), CoreFailed)
        core.fault = None
        self.assertEqual((core.tags, self.recorded()), ([], ["x"]))
        self.pass_time(AUDIT + 1)
        self.assertEqual(core.tags, ["x"])

    def test_a_rule_that_the_core_breaks_over(self) -> None:
        """The rule is checked first, in a process of its own."""
        core = self.started("a unbuildable")
        self.failureResultOf(self.add("x"), InvalidConfig)
        self.assertTrue(core.alive)
        self.assertEqual((core.tags, self.recorded()), ([], []))

    def test_a_core_that_hangs(self) -> None:
        """An added rule may be to blame; a removed one is not: it may be gone already."""
        core = self.started()
        self.added("x")
        core.fault, core.silent = CoreFailed("no answer"), True
        router = self.runner.router
        for work, left in (
            (router.add("y", reset=False), ["x"]),
            (router.lead("b", "out"), ["x"]),
            (router.remove("x"), []),
        ):
            waiting = self.begin(work)
            self.pass_time(routing.ANSWER + 1)
            self.failureResultOf(waiting, CoreFailed)
            self.assertEqual(self.recorded(), left)
        self.assertEqual(Routing.unpack(self.record.changes).targets, {"b": "out"})

    def test_starts(self) -> None:
        """An equal Start keeps it, so does one that fails; another backend has its own."""
        core = self.started()
        self.added("x")
        self.assertIs(self.started(), core)
        self.failureResultOf(self.start("a bad"), InvalidConfig)
        self.assertEqual((self.core.tags, self.recorded()), (["x"], ["x"]))
        self.assertEqual((self.started("a other").tags, self.recorded()), ([], []))

    def test_an_equal_start_that_takes_another_core(self) -> None:
        """An equal Start that comes while there is no core."""
        core = self.started()
        self.added("x")
        self.driver.faults = [CoreFailed("not yet")]
        core.die()
        self.pass_time(0.5)
        self.assertEqual(self.started().tags, ["x"])

    def test_stops(self) -> None:
        """A core that is taken back still has it; after its end nothing is left."""
        core = self.started()
        self.added("x")
        self.successResultOf(self.begin(self.runner.stop("a panel asked for it", GRACE)))
        self.failureResultOf(self.add("y"), NotInitialized)
        self.assertIs(self.started(), core)
        self.assertEqual((core.tags, self.recorded()), (["x"], ["x"]))
        stopping = self.begin(self.runner.stop("a controller asked for it"))
        self.pass_time(2 * CALLER.answer + 1)
        self.successResultOf(stopping)
        self.assertEqual(self.started().tags, [])

    def test_the_next_node(self) -> None:
        """The backend that it resumes has it, now or later."""
        changed = Routing().adding("x", "1")
        self.driver.faults = [CoreFailed("not yet")]
        backend = Backend(config="a one")
        waiting = self.begin(self.runner.resume(self.driver, backend, (), lambda: None, changed))
        self.pass_time(3)
        self.successResultOf(waiting)
        self.assertEqual((self.core.tags, self.recorded()), (["x"], ["x"]))

    def test_a_start_meanwhile(self) -> None:
        """One after the other, in the order in which they came."""
        self.started()
        self.driver.converting.shut = True
        adding = self.add("x")
        starting = self.start("a other")
        self.driver.converting.open()
        self.pass_time(1)
        self.successResultOf(adding)
        self.successResultOf(starting)
        self.assertEqual((self.core.tags, self.recorded()), ([], []))

    def test_a_crash_meanwhile(self) -> None:
        """A crash while the rule is checked: nothing of it is in force."""
        core = self.started()
        self.driver.converting.shut = True
        adding = self.add("x")
        core.die()
        self.driver.converting.open()
        self.failureResultOf(adding, NotStarted)
        self.pass_time(1)
        self.assertEqual((self.core.tags, self.recorded()), ([], []))

    def test_a_run_that_comes_in_meanwhile(self) -> None:
        """A run that was launched for users before the rule came gets it at once."""
        before = self.started()
        self.driver.dear = lambda _: True
        self.driver.launching.shut = True
        changing = self.begin(self.runner.users.update([person("bob", "two", "a")]))
        self.pass_time(1)
        adding = self.add("x")
        self.driver.launching.open()
        self.pass_time(1)
        self.successResultOf(changing)
        self.successResultOf(adding)
        self.assertIsNot(self.core, before)
        self.assertEqual(self.core.tags, ["x"])

    def test_a_run_that_comes_in_while_the_core_hangs(self) -> None:
        """The new run started with the rule and serves: the rule is not to blame."""
        before = self.started()
        self.driver.dear = lambda _: True
        self.driver.routing.shut = True
        adding = self.add("x")
        changing = self.begin(self.runner.users.update([person("bob", "two", "a")]))
        self.pass_time(1)
        self.successResultOf(changing)
        self.assertIsNot(self.core, before)
        before.fault, before.silent = CoreFailed("no answer"), True
        self.driver.routing.open()
        self.pass_time(routing.ANSWER + 1)
        self.failureResultOf(adding, CoreFailed)
        self.assertEqual((self.core.tags, self.recorded()), (["x"], ["x"]))

    def test_the_way_back(self) -> None:
        """The previous run, when it serves again, has the changes made meanwhile."""
        before = self.started()
        self.driver.dear = lambda _: True
        changing = self.begin(self.runner.users.update([person("bob", "two", "a")]))
        self.pass_time(1)
        self.successResultOf(changing)
        after = self.core
        self.assertIsNot(after, before)
        self.added("x")
        self.assertEqual(before.tags, [])
        # A new run is to come for the user who came with the failed one.
        self.driver.launching.shut = True
        after.die()
        self.pass_time(0.5)
        self.assertIs(self.core, before)
        self.assertEqual(before.tags, ["x"])

    def test_the_way_back_from_another_core(self) -> None:
        """A run of the same configuration, which an equal Start replaced."""
        self.generations = Generations()
        self.runner = self.node(upgrade=True)
        before = self.started()
        self.added("x")
        before.outdated = True
        after = self.started()
        self.assertIsNot(after, before)
        self.added("y")
        self.successResultOf(self.begin(self.runner.router.remove("x")))
        after.die()
        self.pass_time(0.5)
        self.assertIs(self.core, before)
        self.assertEqual((before.tags, self.recorded()), (["y"], ["y"]))
        self.added("z")
        self.assertEqual((before.tags, self.recorded()), (["y", "z"], ["y", "z"]))

    def test_the_way_back_from_another_configuration(self) -> None:
        """It has the rules that it had, and none of the other."""
        before = self.started()
        self.added("x")
        after = self.started("a other")
        self.added("y")
        after.die()
        self.pass_time(0.5)
        self.assertIs(self.core, before)
        self.assertEqual((before.tags, self.recorded()), (["x"], ["x"]))

    def test_how_many(self) -> None:
        self.patch(routing, "MOST", 2)
        self.started()
        self.added("a", "b")
        self.failureResultOf(self.add("x"), InvalidRequest)
        self.successResultOf(self.add("x", reset=True))
        self.patch(routing, "MOST_TEXT", 5)
        self.failureResultOf(self.add("x" * 5), InvalidRequest)

    def test_a_core_that_cannot(self) -> None:
        waiting = self.start(driver=SharingDriver(self.clock))
        self.pass_time(1)
        self.successResultOf(waiting)
        for work in (self.runner.router.add("x", False), self.runner.router.remove("x")):
            self.failureResultOf(self.begin(work), Unsupported)
        self.failureResultOf(self.begin(self.runner.router.lead("b", "x")), Unsupported)
