"""ListUsers: the wanted users, what the core has confirmed, and why a user is not in."""

from __future__ import annotations

from typing import Any, cast

from twisted.internet.defer import Deferred, ensureDeferred
from twisted.internet.task import Clock
from twisted.python.threadpool import ThreadPool
from twisted.trial.unittest import SynchronousTestCase

from drivers.pretended.scripted import MemoryDriver, MemoryGeneration, SharingDriver
from node.api.auth import Dialect
from node.api.calls import Call
from node.api.methods import METHODS
from node.backend import drain, listing
from node.backend.options import BackendOptions
from node.base.errors import InvalidRequest, UsersRefused
from node.base.logs import LogRing
from node.contract.accounts import key_of
from node.contract.counters import DIRECTIONS, SEPARATOR, counter_name
from node.contract.counters import Scope as Counted
from node.contract.saved import Saved
from node.engine.options import EngineOptions
from node.keys.keyfile import Scope
from protos import service_pb2 as pb
from protos.service_pb2 import ListedUser, ListUsersRequest, ListUsersResponse, User
from tests.harness.memory import person
from tests.harness.whole import Whole
from tests.node.engine.test_keep_alive import Kept

LIST = next(method for method in METHODS if method.name == "ListUsers")
ALL, READ = (Call(LIST, Dialect.DOCUMENT, scope) for scope in (Scope.ALL, Scope.READ))
ANN, BOB = person("Ann", "one", "a"), person("bob", "two", "a", "b", "elsewhere")


class Inline:
    """A thread pool that works at once."""

    def callInThreadWithCallback(self, done: Any, work: Any, *arguments: Any, **named: Any) -> None:
        done(True, work(*arguments, **named))


class PooledClock(Clock):
    def getThreadPool(self) -> ThreadPool:
        return cast(ThreadPool, Inline())

    def callFromThread(self, function: Any, *arguments: Any) -> None:
        function(*arguments)


class ListingCase(SynchronousTestCase):
    kind: type[MemoryDriver] = SharingDriver
    saved = Saved()
    options = EngineOptions()

    def setUp(self) -> None:
        self.clock = cast(Any, PooledClock())
        self.driver = self.kind(self.clock)
        self.patch(drain, "available", lambda: 1 << 40)
        store, ring = cast(Any, Kept()), LogRing(self.clock, 1000)
        self.backend = Whole(self.clock, ring, {0: self.driver}, store, self.options)
        self.backend.begin(self.saved)

    def tearDown(self) -> None:
        for gate in (self.driver.launching, self.driver.applying):
            gate.open()
        closed = ensureDeferred(self.backend.close())
        self.clock.pump([1] * 10)
        self.successResultOf(closed)

    def start(self, config: str, *users: User) -> Deferred[Any]:
        return ensureDeferred(self.backend.start(pb.Backend(config=config, users=users), ALL))

    def started(self, config: str, *users: User) -> MemoryGeneration:
        self.successResultOf(self.start(config, *users))
        return self.driver.cores[-1]

    def sync(self, *users: User) -> Deferred[Any]:
        async def whole() -> None:
            feed = self.backend.sync_user()
            for user in users:
                await feed.feed(user)
            await feed.finish()

        return ensureDeferred(whole())

    def page(self, call: Call = ALL, **request: Any) -> ListUsersResponse:
        reply = ensureDeferred(self.backend.list_users(ListUsersRequest(**request), call))
        for _ in range(listing.MOST // listing.TURN + 1):
            self.clock.advance(0)
        return self.successResultOf(reply)

    def rows(self, **request: Any) -> dict[str, ListedUser]:
        return {row.name: row for row in self.page(**request).users}


class ListingTests(ListingCase):
    def test_no_users_without_a_backend(self) -> None:
        """There is a reply before any Start; after a Stop no users are wanted."""
        self.assertEqual((self.page().total, self.page().state), (0, "stopped"))
        self.started("a,b", ANN)
        self.successResultOf(ensureDeferred(self.backend.stop(pb.Empty(), ALL)))
        self.assertEqual((self.page().total, self.page().state, len(self.page().users)), (0, "stopped", 0))

    def test_wanted_and_confirmed(self) -> None:
        """Rows are sorted by name, with what was requested, the outcome, and what the core has confirmed."""
        self.started("a,b", BOB, ANN)
        reply = self.page()
        self.assertEqual([row.name for row in reply.users], ["Ann", "bob"])
        self.assertEqual((reply.total, reply.next, reply.state, reply.credentials), (2, "", "running", False))
        bob = reply.users[1]
        self.assertEqual((list(bob.inbounds), list(bob.unknown)), (["a", "b"], ["elsewhere"]))
        self.assertEqual((list(bob.confirmed), bob.pending, list(bob.refused)), (["a", "b"], False, []))
        self.assertFalse(bob.HasField("proxies"))

    def test_credentials_need_scope_all(self) -> None:
        """Another key gets the same rows without credentials, and a note of that."""
        self.started("a,b", ANN)
        reply = self.page(credentials=True)
        self.assertEqual((reply.credentials, reply.users[0].proxies.trojan.password), (True, "one"))
        lesser = self.page(READ, credentials=True)
        self.assertEqual((lesser.credentials, lesser.users[0].HasField("proxies")), (False, False))
        self.assertEqual([row.name for row in lesser.users], ["Ann"])

    def test_traffic(self) -> None:
        """Bytes by inbound, counted until the request came, only if it asks for them."""
        core = self.started("a,b", ANN, BOB)
        core.counts = {counter_name(Counted.USER_INBOUND, f"Ann{SEPARATOR}a", way): 7 for way in DIRECTIONS}
        rows = self.rows(traffic=True)
        self.assertEqual([(each.tag, each.uplink, each.downlink) for each in rows["Ann"].traffic], [("a", 7, 7)])
        self.assertEqual((len(rows["bob"].traffic), len(self.rows()["Ann"].traffic)), (0, 0))

    def test_pending(self) -> None:
        """A change that the core has not confirmed is pending; a removed user is listed until they are out."""
        self.started("a,b", ANN)
        self.driver.applying.shut = True
        done = self.sync(BOB, person("Ann"))
        rows = self.rows()
        self.assertEqual((list(rows["bob"].confirmed), rows["bob"].pending), ([], True))
        self.assertEqual((list(rows["ann"].leaving), rows["ann"].pending), (["a"], True))
        self.assertEqual((list(rows["ann"].inbounds), self.page().total), ([], 1))
        self.driver.applying.open()
        self.successResultOf(done)
        self.assertEqual({name: row.pending for name, row in self.rows().items()}, {"bob": False})
        self.assertEqual(list(self.rows()["bob"].confirmed), ["a", "b"])

    def test_another_credential_pending(self) -> None:
        """Until the core has the new one, the old one still lets the user in."""
        self.started("a,b", ANN)
        self.driver.applying.shut = True
        done = self.sync(person("Ann", "new", "a"))
        row = self.rows()["Ann"]
        self.assertEqual((list(row.confirmed), list(row.leaving), row.pending), ([], ["a"], True))
        self.driver.applying.open()
        self.successResultOf(done)
        row = self.rows()["Ann"]
        self.assertEqual((list(row.confirmed), list(row.leaving), row.pending), (["a"], [], False))

    def test_why_a_user_is_not_in(self) -> None:
        """Each inbound has the reason, the node's or the core's."""
        self.started("a,b", ANN)
        users = person("cid", "bad", "a", "b"), person("dan", "one", "a"), person("eve", "", "b")
        self.failureResultOf(self.sync(*users, person("fay", "refused", "b")), UsersRefused)
        rows = self.rows()
        self.assertEqual(list(rows["cid"].refused), ["a: the password is bad", "b: the password is bad"])
        self.assertEqual(list(rows["dan"].refused), ["a: 'ann' has the same credential"])
        self.assertEqual(list(rows["eve"].refused), ["b: the user has no credential for it"])
        self.assertEqual(list(rows["fay"].refused), ["the core says no"])
        self.assertEqual({(row.pending, *row.confirmed) for name, row in rows.items() if name != "Ann"}, {(False,)})
        self.successResultOf(self.sync(person("fay", "fine", "b")))
        self.assertEqual((list(self.rows()["fay"].refused), list(self.rows()["fay"].confirmed)), ([], ["b"]))

    def test_removed_users_that_are_kept(self) -> None:
        """A draining run that keeps a removed user is listed, whatever the current run says."""
        self.started("a,b", ANN)
        self.started("a,b other", ANN)
        self.driver.applying.shut = True
        done = self.sync(person("Ann"))
        self.assertEqual(list(self.rows()["ann"].leaving), ["a"])
        self.driver.applying.open()
        self.successResultOf(done)
        self.assertEqual(self.rows(), {})

    def test_a_core_that_restarts(self) -> None:
        """All users are pending while a core restarts."""
        self.driver.faults = []
        core = self.started("a,b", ANN)
        self.driver.launching.shut = True
        core.die()
        self.clock.advance(0)
        row = self.rows()["Ann"]
        self.assertEqual((self.page().state, list(row.confirmed), row.pending), ("restarting", [], True))

    def test_names(self) -> None:
        """Names can be asked for in any spelling; unknown ones are not in the reply."""
        self.started("a,b", ANN, BOB)
        reply = self.page(names=["ANN", "ann", "nobody"])
        self.assertEqual(([row.name for row in reply.users], reply.total), (["Ann"], 1))
        request = ListUsersRequest(names=["x"] * (listing.MOST + 1))
        self.failureResultOf(ensureDeferred(self.backend.list_users(request, ALL)), InvalidRequest)

    def test_pages(self) -> None:
        """Each page begins after the one before it; together they have all users, once each, by name."""
        names = [f"{'User' if number % 2 else 'user'} {number:02}" for number in range(23)]
        self.started("a,b", *(person(name, name, "a") for name in reversed(names)))
        for limit in (1, 5, 22, 23, 0, 5000):
            seen, after, pages = list[str](), "", 0
            while after or not pages:
                reply = self.page(after=after, limit=limit)
                seen += [row.name for row in reply.users]
                after, pages = reply.next, pages + 1
            self.assertEqual(seen, sorted(names, key=key_of))
            self.assertEqual(pages, -(-23 // (limit or 23)) if limit < 23 else 1)

    def test_bytes_of_a_page(self) -> None:
        """A page is limited in bytes, and a row that is larger than that has only the name."""
        self.patch(listing, "MOST_BYTES", 1000)
        users = [person(f"user {number}", str(number) + "x" * 400, "a") for number in range(5)]
        self.started("a,b", *users, person("wide", "w", "a", *map(str, range(1000))))
        pages, after = list[list[str]](), ""
        while after or not pages:
            reply = self.page(after=after, credentials=True)
            self.assertLess(reply.ByteSize(), 1100)
            pages.append([row.name for row in reply.users])
            after = reply.next
        self.assertEqual(pages, [["user 0", "user 1"], ["user 2", "user 3"], ["user 4", "wide"]])
        self.assertEqual(self.rows(names=["wide"])["wide"], ListedUser(name="wide", shortened=True))

    def test_revisions(self) -> None:
        """A reader of pages sees whether the users changed in between; an equal request changes nothing."""
        self.started("a,b", ANN)
        before = self.page().revision
        self.successResultOf(self.sync(ANN))
        self.started("a,b", ANN)
        self.assertEqual(self.page().revision, before)
        seen = {before}
        for user in (BOB, person("bob", "two", "a"), person("bob")):
            self.successResultOf(self.sync(user))
            self.assertNotIn(self.page().revision, seen)
            seen.add(self.page().revision)

    def test_large_sets(self) -> None:
        """Many users are sorted in parts; other calls have their turn within a page."""
        users = [person(f"{number * 7919 % 6007:05}", f"p{number}", "a") for number in range(6007)]
        self.successResultOf(self.start("a,b", *users))
        reply = ensureDeferred(self.backend.list_users(ListUsersRequest(after="03000"), ALL))
        self.assertNoResult(reply)
        for _ in range(listing.MOST // listing.TURN + 1):
            self.clock.advance(0)
        found = [row.name for row in self.successResultOf(reply).users]
        self.assertEqual(found, [f"{number:05}" for number in range(3001, 4001)])


class LeftTests(ListingCase):
    """Users that an earlier node left, and that are not resumed."""

    saved = Saved(request=pb.Backend(config="a,b").SerializeToString(), users=(BOB.SerializeToString(),))
    options = EngineOptions(BackendOptions(resume=False))

    def test_users_who_would_come_back(self) -> None:
        """Users that a resume would restore are wanted and unconfirmed; another backend's users replace them."""
        row = self.rows(credentials=True)["bob"]
        self.assertEqual((list(row.inbounds), list(row.confirmed)), (["a", "b", "elsewhere"], []))
        self.assertEqual((row.proxies.trojan.password, self.page().state, self.page().total), ("two", "stopped", 1))
        self.started("a,b", ANN)
        self.assertEqual(list(self.rows()), ["Ann"])

    def test_a_backend_that_comes_while_they_are_read(self) -> None:
        """The page has the users that are wanted when it is made, and so has its revision."""
        later: list[Any] = []
        self.patch(Inline, "callInThreadWithCallback", lambda _, done, work, *given: later.append((done, work, given)))
        reply = ensureDeferred(self.backend.list_users(ListUsersRequest(), ALL))
        self.assertNoResult(reply)
        self.started("a,b", ANN)
        for done, work, given in later:
            done(True, work(*given))
        self.clock.advance(0)
        page = self.successResultOf(reply)
        self.assertEqual(([row.name for row in page.users], page.total, page.state), (["Ann"], 1, "running"))
        self.assertEqual(page.revision, self.page().revision)
