"""The common path of both transports: bytes in, bytes out, and only the node's own errors."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from google.protobuf.message import Message
from hypothesis import given, settings
from hypothesis import strategies as st
from twisted.internet.defer import Deferred, ensureDeferred
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from node.api.auth import Caller, Dialect
from node.api.calls import Call, Calls, Reply, parse, watched
from node.api.methods import METHODS, Kind, Method
from node.base.errors import (
    Forbidden,
    Internal,
    InvalidRequest,
    NodeError,
    NotInitialized,
    Unauthenticated,
    Unsupported,
)
from node.base.logs import COALESCE, REPLAY, LogRing
from node.base.waiting import fire
from node.keys.keyfile import Key, Scope
from protos.service_pb2 import BaseInfoResponse, Empty, StatRequest, StatResponse, User

KEY = Key("ann", Scope.ALL, b"1")
CALLER = Caller(KEY, address="192.0.2.1")
BY_NAME = {method.name: method for method in METHODS}
# A string field that is not UTF-8, a length beyond the end, a field without its value.
BROKEN = (b"\x0a\x02\xff\xff", b"\x0a\x7fx", b"\x0a")


def pass_on(outcomes: list[object], word: bool) -> bool:
    outcomes.append(word)
    return word


class Collected:
    """A feed that keeps its messages, and ends as the test sets it."""

    def __init__(self, fault: Exception | None) -> None:
        self.messages: list[Any] = []
        self._fault = fault

    async def feed(self, message: Any) -> None:
        self.messages.append(message)

    async def finish(self) -> Message:
        if self._fault:
            raise self._fault
        return Empty()


class Recorder:
    """Answers the calls that the tests make, and keeps their requests."""

    def __init__(self) -> None:
        self.fault: Exception | None = None
        self.touched = 0
        self.asked: list[tuple[str, Any, Dialect]] = []
        self.collected: list[Collected] = []
        self.callbacks: list[Callable[[bool], object]] = []
        self.hold: Deferred[None] | None = None
        self.late: Callable[[bool], object] | None = None

    def touch(self) -> None:
        self.touched += 1

    async def info(self, request: Empty, call: Call) -> Message:
        return self._answer("info", request, call, BaseInfoResponse(version="1.0.0"))

    async def stop(self, request: Empty, call: Call) -> Message:
        return self._answer("stop", request, call, Empty())

    async def online(self, request: StatRequest, call: Call) -> Message:
        reply = self._answer("online", request, call, StatResponse())
        if self.hold is not None:
            await self.hold
        if self.late is not None:
            call.delivered().addCallback(self.late)
        return reply

    def sync_user(self) -> Collected:
        self.collected.append(Collected(self.fault))
        return self.collected[-1]

    def _answer(self, name: str, request: Any, call: Call, reply: Message) -> Message:
        self.asked.append((name, request, call.dialect))
        for callback in self.callbacks:
            call.delivered().addCallback(callback)
        if self.fault:
            raise self.fault
        return reply


class CallTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.backend = Recorder()
        self.clock = Clock()
        self.ring = LogRing(self.clock, 1000)
        self.calls = Calls(self.backend, self.ring)

    def unary(self, name: str, body: bytes = b"", dialect: Dialect = Dialect.DOCUMENT) -> Deferred[Reply]:
        return ensureDeferred(self.calls.unary(BY_NAME[name], body, Caller(KEY, dialect)))

    def test_a_call_is_answered(self) -> None:
        """The request arrives parsed with its dialect, the reply leaves serialised."""
        request = StatRequest(name="ann", reset=True)
        reply = self.successResultOf(self.unary("GetUserOnlineStats", request.SerializeToString(), Dialect.DEPLOYED))
        self.assertEqual(reply, Reply(b""))
        self.assertEqual(self.backend.asked, [("online", request, Dialect.DEPLOYED)])

    def test_every_call_restarts_the_keep_alive(self) -> None:
        """Refused and malformed calls restart it, too."""
        self.successResultOf(self.unary("GetBaseInfo"))
        self.backend.fault = NotInitialized()
        self.failureResultOf(self.unary("GetUserOnlineStats"), NotInitialized)
        self.failureResultOf(self.unary("GetUserOnlineStats", BROKEN[0]), InvalidRequest)
        self.assertEqual(self.backend.touched, 3)

    def test_known_errors_pass(self) -> None:
        """The node's own error reaches the caller unchanged."""
        self.backend.fault = Unsupported("not this core")
        failure = self.failureResultOf(self.unary("GetUserOnlineStats"), Unsupported)
        self.assertIs(failure.value, self.backend.fault)

    def test_unknown_errors_are_logged(self) -> None:
        """For a fault of the node, the caller gets only its class, and the log has the traceback."""
        self.backend.fault = KeyError("a secret")
        failure = self.failureResultOf(self.unary("GetUserOnlineStats"), Internal)
        self.assertIn("KeyError", failure.value.text)
        self.assertNotIn("a secret", failure.value.text)
        self.assertEqual(len(self.flushLoggedErrors(KeyError)), 1)

    def test_every_waiter_gets_one_outcome(self) -> None:
        """The transport's first outcome of a reply reaches all who asked for it, once."""
        for whole in (True, False):
            outcomes: list[object] = []
            self.backend.callbacks = [partial(pass_on, outcomes), outcomes.append]
            reply = self.successResultOf(self.unary("GetUserOnlineStats"))
            assert reply.delivered is not None
            self.assertEqual(outcomes, [])
            fire(reply.delivered, whole)
            fire(reply.delivered, not whole)
            self.calls.close()
            self.assertEqual(outcomes, [whole, whole])

    def test_a_reply_that_is_never_made(self) -> None:
        """Work that asked and fails, or whose reply cannot be serialised, was not delivered; its error is answered."""
        for fault, kind in ((Unsupported("no"), Unsupported), (KeyError("x"), Internal)):
            outcomes: list[bool] = []
            self.backend.fault, self.backend.callbacks = fault, [outcomes.append]
            self.failureResultOf(self.unary("GetUserOnlineStats"), kind)
            self.assertEqual(outcomes, [False])
        self.assertEqual(len(self.flushLoggedErrors(KeyError)), 1)

    def test_the_node_ends(self) -> None:
        """At the node's end nothing under way is delivered: neither replies, nor work without one."""
        outcomes: list[object] = []
        self.backend.hold = Deferred()
        self.backend.callbacks = [partial(pass_on, outcomes)]
        early = self.unary("GetUserOnlineStats")
        self.calls.close()
        self.assertEqual(outcomes, [False])
        self.backend.callbacks = []
        self.backend.late = lambda whole: outcomes.append(f"late {whole}")
        self.backend.hold.callback(None)
        self.assertEqual(outcomes, [False, "late False"])
        self.assertIsNone(self.successResultOf(early).delivered)

    def test_methods_that_are_not_watched(self) -> None:
        """Asking for the delivery of such a reply raises at once, instead of waiting for ever."""
        self.assertTrue(watched(BY_NAME["GetStats"]))
        self.assertFalse(watched(BY_NAME["GetBaseInfo"]))
        self.backend.callbacks = [self.fail]
        self.failureResultOf(self.unary("GetBaseInfo"), Internal)
        self.assertEqual(len(self.flushLoggedErrors(RuntimeError)), 1)

    def test_a_callback_that_fails(self) -> None:
        """The error is logged, and does not stop the transport."""
        outcomes: list[object] = []
        self.backend.callbacks = [lambda _: outcomes.remove(True)]
        reply = self.successResultOf(self.unary("GetUserOnlineStats"))
        assert reply.delivered is not None
        reply.delivered.addCallback(outcomes.append)
        fire(reply.delivered, True)
        self.assertEqual(outcomes, [None])
        self.assertEqual(len(self.flushLoggedErrors(ValueError)), 1)

    def test_a_stream_of_requests(self) -> None:
        """Messages come one by one, each restarts the keep-alive, and the reply comes at the end, without a backend."""
        feed = self.calls.open(BY_NAME["SyncUser"], CALLER)
        for name in ("ann", "bob"):
            self.successResultOf(ensureDeferred(feed.feed(User(email=name).SerializeToString())))
        self.assertEqual(self.successResultOf(ensureDeferred(feed.finish())), b"")
        self.assertEqual([user.email for user in self.backend.collected[0].messages], ["ann", "bob"])
        self.assertEqual(self.backend.touched, 3)

    def test_a_stream_with_a_broken_message(self) -> None:
        """A malformed message ends the call as an invalid request."""
        feed = self.calls.open(BY_NAME["SyncUser"], CALLER)
        for body in BROKEN:
            self.failureResultOf(ensureDeferred(feed.feed(body)), InvalidRequest)

    def test_a_stream_that_fails_at_its_end(self) -> None:
        """The end of a stream fails as any call does."""
        for fault, kind in ((Unsupported("no"), Unsupported), (KeyError("x"), Internal)):
            self.backend.fault = fault
            self.failureResultOf(ensureDeferred(self.calls.open(BY_NAME["SyncUser"], CALLER).finish()), kind)
        self.assertEqual(len(self.flushLoggedErrors(KeyError)), 1)

    def test_observers(self) -> None:
        """A key without control does not keep a backend alive, and may not reset counters."""
        reader = Caller(Key("bob", Scope.READ, b"2"))
        self.successResultOf(ensureDeferred(self.calls.unary(BY_NAME["GetBaseInfo"], b"", reader)))
        self.calls.logs(BY_NAME["GetLogs"], reader)
        for name, request in (("Stop", Empty()), ("GetStats", StatRequest(reset=True))):
            call = self.calls.unary(BY_NAME[name], request.SerializeToString(), reader)
            self.failureResultOf(ensureDeferred(call), Forbidden)
        self.assertEqual((self.backend.touched, len(self.backend.asked)), (0, 1))

    def test_a_key_that_is_no_longer_valid(self) -> None:
        """Streams opened with a revoked key end: readers at once, users with the next message, which is not applied."""
        reader = self.calls.logs(BY_NAME["GetLogs"], CALLER)
        feed = self.calls.open(BY_NAME["SyncUser"], CALLER)
        waiting = ensureDeferred(reader.next())
        self.calls.dismiss({Key("other", Scope.ALL, b"3")})
        self.successResultOf(ensureDeferred(feed.feed(User(email="ann").SerializeToString())))
        self.assertNoResult(waiting)
        self.calls.dismiss({KEY})
        for late in (waiting, reader.next(), feed.feed(b""), feed.finish()):
            self.failureResultOf(ensureDeferred(late), Unauthenticated)
        self.assertEqual([user.email for user in self.backend.collected[0].messages], ["ann"])

    def test_a_request_whose_key_was_revoked_meanwhile(self) -> None:
        """The request is refused, as are new streams with this key."""
        calls = Calls(self.backend, self.ring, lambda key: key is not KEY)
        self.failureResultOf(ensureDeferred(calls.unary(BY_NAME["GetBaseInfo"], b"", CALLER)), Unauthenticated)
        for work in (lambda: calls.open(BY_NAME["SyncUser"], CALLER), lambda: calls.logs(BY_NAME["GetLogs"], CALLER)):
            self.assertRaises(Unauthenticated, work)
        self.assertEqual(self.backend.touched, 0)

    def test_the_audit(self) -> None:
        """Each Stop is an event with key and address; the log has it, too."""
        self.successResultOf(self.unary("Stop"))
        self.assertEqual(self.ring.read(0)[0], ["[node] Stop by key ann"])

    def test_readers_of_logs(self) -> None:
        """Each reader gets the tail and then what comes; the backend only learns that it was opened."""
        self.ring.extend(f"{number}" for number in range(REPLAY + 1))
        one, two = (self.calls.logs(BY_NAME["GetLogs"], CALLER) for _ in range(2))
        for reader in (one, two):
            lines = self.successResultOf(ensureDeferred(reader.next()))
            self.assertEqual(lines, [f"{number}" for number in range(1, REPLAY + 1)])
        waiting = [ensureDeferred(reader.next()) for reader in (one, two)]
        self.ring.extend(["live"])
        self.clock.advance(COALESCE)
        self.assertEqual([self.successResultOf(lines) for lines in waiting], [["live"], ["live"]])
        self.assertEqual(self.backend.touched, 2)


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
@settings(deadline=None)
@given(body=st.one_of(st.binary(max_size=60), st.sampled_from(BROKEN)))
def test_any_body_is_a_message_or_refused(method: Method, body: bytes) -> None:
    """Any bytes are the request's message, or the request is invalid, and the error names the message."""
    try:
        message = parse(method, body)
    except NodeError as error:
        assert isinstance(error, InvalidRequest)
        assert method.request.DESCRIPTOR.name in error.text
    else:
        assert isinstance(message, method.request)


def test_requests_of_other_versions() -> None:
    """Fields that this node does not know are ignored."""
    for method in METHODS:
        if method.kind is not Kind.LOGS:
            assert parse(method, b"\xf8\x7f\x01") is not None
