"""Streams of users over the real runner: one bad user does not affect the others, and the reply is true."""

from __future__ import annotations

from twisted.internet.defer import Deferred, ensureDeferred
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from drivers.pretended.scripted import MemoryDriver
from node.api import feeds
from node.api.feeds import IN_FLIGHT, LONGEST_NAME, REMEMBERED, ChunkFeed, UserFeed
from node.api.methods import MAX_BODY
from node.base.errors import InvalidRequest, NodeError, NotInitialized, TooLarge, UsersRefused
from node.base.logs import LogRing
from node.contract.driver import Generation
from node.contract.generations import Generations
from protos.service_pb2 import Backend, Empty, User, UsersChunk
from tests.harness.memory import MemoryRecord, person
from tests.harness.whole import make_runner


async def _no_counters(_: Generation) -> bool:
    """Read no counters."""
    return False


class FeedTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.driver = MemoryDriver()
        self.runner = make_runner(Clock(), LogRing(Clock(), 100), MemoryRecord(), Generations(), _no_counters)

    def start(self, *users: User) -> None:
        self.successResultOf(ensureDeferred(self.runner.start(self.driver, Backend(users=users))))

    def accounts(self, tag: str = "a") -> dict[str, bytes]:
        return dict(self.runner.current().accounts[tag])

    def feed(self, *users: User) -> Deferred[Empty]:
        """A whole SyncUser stream."""
        feed = UserFeed(self.runner.users)
        for user in users:
            self.successResultOf(ensureDeferred(feed.feed(user)))
        return ensureDeferred(feed.finish())

    def chunks(self, *users: User) -> Deferred[Empty]:
        """A whole SyncUsersChunked stream, one user in each chunk."""
        feed = ChunkFeed(self.runner.users)
        for index, user in enumerate(users):
            chunk = UsersChunk(users=[user], index=index, last=index == len(users) - 1)
            self.successResultOf(ensureDeferred(feed.feed(chunk)))
        return ensureDeferred(feed.finish())


class UserFeedTests(FeedTests):
    def test_each_user_as_they_arrive(self) -> None:
        """A user is in force before the stream has ended."""
        self.start()
        feed = UserFeed(self.runner.users)
        self.successResultOf(ensureDeferred(feed.feed(person("ann", "one", "a"))))
        self.assertEqual(self.accounts(), {"ann": b"one"})
        self.successResultOf(ensureDeferred(feed.feed(person("ann"))))
        self.assertEqual(self.accounts(), {})
        self.assertEqual(self.successResultOf(ensureDeferred(feed.finish())), Empty())

    def test_a_bad_user_does_not_affect_the_others(self) -> None:
        """Users that cannot be used, or that the core refuses, are named at the end; all others are in force."""
        self.start()
        reply = self.feed(
            person("ann", "bad", "a"), person("bob", "refused", "a"), person("", "x", "a"), person("cy", "one", "a")
        )
        refused = self.failureResultOf(reply, UsersRefused).value.refused
        self.assertEqual([name for name, _ in refused], ["ann", "bob", ""])
        self.assertEqual(self.accounts(), {"cy": b"one"})

    def test_a_later_message_mends(self) -> None:
        """A refused user is no error once the node has applied them, also with another spelling of the e-mail."""
        self.start()
        self.successResultOf(self.feed(person("ann", "bad", "a"), person("ann", "one", "a")))
        self.successResultOf(self.feed(person("Bob", "bad", "a"), person("bob", "two", "a")))
        self.assertEqual(self.accounts(), {"ann": b"one", "bob": b"two"})

    def test_successes_are_not_kept(self) -> None:
        """A stream may be open for weeks: it remembers refused users, and only a limited number."""
        self.start()
        feed = UserFeed(self.runner.users)
        for number in range(2 * REMEMBERED):
            self.successResultOf(ensureDeferred(feed.feed(person(f"{number}", f"{number}", "a"))))
        self.assertEqual(len(feed._wrong), 0)
        for number in range(REMEMBERED + 1):
            self.successResultOf(ensureDeferred(feed.feed(person(f"{number}" + "x" * 1000, "bad", "a"))))
        refused = self.failureResultOf(ensureDeferred(feed.finish()), UsersRefused).value.refused
        self.assertEqual(len(refused), REMEMBERED)
        self.assertTrue(refused[-1][0].startswith(f"{REMEMBERED}x"))
        self.assertLessEqual(max(len(name) for name, _ in refused), LONGEST_NAME)

    def test_without_a_backend(self) -> None:
        """The stream stays open without a backend, takes messages, and reports the missing backend at its end."""
        self.failureResultOf(self.feed(person("ann", "one", "a")), NotInitialized)

    def test_an_unforeseen_error_is_reported(self) -> None:
        """An error of the node or a driver while a user is applied is no success: the reply and the log have it."""
        self.start()
        self.driver.fault = KeyError("x")
        for held in (False, True):
            self.driver.applying.shut = held
            reply = self.feed(person(f"ann-{held}", f"one-{held}", "a"))
            self.driver.applying.open()
            fault = self.failureResultOf(reply, NodeError).value
            self.assertEqual((fault.code, fault.http), ("internal", 500))
        self.assertGreaterEqual(len(self.flushLoggedErrors(KeyError)), 1)

    def test_a_known_error_is_reported(self) -> None:
        """An error of the core reaches the caller, and the users before it stay."""
        self.start()
        self.successResultOf(self.feed(person("ann", "one", "a")))
        self.driver.fault = TooLarge("too many")
        self.failureResultOf(self.feed(person("bob", "two", "a")), TooLarge)
        self.assertEqual(self.accounts(), {"ann": b"one"})

    def test_a_later_message_mends_an_error(self) -> None:
        """An error is reported unless a later message about the user succeeded, with any spelling of the e-mail."""
        self.start()
        for mended in ("Bob", "cy"):
            feed = UserFeed(self.runner.users)
            self.driver.fault = TooLarge("too many")
            self.successResultOf(ensureDeferred(feed.feed(person("bob", "two", "a"))))
            self.driver.fault = None
            self.successResultOf(ensureDeferred(feed.feed(person(mended, "three", "a"))))
            reply = ensureDeferred(feed.finish())
            if mended == "Bob":
                self.assertEqual(self.successResultOf(reply), Empty())
            else:
                self.failureResultOf(reply, TooLarge)

    def test_errors_are_limited(self) -> None:
        """If more users fail than a stream remembers, it remembers the newest."""
        self.start()
        feed = UserFeed(self.runner.users)
        self.driver.fault = TooLarge("too many")
        for number in range(REMEMBERED + 1):
            self.successResultOf(ensureDeferred(feed.feed(person(f"{number}", f"{number}", "a"))))
        self.assertEqual(len(feed._wrong), REMEMBERED)
        self.failureResultOf(ensureDeferred(feed.finish()), TooLarge)

    def test_users_do_not_wait_for_each_other(self) -> None:
        """A user under way does not block the stream; its end waits for all of them."""
        self.start()
        self.driver.applying.shut = True
        reply = self.feed(*(person(f"user{number}", f"{number}", "a") for number in range(10)))
        self.assertNoResult(reply)
        self.driver.applying.open()
        self.successResultOf(reply)
        self.assertEqual(len(self.accounts()), 10)
        self.assertEqual(len(self.driver.batches), 2)

    def test_a_stream_waits_at_the_limit(self) -> None:
        """When the allowed number of users is under way, the next one waits: a stream cannot fill the memory."""
        self.start()
        self.driver.applying.shut = True
        feed = UserFeed(self.runner.users)
        for number in range(IN_FLIGHT):
            self.successResultOf(ensureDeferred(feed.feed(person(f"user{number}", f"{number}", "a"))))
        late = ensureDeferred(feed.feed(person("late", "late", "a")))
        self.assertNoResult(late)
        self.driver.applying.open()
        self.successResultOf(late)
        self.successResultOf(ensureDeferred(feed.finish()))
        self.assertEqual(len(self.accounts()), IN_FLIGHT + 1)

    def test_the_last_message_on_a_user_counts(self) -> None:
        """Messages about one user take effect in order, however busy the core is."""
        self.start()
        self.driver.applying.shut = True
        words = [person("ann", "one", "a"), person("ann", "two", "b"), person("ann"), person("ann", "three", "a")]
        reply = self.feed(*words)
        self.driver.applying.open()
        self.successResultOf(reply)
        self.assertEqual((self.accounts("a"), self.accounts("b")), ({"ann": b"three"}, {}))


class ChunkFeedTests(FeedTests):
    def test_users_in_chunks(self) -> None:
        """The users of all chunks are added, changed and removed; no other user is affected."""
        self.start(person("ann", "one", "a"), person("bob", "two", "a"))
        self.successResultOf(self.chunks(person("bob"), person("cy", "two", "a"), person("di", "four", "b")))
        self.assertEqual((self.accounts("a"), self.accounts("b")), ({"ann": b"one", "cy": b"two"}, {"di": b"four"}))

    def test_nothing_before_the_last(self) -> None:
        """No user of an incomplete set is applied."""
        self.start()
        feed = ChunkFeed(self.runner.users)
        self.successResultOf(ensureDeferred(feed.feed(UsersChunk(users=[person("ann", "one", "a")]))))
        self.failureResultOf(ensureDeferred(feed.finish()), InvalidRequest)
        self.assertEqual(self.accounts(), {})

    def test_chunks_that_do_not_follow(self) -> None:
        """A gap, a repetition, or a chunk after the last is an invalid request."""
        for indices in ([1], [0, 2], [0, 0], [0, 1, 1]):
            feed = ChunkFeed(self.runner.users)
            for index in indices[:-1]:
                self.successResultOf(ensureDeferred(feed.feed(UsersChunk(index=index))))
            self.failureResultOf(ensureDeferred(feed.feed(UsersChunk(index=indices[-1]))), InvalidRequest)
        feed = ChunkFeed(self.runner.users)
        self.successResultOf(ensureDeferred(feed.feed(UsersChunk(last=True))))
        self.failureResultOf(ensureDeferred(feed.feed(UsersChunk(index=1))), InvalidRequest)

    def test_an_empty_last_chunk(self) -> None:
        """A single last chunk without users is a success; no chunk at all is an error."""
        self.start()
        feed = ChunkFeed(self.runner.users)
        self.successResultOf(ensureDeferred(feed.feed(UsersChunk(last=True))))
        self.assertEqual(self.successResultOf(ensureDeferred(feed.finish())), Empty())
        self.failureResultOf(ensureDeferred(ChunkFeed(self.runner.users).finish()), InvalidRequest)

    def test_chunks_are_bounded_together(self) -> None:
        """Chunks may be as large together as one body."""
        feed = ChunkFeed(self.runner.users)
        half = UsersChunk(users=[person("x" * (MAX_BODY // 2), "one", "a")])
        self.successResultOf(ensureDeferred(feed.feed(half)))
        half.index = 1
        self.failureResultOf(ensureDeferred(feed.feed(half)), TooLarge)

    def test_users_are_counted(self) -> None:
        """More users than a call may have are an invalid request, at once."""
        self.patch(feeds, "MAX_USERS", 2)
        self.start()
        self.successResultOf(self.chunks(person("ann", "one", "a"), person("bob", "two", "a")))
        feed = ChunkFeed(self.runner.users)
        self.successResultOf(ensureDeferred(feed.feed(UsersChunk(users=[person("cy", "three", "a")]))))
        more = UsersChunk(users=[person("di", "four", "a")] * 2, index=1, last=True)
        fault = self.failureResultOf(ensureDeferred(feed.feed(more)), InvalidRequest).value
        self.assertEqual((fault.http, fault.grpc), (400, "INVALID_ARGUMENT"))
        self.assertEqual(set(self.accounts()), {"ann", "bob"})

    def test_bad_users_are_named_and_the_others_applied(self) -> None:
        """The good users of a set are in force before the bad ones are reported."""
        self.start()
        reply = self.chunks(person("ann", "bad", "a"), person("bob", "two", "a"), person("cy", "refused", "b"))
        refused = self.failureResultOf(reply, UsersRefused).value.refused
        self.assertEqual([name for name, _ in refused], ["ann", "cy"])
        self.assertEqual(self.accounts(), {"bob": b"two"})

    def test_credentials_change_hands(self) -> None:
        """Conflicts are judged on the final set: users of one set may exchange credentials."""
        self.start(person("ann", "one", "a"), person("bob", "two", "a"))
        self.successResultOf(self.chunks(person("ann", "two", "a"), person("bob", "one", "a")))
        self.assertEqual(self.accounts(), {"ann": b"two", "bob": b"one"})
        self.successResultOf(self.chunks(person("cy", "two", "a"), person("ann")))
        self.assertEqual(self.accounts(), {"bob": b"one", "cy": b"two"})

    def test_two_spellings_in_one_set(self) -> None:
        """A second spelling of an e-mail is refused by name, the first stays."""
        self.start()
        reply = self.chunks(person("Ann", "one", "a"), person("ann", "two", "a"))
        refused = self.failureResultOf(reply, UsersRefused).value.refused
        self.assertEqual([name for name, _ in refused], ["ann"])
        self.assertEqual(self.accounts(), {"ann": b"one"})
