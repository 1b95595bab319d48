"""Questions to the core, such as who is online: to the runs that serve, while runs come and go."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from twisted.internet.defer import Deferred, ensureDeferred
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from drivers.pretended.scripted import MemoryDriver, MemoryGeneration, SharingDriver
from node.api.auth import Dialect
from node.api.calls import Call
from node.api.methods import METHODS
from node.backend import drain
from node.backend.health import LIVES
from node.base.errors import CoreFailed, NotInitialized, NotStarted
from node.base.logs import LogRing
from node.contract.saved import Saved
from protos import service_pb2
from protos.service_pb2 import Empty, StatRequest, User
from tests.harness.memory import person
from tests.harness.whole import Whole
from tests.node.engine.test_keep_alive import Kept

ANN, BOB = person("ann", "one", "a"), person("bob", "two", "a")
CALL = Call(METHODS[0], Dialect.DOCUMENT)


class QuestionTests(SynchronousTestCase):
    kind: type[MemoryDriver] = SharingDriver

    def setUp(self) -> None:
        self.clock = cast(Any, Clock())
        self.driver = self.kind(self.clock)
        self.patch(drain, "available", lambda: 1 << 40)
        store, ring = cast(Any, Kept()), LogRing(self.clock, 1000)
        self.backend = Whole(self.clock, ring, {0: self.driver}, store)
        self.backend.begin(Saved())

    def tearDown(self) -> None:
        for gate in (self.driver.launching, self.driver.asking):
            gate.open()
        closed = ensureDeferred(self.backend.close())
        self.clock.pump([1] * 10)
        self.successResultOf(closed)
        self.assertEqual((self.driver.running, self.clock.getDelayedCalls()), ([], []))

    def start(self, config: str, *users: User) -> Deferred[Any]:
        return ensureDeferred(self.backend.start(service_pb2.Backend(config=config, users=users), CALL))

    def started(self, config: str, *users: User) -> MemoryGeneration:
        """A run that is identified by its uptime and its users' address."""
        self.successResultOf(self.start(config, *users))
        core = self.driver.cores[-1]
        core.uptime = len(self.driver.cores)
        core.addresses = {f"10.0.0.{core.uptime}": 1}
        return core

    def stats(self) -> Deferred[Any]:
        return ensureDeferred(self.backend.backend_stats(Empty(), CALL))

    def online(self, name: str = "ann") -> Deferred[Any]:
        return ensureDeferred(self.backend.online_ips(StatRequest(name=name), CALL))

    def count(self) -> Deferred[Any]:
        return ensureDeferred(self.backend.online(StatRequest(name="ann"), CALL))

    def meanwhile(self, *questions: Callable[[], Deferred[Any]]) -> list[Deferred[Any]]:
        """Start the questions, and return while they are under way."""
        self.driver.asking.shut = True
        return [question() for question in questions]

    def addresses(self, asked: Deferred[Any]) -> set[str]:
        return set(self.successResultOf(asked).ips)


class Replaced(QuestionTests):
    def test_a_run_that_is_replaced_meanwhile(self) -> None:
        """If the old run no longer answers, the new one does."""
        old = self.started("a", ANN)
        stats, online, count = self.meanwhile(self.stats, self.online, self.count)
        new = self.started("a x", ANN)
        old.die()
        self.driver.asking.open()
        self.assertEqual(self.successResultOf(stats).uptime, new.uptime)
        self.assertEqual(self.addresses(online), set(new.addresses))
        self.assertEqual(self.successResultOf(count).value, 1)

    def test_a_draining_run_that_does_not_answer(self) -> None:
        """Figures of the core do not depend on it."""
        old = self.started("a", ANN)
        [stats] = self.meanwhile(self.stats)
        new = self.started("a x", ANN)
        old.silent = True
        self.driver.asking.open()
        self.assertEqual(self.successResultOf(stats).uptime, new.uptime)

    def test_both_are_there(self) -> None:
        """Connections to both runs count, also if the new one came while the old one was asked."""
        old = self.started("a", ANN)
        [online] = self.meanwhile(self.online)
        new = self.started("a x", ANN)
        self.driver.asking.open()
        self.assertEqual(self.addresses(online), {*old.addresses, *new.addresses})

    def test_a_draining_run_that_ends(self) -> None:
        """The connections of a run that has ended do not count."""
        old, new = self.started("a", ANN), self.started("a x", ANN)
        online, count = self.meanwhile(self.online, self.count)
        # The current run answers, and then the other one is asked.
        self.driver.asking.let_through()
        old.die()
        self.driver.asking.open()
        self.assertEqual(self.addresses(online), set(new.addresses))
        self.assertEqual(self.successResultOf(count).value, 1)


class Gone(QuestionTests):
    def test_the_only_one(self) -> None:
        """The error says that another run is being started."""
        core = self.started("a", ANN)
        asked = self.meanwhile(self.stats, self.online, self.count)
        self.driver.launching.shut = True
        core.die()
        self.driver.asking.open()
        for question in asked:
            self.failureResultOf(question, NotStarted)

    def test_an_end_that_is_known_later(self) -> None:
        """Calls to a killed core fail before its end is known."""
        core = self.started("a", ANN)
        asked = self.meanwhile(self.stats, self.online)
        core.silent = True
        self.driver.asking.open()
        self.clock.advance(LIVES / 2)
        for question in asked:
            self.assertNoResult(question)
        core.die()
        self.clock.pump([0.125, 0.125, 0.125])
        new = self.driver.cores[-1]
        self.assertEqual(self.successResultOf(asked[0]).uptime, new.uptime)
        self.assertEqual(self.addresses(asked[1]), set(new.addresses))

    def test_stopped(self) -> None:
        self.started("a", ANN)
        asked = self.meanwhile(self.stats, self.online)
        stopped = ensureDeferred(self.backend.stop(Empty(), CALL))
        self.clock.pump([0.5] * 6)
        self.successResultOf(stopped)
        self.driver.asking.open()
        for question in asked:
            self.failureResultOf(question, NotInitialized)

    def test_a_living_run_that_fails(self) -> None:
        """The error of a run that lives is reported unchanged."""
        core = self.started("a", ANN)
        core.silent = True
        asked = [self.stats(), self.online(), self.count()]
        self.clock.pump([0.125] * int(8 * (LIVES + 1)))
        for question in asked:
            self.failureResultOf(question, CoreFailed)


class WhileStarting(QuestionTests):
    def starting(self, *users: User) -> Deferred[Any]:
        self.driver.launching.shut = True
        starting = self.start("a x", *users)
        self.assertNoResult(starting)
        info = self.successResultOf(ensureDeferred(self.backend.info(Empty(), CALL)))
        self.assertEqual(info.state, "starting")
        return starting

    def test_the_old_run_answers(self) -> None:
        """During a Start the old run serves all users, and controllers see no outage."""
        old = self.started("a", ANN)
        starting = self.starting(BOB)
        self.assertEqual(self.successResultOf(self.stats()).uptime, old.uptime)
        for name in ("ann", "bob"):
            self.assertEqual(self.addresses(self.online(name)), set(old.addresses))
        self.driver.launching.open()
        self.successResultOf(starting)

    def test_it_dies(self) -> None:
        """No run serves then."""
        old = self.started("a", ANN)
        starting = self.starting(ANN)
        old.die()
        for question in (self.stats(), self.online()):
            self.failureResultOf(question, NotStarted)
        self.driver.launching.open()
        self.successResultOf(starting)

    def test_the_first(self) -> None:
        starting = self.starting(ANN)
        self.failureResultOf(self.stats(), NotStarted)
        self.driver.launching.open()
        self.successResultOf(starting)


class WhileRestarting(QuestionTests):
    """While a core that cannot share its listeners restarts."""

    kind = MemoryDriver

    def test_no_run_serves(self) -> None:
        """The old run has ended for the new one."""
        self.started("a", ANN)
        asked = self.meanwhile(self.stats, self.online)
        self.driver.launching.shut = True
        starting = self.start("a x", ANN)
        self.clock.pump([0.5] * 6)
        self.driver.asking.open()
        for question in (*asked, self.stats(), self.online()):
            self.failureResultOf(question, NotStarted)
        self.driver.launching.open()
        self.successResultOf(starting)
