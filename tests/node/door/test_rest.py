"""REST as a controller sees it: every row of METHODS, both dialects, over real connections on the loopback."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import treq
from google.protobuf.message import Message
from twisted.internet import reactor as installed
from twisted.internet.defer import Deferred
from twisted.internet.task import LoopingCall, deferLater
from twisted.trial.unittest import TestCase
from twisted.web.client import Agent, HTTPConnectionPool
from twisted.web.http_headers import Headers

from node.api.auth import Authenticator, Dialect
from node.api.calls import Call, Calls, watched
from node.api.methods import METHODS, Kind, Method
from node.base.errors import NotInitialized, NotStarted, UsersRefused
from node.base.logs import LogRing
from node.door.rest import MEDIA_TYPE, make_app
from protos import service_pb2 as pb
from tests.harness.sites import site_of

reactor: Any = installed

KEY = "3f2b8c1e-0d5a-4b6f-9a77-1c2d3e4f5a6b"
BEARER = {"Authorization": f"Bearer {KEY}", "Content-Type": MEDIA_TYPE}
DEPLOYED = {"x-api-key": KEY}
GARBAGE = b"\x0a\xff"
REPLIES = [method for method in METHODS if method.kind not in (Kind.LOGS, Kind.EVENTS)]
UNARY = [method for method in METHODS if method.kind is Kind.UNARY]


class FakeFeed:
    """A feed that keeps its messages for the test."""

    def __init__(self, backend: FakeBackend, method: Method) -> None:
        self._backend = backend
        self._method = method

    async def feed(self, message: Message) -> None:
        self._backend.heard.append((self._method.call, message, None))
        await self._backend.answer()

    async def finish(self) -> Message:
        await self._backend.answer()
        self._backend.finished.append(self._method.call)
        return self._method.response()


class FakeBackend:
    """A coroutine for every row: keeps its request and returns a filled message, or fails as the test sets it.

    `delivered`, if it is a list, gets the delivery of each unary reply.
    """

    def __init__(self) -> None:
        self.heard: list[tuple[str, Message, Dialect | None]] = []
        self.finished: list[str] = []
        self.error: Exception | None = None
        self.hold: Deferred[None] | None = None
        self.reply: Message | None = None
        self.delivered: list[bool] | None = None

    def touch(self) -> None:
        """This test ignores the keep-alive."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = next(method for method in METHODS if method.call == name)
        if method.kind is Kind.FEED:
            return lambda: FakeFeed(self, method)

        async def handler(request: Message, call: Call) -> Message:
            self.heard.append((name, request, call.dialect))
            if self.delivered is not None and watched(method):
                call.delivered().addCallback(self.delivered.append)
            await self.answer()
            self.finished.append(name)
            return self.reply or sample(method.response)

        return handler

    async def answer(self) -> None:
        if self.hold is not None:
            await self.hold
        if self.error is not None:
            raise self.error


def sample(kind: type[Message]) -> Message:
    """Make a message of this kind with its first plain string set, if there is one."""
    message = kind()
    for field in message.DESCRIPTOR.fields:
        if field.type == field.TYPE_STRING and not field.is_repeated:
            setattr(message, field.name, "x")
            break
    return message


def framed(method: Method, message: Message) -> bytes:
    """Make a REST body with this one message, which must be shorter than 128 bytes."""
    body = message.SerializeToString()
    return bytes([len(body)]) + body if method.path.endswith("/chunked") else body


async def until(condition: Callable[[], object], seconds: float = 5.0) -> None:
    """Wait for a condition, with a deadline."""
    end = reactor.seconds() + seconds
    while not condition():
        assert reactor.seconds() < end, "not in time"
        await deferLater(reactor, 0.01)


class RestCase(TestCase):
    """A site on a loopback port, with a fake backend behind the real `Calls`."""

    def setUp(self) -> None:
        self.backend = FakeBackend()
        self.ring = LogRing(reactor, 1000)
        self.site = site_of(make_app(Calls(self.backend, self.ring)), Authenticator(KEY), reactor)
        self.port = reactor.listenTCP(0, self.site, interface="127.0.0.1")
        self.agent = Agent(reactor, pool=HTTPConnectionPool(reactor, persistent=False))

    async def tearDown(self) -> None:  # type: ignore[override]
        await self.port.stopListening()
        self.site.connections.disconnect()
        await until(lambda: not self.site.connections)

    def send(self, verb: str, path: str, headers: Mapping[str, str], body: bytes = b"") -> Deferred[Any]:
        url = f"http://127.0.0.1:{self.port.getHost().port}{path}"
        return treq.request(
            verb,
            url,
            headers=Headers({name: [value] for name, value in headers.items()}),
            data=body or None,
            agent=self.agent,
        )

    async def ask(
        self, verb: str, path: str, headers: Mapping[str, str], body: bytes = b""
    ) -> tuple[int, bytes, Callable[[str], str | None]]:
        response = await self.send(verb, path, headers, body)
        content = await response.content()
        if verb != "HEAD":
            self.assertEqual(response.length, len(content), "every reply has a Content-Length")
        return response.code, content, lambda name: first(response, name)

    async def refused(self, verb: str, path: str, headers: Mapping[str, str], body: bytes = b"") -> tuple[int, str]:
        """Return the status and code of a JSON error."""
        status, content, header = await self.ask(verb, path, headers, body)
        self.assertEqual(header("Content-Type"), "application/json")
        told = json.loads(content)
        self.assertEqual(sorted(told), ["code", "error"])
        return status, told["code"]


def first(response: Any, name: str) -> str | None:
    values = response.headers.getRawHeaders(name)
    return values[0] if values else None


class RowTests(RestCase):
    """Tests of every row."""

    async def test_success(self) -> None:
        """Every verb of every row passes message and dialect to the backend, and answers its reply as protobuf."""
        for method in REPLIES:
            for verb in method.verbs:
                self.backend.heard.clear()
                message = sample(method.request)
                status, body, header = await self.ask(verb, method.path, BEARER, framed(method, message))
                self.assertEqual((status, header("Content-Type")), (200, MEDIA_TYPE), method)
                expected = sample(method.response) if method.kind is Kind.UNARY else method.response()
                self.assertEqual(method.response.FromString(body), expected)
                dialect = Dialect.DOCUMENT if method.kind is Kind.UNARY else None
                self.assertEqual(self.backend.heard, [(method.call, message, dialect)])

    async def test_a_trailing_slash(self) -> None:
        """Every path works with a slash at its end, without a redirect."""
        for method in UNARY:
            status, _, _ = await self.ask(method.verbs[0], method.path + "/", BEARER)
            self.assertEqual(status, 200, method)

    async def test_a_body_of_many_messages(self) -> None:
        """They are processed in parts: other requests have their turn meanwhile."""
        number, between = 3000, set[int]()
        others = LoopingCall(lambda: between.add(len(self.backend.heard)))
        others.start(0).addErrback(lambda _: None)
        status, _, _ = await self.ask("PUT", "/users/sync/chunked", BEARER, bytes(number))
        others.stop()
        self.assertEqual((status, len(self.backend.heard)), (200, number))
        self.assertGreater(len(between), 5)

    async def test_undecodable(self) -> None:
        """A body that is not the row's message is 400, and does not reach the backend."""
        for method in REPLIES:
            refused = await self.refused(method.verbs[0], method.path, BEARER, GARBAGE)
            self.assertEqual(refused, (400, "invalid_request"), method)
        self.assertEqual(self.backend.heard, [])

    async def test_wrong_verb(self) -> None:
        """A verb that the path does not take is 405, and Allow lists exactly those it takes, without HEAD."""
        for method in METHODS:
            allowed = {verb for other in METHODS if other.path == method.path for verb in other.verbs}
            for verb in {"GET", "PUT", "POST", "DELETE", "PATCH", "OPTIONS", "HEAD"} - allowed:
                status, content, header = await self.ask(verb, method.path, BEARER)
                self.assertEqual(status, 405, (verb, method))
                self.assertEqual(set((header("Allow") or "").split(", ")), allowed)
                if verb != "HEAD":
                    self.assertEqual(json.loads(content)["code"], "method_not_allowed")

    async def test_media_type(self) -> None:
        """A body that a Bearer client does not declare as protobuf is 415 on every row."""
        for method in METHODS:
            headers = {**BEARER, "Content-Type": "application/json"}
            refused = await self.refused(method.verbs[0], method.path, headers, b"{}")
            self.assertEqual(refused, (415, "unsupported_media_type"), method)
        self.assertEqual(self.backend.heard, [])

    async def test_media_type_that_is_not_text(self) -> None:
        """A media type that is not UTF-8 is the client's error."""
        for credential in (BEARER, DEPLOYED):
            headers = {**credential, "Content-Type": b"\xff"}
            status, _, _ = await self.ask("PUT", "/users/sync", headers, b"x")  # type: ignore[arg-type]
            self.assertEqual(status, 400)

    async def test_media_type_of_deployed_clients(self) -> None:
        """A deployed client may send any media type."""
        for method in REPLIES:
            body = framed(method, sample(method.request))
            headers = {**DEPLOYED, "Content-Type": "text/plain"}
            status, _, _ = await self.ask(method.verbs[0], method.path, headers, body)
            self.assertEqual(status, 200, method)

    async def test_dialects(self) -> None:
        """The backend's error is JSON for a Bearer client and plain text for a deployed one, on every row."""
        self.backend.error = NotStarted("it restarts")
        for method in REPLIES:
            body = framed(method, sample(method.request))
            self.assertEqual(
                await self.refused(method.verbs[0], method.path, BEARER, body), (503, "core_not_started"), method
            )
            status, content, header = await self.ask(method.verbs[0], method.path, DEPLOYED, body)
            self.assertEqual((status, content), (503, b"core is not started yet: it restarts"), method)
            self.assertEqual(header("Content-Type"), "text/plain; charset=utf-8")


class BodyTests(RestCase):
    """Bodies and messages."""

    async def test_media_type_parameters(self) -> None:
        """Case and parameters of the media type are ignored, and an empty body needs none."""
        body = pb.StatRequest(name="a").SerializeToString()
        headers = {**BEARER, "Content-Type": "Application/X-Protobuf; charset=utf-8"}
        self.assertEqual((await self.ask("GET", "/stats", headers, body))[0], 200)
        self.assertEqual((await self.ask("GET", "/stats", {"Authorization": BEARER["Authorization"]}))[0], 200)
        self.assertEqual([str(message.name) for _, message, _ in self.backend.heard], ["a", ""])  # type: ignore[attr-defined]

    async def test_both_headers(self) -> None:
        """A client with both headers gets the deployed dialect."""
        await self.ask("GET", "/info", {**BEARER, **DEPLOYED})
        self.assertEqual(self.backend.heard[0][2], Dialect.DEPLOYED)

    async def test_chunks(self) -> None:
        """The messages of a chunked sync come one by one, in order, and the reply after them."""
        chunks = [pb.UsersChunk(index=n, last=n == 2) for n in range(3)]
        body = b"".join(bytes([len(data)]) + data for data in (chunk.SerializeToString() for chunk in chunks))
        self.assertEqual((await self.ask("PUT", "/users/sync/chunked", BEARER, body))[0], 200)
        self.assertEqual([message for _, message, _ in self.backend.heard], chunks)
        self.assertEqual(self.backend.finished, ["sync_chunked"])

    async def test_chunks_cut_short(self) -> None:
        """A chunked sync that ends inside a message is 400."""
        self.assertEqual(await self.refused("PUT", "/users/sync/chunked", BEARER, b"\x05ab"), (400, "invalid_request"))


class ErrorTests(RestCase):
    """All errors have one form."""

    async def test_unknown_paths(self) -> None:
        """A path without a row is 404, in both dialects, however odd it is."""
        for path in ("/", "/nothing", "/stats//system", "/%ff", "/start/now"):
            self.assertEqual(await self.refused("GET", path, BEARER), (404, "not_found"), path)
        status, content, _ = await self.ask("GET", "/nothing", DEPLOYED)
        self.assertEqual(status, 404)
        self.assertNotIn(b"{", content)

    async def test_wrong_keys(self) -> None:
        """A wrong key is 401, before paths, verbs or media types are checked; without one only operations are."""
        for verb, path in (("GET", "/info"), ("GET", "/nothing"), ("POST", "/info"), ("GET", "/logs")):
            self.assertEqual(await self.refused(verb, path, {"Authorization": "Bearer no"}), (401, "unauthenticated"))
            status, content, _ = await self.ask(verb, path, {"x-api-key": "no"})
            self.assertEqual((status, content), (401, b"missing or wrong API key"))
            status, content, header = await self.ask(verb, path, {})
            if path == "/nothing":
                self.assertEqual((status, content, header("Content-Type")), (404, b"", None))
            else:
                self.assertEqual((status, json.loads(content)["code"]), (401, "unauthenticated"))

    async def test_texts_that_controllers_match(self) -> None:
        """Deployed controllers get the texts that they match, and nothing else."""
        for error, status, begins in (
            (NotInitialized(), 500, b"backend not initialized"),
            (UsersRefused([("42", "no id")]), 500, b"failed to update users"),
        ):
            self.backend.error = error
            got, content, _ = await self.ask("PUT", "/users/sync", DEPLOYED)
            self.assertEqual((got, content[: len(begins)]), (status, begins))

    async def test_a_fault_of_the_node(self) -> None:
        """A fault is 500 without its text, which may hold secrets, and is in the log with its traceback."""
        self.backend.error = RuntimeError("secret")
        for path, verb in (("/info", "GET"), ("/user/sync", "PUT")):
            status, content, _ = await self.ask(verb, path, BEARER)
            self.assertEqual((status, json.loads(content)["code"]), (500, "internal"))
            self.assertNotIn(b"secret", content)
            self.assertEqual(len(self.flushLoggedErrors(RuntimeError)), 1)

    async def test_headers_of_all_replies(self) -> None:
        """No reply may be cached or sniffed, and none names the server."""
        for path, headers in (("/info", BEARER), ("/nothing", BEARER), ("/info", {})):
            _, _, header = await self.ask("GET", path, headers)
            self.assertEqual(header("Cache-Control"), "no-store")
            self.assertEqual(header("X-Content-Type-Options"), "nosniff")
            self.assertIsNone(header("Server"))


class HangUpTests(RestCase):
    """Callers that hang up."""

    async def test_accepted_work_goes_on(self) -> None:
        """Accepted work is finished although the caller is gone, for unary rows and feeds."""
        for verb, path, call in (("POST", "/start", "start"), ("PUT", "/user/sync", "sync_user")):
            self.backend.heard.clear()
            hold = self.backend.hold = Deferred()
            answer = self.send(verb, path, BEARER)
            await until(lambda: self.backend.heard)
            answer.cancel()
            await self.assertFailure(answer, Exception)
            await until(lambda: not self.site.connections)
            self.backend.hold = None
            hold.callback(None)
            await until(lambda call=call: call in self.backend.finished)  # type: ignore[misc]

    async def test_a_late_fault_is_logged(self) -> None:
        """An error in work whose caller is gone is logged."""
        hold = self.backend.hold = Deferred()
        answer = self.send("PUT", "/user/sync", BEARER)
        await until(lambda: self.backend.heard)
        answer.cancel()
        await self.assertFailure(answer, Exception)
        await until(lambda: not self.site.connections)
        hold.errback(RuntimeError("late"))
        self.assertEqual(len(self.flushLoggedErrors(RuntimeError)), 1)
