"""The saved backend, and a node that resumes it."""

from __future__ import annotations

from twisted.internet.defer import Deferred, ensureDeferred

from node.base.errors import (
    CoreFailed,
    InvalidConfig,
    NodeError,
    NotInitialized,
    UsersRefused,
)
from node.contract.saved import Changes
from protos.service_pb2 import Backend, User
from tests.harness.memory import person
from tests.harness.runner import ANN, BOB, CY, GRACE, RunnerTests


class Records(RunnerTests):
    """What a node that is killed at any moment would leave."""

    def kept(self) -> tuple[str, list[str]]:
        return Backend.FromString(self.record.request).config, list(self.record.kept)

    def test_what_was_accepted(self) -> None:
        """The backend that runs, without its users, and each user separately."""
        self.successResultOf(self.start("a,b", ANN, BOB, exclude=("b",)))
        kept = Backend.FromString(self.record.request)
        self.assertEqual((kept.config, list(kept.exclude_inbounds), list(kept.users)), ("a,b", ["b"], []))
        self.assertEqual([User.FromString(packed) for packed in self.record.kept.values()], [ANN, BOB])

    def test_only_what_changed(self) -> None:
        """A sync, an equal Start, one user: unchanged users are not written again."""
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
        """The previous backend stays saved until the new one runs, with its own users, also those changed meanwhile."""
        self.started("a", ANN)
        self.driver.launching.shut = True
        start = self.start("b", person("bob", "two", "b"))
        self.successResultOf(self.sync_user(person("cy", "three", "a", "b")))
        self.assertEqual(self.kept(), ("a", ["ann", "cy"]))
        self.driver.launching.open()
        self.successResultOf(start)
        self.assertEqual(self.kept(), ("b", ["cy", "bob"]))

    def test_a_start_that_fails(self) -> None:
        """What ran before stays saved."""
        self.started("a", ANN)
        self.driver.faults = [CoreFailed("no")]
        self.failureResultOf(self.start("b", BOB), CoreFailed)
        self.successResultOf(self.sync_user(CY))
        self.assertEqual(self.kept(), ("a", ["ann", "cy"]))

    def test_a_set_behind_an_equal_start(self) -> None:
        """A whole set that waited for a Start which takes the core back comes last, on disk as well."""
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
        """The order decides who holds a credential: it is the same on disk."""
        twin = person("zoe", "one", "a")
        self.started("a", ANN, twin)
        self.failureResultOf(self.sync_users(twin, BOB, ANN), UsersRefused)
        self.assertEqual(self.kept(), ("a", ["zoe", "bob", "ann"]))
        self.assertEqual(self.accounts(), {"zoe": b"one", "bob": b"two"})

    def test_forgotten(self) -> None:
        """A Stop deletes the saved backend at once, even with grace; a Start that takes the core back saves it."""
        for grace in (0.0, GRACE):
            self.started("a", ANN, BOB)
            self.stopped(grace)
            self.assertEqual(self.kept(), ("", []))
        self.failureResultOf(self.sync_user(person("bob")), NotInitialized)
        self.successResultOf(self.start("a", ANN))
        self.assertEqual(self.kept(), ("a", ["ann"]))

    def test_the_node_ends(self) -> None:
        """The end of the node is no Stop: the next node resumes."""
        self.started("a", ANN)
        self.successResultOf(ensureDeferred(self.runner.close()))
        self.assertEqual(self.kept(), ("a", ["ann"]))

    def test_an_answer_is_a_promise(self) -> None:
        """A caller is answered when the change is on disk."""
        self.started("a")
        self.record.gate.shut = True
        calls = [self.sync_users(ANN), ensureDeferred(self.runner.users.update([BOB])), self.start("a", ANN)]
        for call in calls:
            self.assertNoResult(call)
        self.record.gate.open()
        for call in calls:
            self.successResultOf(call)

    def test_everything(self) -> None:
        """A disk that lost changes gets everything: the same as by changes."""
        nothing = Changes()
        self.runner.desired.recorder.save(nothing)
        self.assertEqual((nothing.request, nothing.users), (b"", {}))
        self.started("a", ANN)
        self.successResultOf(self.sync_user(BOB))
        everything = Changes()
        self.runner.desired.recorder.save(everything)
        self.assertEqual((everything.request, everything.users), (self.record.request, self.record.kept))


class Resumes(RunnerTests):
    def setUp(self) -> None:
        super().setUp()
        self.resumed: list[str] = []

    def resume(self, config: str = "a", *users: User) -> Deferred[None]:
        saved = [user.SerializeToString() for user in users]
        resumed = self.runner.resume(self.driver, Backend(config=config), saved, lambda: self.resumed.append(config))
        return ensureDeferred(resumed)

    def test_it_runs_again(self) -> None:
        """With its users; an equal Start joins it."""
        self.successResultOf(self.resume("a", ANN))
        self.assertEqual(self.accounts(), {"ann": b"one"})
        self.successResultOf(self.start("a", ANN, BOB))
        self.assertEqual(len(self.driver.cores), 1)

    def prepare(self, config: str, *users: User) -> None:
        saved = [user.SerializeToString() for user in users]
        self.successResultOf(ensureDeferred(self.runner.prepare(self.driver, Backend(config=config), saved)))

    def test_users_change_after_the_preparation(self) -> None:
        """The node before serves until its end: what it has saved then is resumed."""
        self.prepare("a", ANN, BOB, CY)
        self.assertEqual((self.driver.launches, self.record.kept), ([], {}))
        self.successResultOf(self.resume("a", CY, person("ann", "other", "a")))
        self.assertEqual(self.accounts(), {"cy": b"three", "ann": b"other"})
        self.assertEqual([*self.record.kept], ["cy", "ann"])
        self.successResultOf(self.sync_user(person("cy")))
        self.assertEqual(self.accounts(), {"ann": b"other"})

    def test_the_backend_changes_after_the_preparation(self) -> None:
        """Another configuration, a stopped backend, a preparation that fails: nothing of it is used."""
        self.prepare("a", ANN, BOB)
        self.successResultOf(self.resume("b", person("ann", "one", "b")))
        self.assertEqual(self.accounts("b"), {"ann": b"one"})
        self.stopped()
        self.failureResultOf(
            ensureDeferred(self.runner.prepare(self.driver, Backend(config="a bad"), [])), InvalidConfig
        )
        self.successResultOf(self.start("a", ANN))
        self.assertEqual(self.accounts(), {"ann": b"one"})

    def test_users_who_contest_a_credential(self) -> None:
        """The first in stored order holds it, whatever the order was when that was prepared."""
        other = person("bob", "one", "a")
        for before, after in ((ANN, other), (other, ANN)), ((ANN,), (other, ANN)), ((ANN, other), (other, ANN)):
            self.prepare("a", *before)
            self.successResultOf(self.resume("a", *after))
            self.assertEqual(self.accounts(), {after[0].email: b"one"})
            self.tearDown()
            self.setUp()

    def test_tried_again(self) -> None:
        """A core that does not start is retried with backoff; until then users cannot be changed."""
        self.driver.faults = [CoreFailed("no"), CoreFailed("not yet"), CoreFailed("later")]
        self.successResultOf(self.resume("a", ANN))
        self.pass_time(0)
        self.assertEqual(
            (self.runner.status.state, self.runner.status.reason),
            ("failed", "not resumed: not yet; the node tries again"),
        )
        self.failureResultOf(self.sync_users(BOB), CoreFailed)
        self.pass_time(4)
        self.assertEqual((self.runner.status.state, self.accounts()), ("running", {"ann": b"one"}))
        self.assertEqual(self.resumed, ["a"])

    def test_users_wait_for_it(self) -> None:
        """Changes of users wait until it runs, or fails: a user removed meanwhile does not come back later."""
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
        """A configuration that the core does not accept any more is not retried."""
        self.successResultOf(self.resume("a bad", ANN))
        self.pass_time(100)
        self.assertEqual((self.runner.status.state, self.driver.launches), ("failed", []))

    def test_a_start_that_fails_meanwhile(self) -> None:
        """It does not end the retries, and `reason` says so."""
        for fault in (CoreFailed("it fell"), InvalidConfig("it is odd")):
            self.driver.faults = [CoreFailed("no"), CoreFailed("no"), CoreFailed("not yet")]
            self.successResultOf(self.resume("a", ANN))
            self.pass_time(1)
            self.assertEqual((self.runner.status.state, self.driver.faults), ("failed", []))
            self.failureResultOf(self.start("b bad", BOB), InvalidConfig)
            self.driver.faults = [fault]
            self.failureResultOf(self.start("b", BOB), NodeError)
            self.assertEqual(self.runner.status.state, "failed")
            self.assertIn("the node tries again", self.runner.status.reason)
            self.pass_time(4)
            self.assertEqual((self.runner.status.state, self.accounts()), ("running", {"ann": b"one"}))
            self.tearDown()
            self.setUp()

    def test_a_controller_is_faster(self) -> None:
        """A Start ends the retries, and so does a Stop."""
        for act in (lambda: self.start("b", BOB), self.stop):
            self.driver.faults = [CoreFailed("no")] * 2
            self.successResultOf(self.resume("a", ANN))
            self.pass_time(0)
            self.successResultOf(act())
            before = len(self.driver.cores)
            self.pass_time(100)
            self.assertEqual((len(self.driver.cores), self.resumed), (before, []))
            self.stopped()
