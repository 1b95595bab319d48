"""What each key may call, over both protocols, from the one table; delays for wrong keys, and the caller in logs."""

from __future__ import annotations

import http.client
import uuid
from typing import Any

from h2.events import DataReceived, ResponseReceived, StreamEnded, TrailersReceived
from h2.settings import SettingCodes
from twisted.internet import reactor as installed
from twisted.internet.threads import deferToThread

import node.base.aio  # noqa: F401 - first: it sets gRPC's environment

# isort: split
import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from node.api.methods import METHODS, SERVICE, Kind, Method
from node.base.logs import NODE_MARK
from node.door.connections import LATE, WRONG_KEYS, Connection
from node.door.relay import Relay
from node.events.kinds import Kind as Happened
from node.keys.keyfile import Key, Scope, digest_of
from protos.service_pb2 import StatRequest
from tests.node.door.test_entrance import DoorCase, Http2
from tests.node.door.test_rest import framed, sample
from tests.node.door.test_site import BEARER, Client, head, until

reactor: Any = installed
STREAMS = (Kind.LOGS, Kind.EVENTS)
KEYS = {scope: str(uuid.uuid4()) for scope in Scope}
NAMED = [Key(scope.word, scope, digest_of(KEYS[scope])) for scope in Scope]


def bearer(scope: Scope) -> bytes:
    return f"Authorization: Bearer {KEYS[scope]}".encode()


class ScopeCase(DoorCase):
    """A node with a key of each scope in addition to API_KEY."""

    async def setUp(self) -> None:  # type: ignore[override]
        await super().setUp()
        self.backend: Any = self.calls._backend
        self.ring = self.calls._ring
        assert self.calls._journal is not None
        self.calls._journal.tell(Happened.RUNNING, "it runs")
        for authenticator in (self.site.authenticator, self.server._gate._authenticator):
            authenticator.replace(NAMED)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port.getHost().port}"

    def rest(self, verb: str, path: str, key: str, body: bytes = b"") -> int:
        """Return the status of a request."""
        link = http.client.HTTPConnection(self.address, timeout=10)
        try:
            headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/x-protobuf"}
            link.request(verb, path, body or None, headers)
            return link.getresponse().status
        finally:
            link.close()

    def rpc(self, method: Method, key: str, body: bytes = b"") -> str:
        """Return the status of a call; of a stream of lines, whether it begins."""
        metadata = [("authorization", f"Bearer {key}")]
        path = f"/{SERVICE.full_name}/{method.name}"
        with grpc.insecure_channel(self.address) as channel:
            try:
                if method.kind in STREAMS:
                    stream = channel.unary_stream(path)(body, metadata=metadata, timeout=10)
                    # The metadata of a refusal come with its trailers.
                    next(iter(stream))
                elif method.kind is Kind.FEED:
                    channel.stream_unary(path)(iter([body]), metadata=metadata, timeout=10)
                else:
                    channel.unary_unary(path)(body, metadata=metadata, timeout=10)
            except grpc.RpcError as error:
                return str(error.code().name)
        return "OK"


class ScopeTests(ScopeCase):
    """Every row with every scope."""

    async def test_over_rest(self) -> None:
        """A key may call what its scope allows; otherwise it is 403, and the backend is not called."""
        for method in METHODS:
            for verb in method.verbs:
                for scope, key in KEYS.items():
                    self.backend.heard.clear()
                    body = framed(method, sample(method.request))
                    status = await deferToThread(self.rest, verb, method.path, key, body)
                    allowed = scope >= method.scope
                    self.assertEqual(status, 200 if allowed else 403, (method, scope))
                    self.assertEqual(bool(self.backend.heard), allowed and method.kind not in STREAMS)

    async def test_over_grpc(self) -> None:
        """The same over gRPC, where it is PERMISSION_DENIED."""
        self.ring.extend(["a line"])
        for method in METHODS:
            for scope, key in KEYS.items():
                self.backend.heard.clear()
                status = await deferToThread(self.rpc, method, key, sample(method.request).SerializeToString())
                allowed = scope >= method.scope
                right = "OK" if allowed else "PERMISSION_DENIED"
                self.assertEqual(status, right, (method, scope))
                heard = allowed and method.kind not in STREAMS
                self.assertEqual(bool(self.backend.heard), heard)

    async def test_changes_need_all(self) -> None:
        """In the table, only reading methods are open to lesser scopes."""
        lesser = {method.name for method in METHODS if method.scope < Scope.ALL}
        changing = {"Start", "Stop", "SyncUser", "SyncUsers", "SyncUsersChunked"}
        changing |= {"UpdateCore", "UpdateGeoFiles", "UpdateNode"}
        changing |= {"SetLimits", "DropConnections", "AddRoutingRule", "RemoveRoutingRule", "OverrideBalancerTarget"}
        self.assertEqual({method.name for method in METHODS} - lesser, changing)
        metrics = {method.name for method in METHODS if method.scope is Scope.METRICS}
        self.assertEqual(metrics, {"GetSystemStats", "GetBackendStats", "GetOutboundsLatency", "GetBill"})

    async def test_a_reset_needs_all(self) -> None:
        """Counters that a lesser key reset would be lost to the controller."""
        (stats,) = (method for method in METHODS if method.name == "GetStats")
        body = StatRequest(reset=True).SerializeToString()
        for scope, status, code in ((Scope.READ, 403, "PERMISSION_DENIED"), (Scope.ALL, 200, "OK")):
            self.assertEqual(await deferToThread(self.rest, "GET", stats.path, KEYS[scope], body), status)
            self.assertEqual(await deferToThread(self.rpc, stats, KEYS[scope], body), code)
        self.assertEqual(len(self.backend.heard), 2)

    async def test_before_the_body(self) -> None:
        """A lesser key is refused at the headers, over both protocols."""
        client = await self.connect(Client())
        client.send(head(b"PUT /users/sync?x=1", bearer(Scope.READ), b"Content-Length: 60000000"))
        await until(client.holds(b"HTTP/1.1 403"))
        other = await self.connect(Http2())
        names = {":method": "POST", ":scheme": "http", ":path": f"/{SERVICE.full_name}/Start", ":authority": "x"}
        key = ("authorization", f"Bearer {KEYS[Scope.READ]}")
        other.http.send_headers(1, [*names.items(), ("te", "trailers"), ("content-type", "application/grpc"), key])
        other.flush()
        await until(lambda: other.heard(TrailersReceived)() or other.heard(ResponseReceived)())
        said = [event for event in other.events if isinstance(event, TrailersReceived | ResponseReceived)]
        self.assertIn(("grpc-status", "7"), [tuple(header) for header in said[-1].headers])

    async def test_paths_spelled_otherwise(self) -> None:
        """However a path is spelled, the method's scope counts."""
        for path in ("/%73tart", "/start/", "//start", "/x/../start", "/start%2F", "/start;x"):
            for scope in (Scope.METRICS, Scope.READ):
                status = await deferToThread(self.rest, "POST", path, KEYS[scope], b"\x12\x01x")
                self.assertIn(status, (403, 404, 405), path)
        self.assertEqual(self.backend.heard, [])

    async def test_health(self) -> None:
        """For gRPC's own services any key is enough, but one is needed."""

        def status(key: str) -> str:
            with grpc.insecure_channel(self.address) as channel:
                check: Any = health_pb2_grpc.HealthStub(channel).Check
                try:
                    check(health_pb2.HealthCheckRequest(), metadata=[("x-api-key", key)], timeout=10)
                except grpc.RpcError as error:
                    return str(error.code().name)
                return "OK"

        for key in KEYS.values():
            self.assertEqual(await deferToThread(status, key), "OK")
        self.assertEqual(await deferToThread(status, "wrong"), "UNAUTHENTICATED")

    async def test_health_with_a_watcher_that_reads_nothing(self) -> None:
        """It blocks neither checks nor other watchers."""
        watcher = await self.connect(Http2())
        watcher.http.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: 7})
        names = {":method": "POST", ":scheme": "http", ":path": "/grpc.health.v1.Health/Watch", ":authority": "x"}
        key = ("x-api-key", KEYS[Scope.METRICS])
        watcher.http.send_headers(1, [*names.items(), ("te", "trailers"), ("content-type", "application/grpc"), key])
        watcher.http.send_data(1, bytes(5), end_stream=True)
        watcher.flush()
        await until(watcher.heard(DataReceived))

        def check() -> int:
            with grpc.insecure_channel(self.address) as channel:
                stub: Any = health_pb2_grpc.HealthStub(channel)
                return int(stub.Check(health_pb2.HealthCheckRequest(), metadata=[key], timeout=10).status)

        states = health_pb2.HealthCheckResponse
        for ready, told in ((True, states.SERVING), (False, states.NOT_SERVING)) * 2:
            self.server.set_ready(ready)
            end = reactor.seconds() + 5
            while await deferToThread(check) != told:
                self.assertLess(reactor.seconds(), end, "the health service does not hear of it")

    async def test_the_caller_of_a_start(self) -> None:
        """Events name the key and the address of a Start, over both protocols."""
        start = METHODS[0]
        await deferToThread(self.rest, "POST", start.path, KEYS[Scope.ALL])
        await deferToThread(self.rpc, start, KEYS[Scope.ALL])
        lines, _ = self.ring.read(0)
        self.assertEqual(lines, [f"{NODE_MARK}Start by key all from 127.0.0.1"] * 2)


class GoneTests(ScopeCase):
    """A key that is no longer valid."""

    async def test_streams_of_lines_end(self) -> None:
        """Open streams of the key end at once, over both protocols; those of other keys go on."""
        gone, other = await self.connect(Client()), await self.connect(Client())
        gone.send(head(b"GET /logs", bearer(Scope.READ)))
        other.send(head(b"GET /logs", BEARER))
        for client in (gone, other):
            await until(client.holds(b"heartbeat"))
        calling = deferToThread(self.lines)
        await until(lambda: len(self.calls._open) == 3)
        self.calls.dismiss({NAMED[Scope.READ - 1]})
        await until(lambda: gone.closed)
        self.assertEqual(await calling, ("UNAUTHENTICATED", "the key is not valid any more"))
        self.ring.extend(["later"])
        await until(other.holds(b"later"))

    def lines(self) -> tuple[str, str]:
        with grpc.insecure_channel(self.address) as channel:
            metadata = [("x-api-key", KEYS[Scope.READ])]
            stream = channel.unary_stream(f"/{SERVICE.full_name}/GetLogs")(b"", metadata=metadata, timeout=20)
            try:
                for _ in stream:
                    pass
            except grpc.RpcError as error:
                return str(error.code().name), str(error.details())
        return "OK", ""


class GuessTests(ScopeCase):
    """Many wrong keys from one address, which all clients share here."""

    async def exhaust(self) -> None:
        """Send as many wrong keys as are answered at once."""
        for _ in range(WRONG_KEYS.at_once):
            client = await self.connect(Client())
            client.send(head(b"GET /info", b"x-api-key: wrong"))
            await until(client.holds(b"HTTP/1.1 401"))
            client.transport.abortConnection()

    async def test_late_over_rest(self) -> None:
        """Then the answer is delayed, though valid keys from there are answered at once."""
        await self.exhaust()
        late = await self.connect(Client())
        late.send(head(b"PUT /users/sync", b"x-api-key: wrong", b"Content-Length: 5"), b"12345")
        right = await self.connect(Client())
        right.send(head(b"GET /info", BEARER))
        await until(right.holds(b"HTTP/1.1 200"))
        self.assertEqual(late.received, b"")
        self.clock.advance(LATE)
        await until(late.holds(b"HTTP/1.1 401"))
        await until(late.holds(b"missing or wrong API key"))

    async def test_late_over_grpc(self) -> None:
        """That connection passes nothing on for a while; valid keys on others are answered at once."""
        await self.exhaust()
        wrong = await self.connect(Http2())
        wrong.ask(1, "wrong")
        await until(lambda: any(one.transport.protocol._inner._held_back.pending for one in self.relayed()))
        self.assertEqual(await deferToThread(self.rpc, METHODS[0], KEYS[Scope.ALL]), "OK")
        self.assertIsNone(wrong.heard(StreamEnded)())
        self.clock.advance(LATE)
        await until(wrong.heard(StreamEnded))
        wrong.ask(3)
        await until(lambda: [event.stream_id for event in wrong.events if isinstance(event, StreamEnded)] == [1, 3])

    async def test_gone_while_it_waits(self) -> None:
        """Nothing is kept of a client that hangs up meanwhile."""
        await self.exhaust()
        await until(lambda: not self.site.connections)
        wrong = await self.connect(Http2())
        wrong.ask(1, "wrong")
        await until(lambda: any(one.transport.protocol._inner._held_back.pending for one in self.relayed()))
        wrong.transport.abortConnection()
        self.clock.advance(LATE)
        await until(lambda: not self.site.connections)
        self.site.connections.sum_up()
        self.assertEqual((self.upstream._clients, self.clock.getDelayedCalls()), ({}, []))

    def relayed(self) -> list[Connection]:
        """The connections that speak HTTP/2 by now."""
        return [one for one in self.site.connections if isinstance(one.transport.protocol._inner, Relay)]
