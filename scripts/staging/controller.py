"""Synchronous controllers on the product's client: one test body runs over REST and gRPC."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager
from functools import cached_property
from types import TracebackType
from typing import Any, Literal, Protocol, Self, TypeVar

from google.protobuf.message import Message
from twisted.internet.defer import Deferred

from node.api.auth import Dialect
from node.base.errors import NodeError
from node.client import DEADLINE, Client, LogStream, NoReply, Target, connect
from protos import service_pb2
from protos.service_pb2 import BackendStatsResponse, BaseInfoResponse, Empty, LatencyResponse, StatResponse
from scripts.staging import background
from scripts.staging.rpc import Rpc
from scripts.staging.target import Dialect as Speech
from scripts.staging.target import Target as Where
from scripts.staging.wait import until

M = TypeVar("M", bound=Message)
T = TypeVar("T")


class ControllerError(Exception):
    """The node refused. `status` is the HTTP status as digits or the gRPC status by name, `text` the node's message.

    If the node did not reply, the client's `NoReply` is raised instead.
    """

    def __init__(self, status: str, text: str) -> None:
        super().__init__(f"{status}: {text}")
        self.status, self.text = status, text


class Controller(Protocol):
    """The calls of a controller. Every method but `close` may raise `ControllerError`."""

    def start(self, backend: service_pb2.Backend) -> BaseInfoResponse: ...
    def stop(self) -> None: ...
    def info(self) -> BaseInfoResponse: ...
    def stats(self, kind: service_pb2.StatType, name: str = "", reset: bool = False) -> StatResponse: ...
    def online(self, name: str) -> service_pb2.OnlineStatResponse: ...
    def online_ips(self, name: str) -> service_pb2.StatsOnlineIpListResponse: ...
    def system_stats(self) -> service_pb2.SystemStatsResponse: ...
    def backend_stats(self) -> BackendStatsResponse: ...
    def latency(self, name: str = "") -> LatencyResponse: ...
    def routing_rules(self) -> list[tuple[str, str]]: ...
    def balancer_info(self, tag: str) -> service_pb2.BalancerInfoResponse: ...
    def test_route(self, route: service_pb2.TestRouteRequest) -> service_pb2.RouteResult: ...
    def add_routing_rule(self, rule: str, should_reset: bool = False) -> None: ...
    def remove_routing_rule(self, rule_tag: str) -> None: ...
    def override_balancer(self, balancer_tag: str, target: str) -> None: ...
    def sync_user(self, *users: service_pb2.User) -> None: ...
    def sync_users(self, users: Iterable[service_pb2.User]) -> None: ...
    def sync_chunked(self, chunks: Iterable[service_pb2.UsersChunk]) -> None: ...
    def set_limits(self, limits: Mapping[str, service_pb2.Limits | None]) -> service_pb2.SetLimitsResponse: ...
    def limits(self, *names: str, off: bool = False) -> service_pb2.GetLimitsResponse: ...
    def call(self, name: str, reply: type[M], *messages: Message) -> M: ...
    def logs(self) -> LogReader: ...
    def close(self) -> None: ...


class _Common:
    """The calls of the product's client, one after the other. A subclass for each transport provides `_client`."""

    def __init__(self, target: Target, deadline: float) -> None:
        self._target = target
        self._deadline = deadline

    def _client(self) -> AbstractAsyncContextManager[Client]:
        raise NotImplementedError

    def _status(self, error: NodeError) -> str:
        raise NotImplementedError

    def start(self, backend: service_pb2.Backend) -> BaseInfoResponse:
        return self._run(lambda client: client.start(backend))

    def stop(self) -> None:
        self._run(lambda client: client.stop())

    def info(self) -> BaseInfoResponse:
        return self._run(lambda client: client.info())

    def stats(self, kind: service_pb2.StatType, name: str = "", reset: bool = False) -> StatResponse:
        return self._run(lambda client: client.stats(kind, name, reset))

    def online(self, name: str) -> service_pb2.OnlineStatResponse:
        return self._run(lambda client: client.online(name))

    def online_ips(self, name: str) -> service_pb2.StatsOnlineIpListResponse:
        return self._run(lambda client: client.online_ips(name))

    def system_stats(self) -> service_pb2.SystemStatsResponse:
        return self._run(lambda client: client.system_stats())

    def backend_stats(self) -> BackendStatsResponse:
        return self._run(lambda client: client.backend_stats())

    def latency(self, name: str = "") -> LatencyResponse:
        return self._run(lambda client: client.latency(name))

    def routing_rules(self) -> list[tuple[str, str]]:
        """Outbound tag and rule tag of each rule."""
        found = self._run(lambda client: client.routing_rules())
        return [(rule.outbound_tag, rule.rule_tag) for rule in found.rules]

    def balancer_info(self, tag: str) -> service_pb2.BalancerInfoResponse:
        return self._run(lambda client: client.balancer_info(tag))

    def test_route(self, route: service_pb2.TestRouteRequest) -> service_pb2.RouteResult:
        return self._run(lambda client: client.test_route(route))

    def add_routing_rule(self, rule: str, should_reset: bool = False) -> None:
        self._run(lambda client: client.add_routing_rule(rule, should_reset))

    def remove_routing_rule(self, rule_tag: str) -> None:
        self._run(lambda client: client.remove_routing_rule(rule_tag))

    def override_balancer(self, balancer_tag: str, target: str) -> None:
        self._run(lambda client: client.override_balancer(balancer_tag, target))

    def sync_user(self, *users: service_pb2.User) -> None:
        self._run(lambda client: client.sync_user(*users))

    def sync_users(self, users: Iterable[service_pb2.User]) -> None:
        self._run(lambda client: client.sync_users(users))

    def sync_chunked(self, chunks: Iterable[service_pb2.UsersChunk]) -> None:
        self._run(lambda client: client.call("SyncUsersChunked", Empty, *chunks))

    def set_limits(self, limits: Mapping[str, service_pb2.Limits | None]) -> service_pb2.SetLimitsResponse:
        return self._run(lambda client: client.set_limits(limits))

    def limits(self, *names: str, off: bool = False) -> service_pb2.GetLimitsResponse:
        return self._run(lambda client: client.get_limits(names=names, off=off))

    def call(self, name: str, reply: type[M], *messages: Message) -> M:
        """Call an operation by its name, with these messages unchanged."""
        return self._run(lambda client: client.call(name, reply, *messages))

    def logs(self, patience: float = 0) -> LogReader:
        """Read the log stream. A lost stream is reopened behind the last line read, for up to `patience` seconds."""
        with self._errors():
            return LogReader(self._client(), patience)

    def tail(self, quiet: float = 0.5) -> list[str]:
        """The log lines up to the first pause of `quiet` seconds."""

        async def read(client: Client) -> list[str]:
            lines: list[str] = []
            async with client.logs() as stream:
                while more := await stream.next(quiet):
                    lines += more
            return lines

        return self._run(read)

    def _run(self, work: Callable[[Client], Coroutine[Any, Any, T]]) -> T:
        async def whole() -> T:
            async with self._client() as client:
                return await work(client)

        with self._errors():
            return background.run(whole)

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except NoReply:
            raise
        except NodeError as error:
            raise ControllerError(self._status(error), error.text) from error


class RestController(_Common):
    """A controller over REST. Each call opens a connection of its own; `sync_user` sends a request for each user."""

    def __init__(
        self, node: Where, key: str | None = None, dialect: Speech = "bearer", deadline: float = DEADLINE
    ) -> None:
        super().__init__(target(node, "rest", key, dialect), deadline)

    def close(self) -> None:
        """Do nothing: no connection is kept open."""

    def _client(self) -> AbstractAsyncContextManager[Client]:
        return connect(background.reactor, self._target, deadline=self._deadline)

    def _status(self, error: NodeError) -> str:
        return str(error.http)


class RpcController(_Common):
    """A controller over gRPC, with one connection. `sync_user` sends its users over one stream."""

    def __init__(
        self, node: Where, key: str | None = None, dialect: Speech = "bearer", deadline: float = DEADLINE
    ) -> None:
        super().__init__(target(node, "grpc", key, dialect), deadline)
        self._node, self._key, self._dialect = node, key, dialect
        self._kept = connect(background.reactor, self._target, deadline=deadline, aio=background.aio())

    @cached_property
    def rpc(self) -> Rpc:
        """Raw gRPC calls, for what the client does not offer. The caller closes it."""
        return Rpc(self._node, self._key, self._dialect)

    def close(self) -> None:
        background.run(self._kept.close)

    def _client(self) -> AbstractAsyncContextManager[Client]:
        return contextlib.nullcontext(self._kept)

    def _status(self, error: NodeError) -> str:
        return error.grpc


def target(node: Where, transport: Literal["rest", "grpc"], key: str | None, dialect: Speech) -> Target:
    """The node's address and key as the product's client takes them."""
    port = node.rest_port if transport == "rest" else node.grpc_port
    spoken = Dialect.DOCUMENT if dialect == "bearer" else Dialect.DEPLOYED
    return Target(transport, node.host, port, node.key if key is None else key, node.pem, spoken)


class LogReader:
    """Reads a log stream in the background: `lines` grows until `close`, or the end of the `with` block.

    `ended` is true once the stream is over; `error` is why, unless it was closed. A lost stream is reopened for up to
    `patience` seconds.
    """

    def __init__(self, client: AbstractAsyncContextManager[Client], patience: float = 0) -> None:
        self.lines: list[str] = []
        self._patience = patience
        self.error: Exception | None = None
        self._over = threading.Event()
        self._stream = background.run(lambda: self._open(client))

    @property
    def ended(self) -> bool:
        return self._over.is_set()

    def find(self, text: str, timeout: float = 10.0) -> str:
        """Wait for the first line with this text. Raises `AssertionError` if none comes."""
        return until(lambda: next((line for line in self.lines if text in line), ""), timeout, f"a line with {text!r}")

    def close(self) -> None:
        background.reactor.callFromThread(self._stream.close)
        assert self._over.wait(5), "the log stream did not end within 5 s of its close"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def _open(self, owner: AbstractAsyncContextManager[Client]) -> LogStream:
        client = await owner.__aenter__()
        try:
            stream = await client.logs(patience=self._patience).open()
        except BaseException:
            await owner.__aexit__(None, None, None)
            raise
        Deferred.fromCoroutine(self._read(owner, stream))
        return stream

    async def _read(self, owner: AbstractAsyncContextManager[Client], stream: LogStream) -> None:
        try:
            async for line in stream:
                self.lines.append(line)
        except NodeError as error:
            self.error = error
        await owner.__aexit__(None, None, None)
        self._over.set()


def traffic(response: StatResponse) -> dict[str, dict[str, int]]:
    """Bytes by name and by direction ("uplink", "downlink")."""
    table: dict[str, dict[str, int]] = {}
    for row in response.stats:
        directions = table.setdefault(row.name, {})
        assert row.type not in directions, f"two rows of {row.name} {row.type}"
        directions[row.type] = row.value
    return table


@contextlib.contextmanager
def refused(http: int, code: str, text: str = "") -> Iterator[None]:
    """Inside, the node must refuse with this HTTP status (or gRPC status name) and a message that contains `text`."""
    try:
        yield
    except ControllerError as error:
        assert error.status in (str(http), code), f"refused with {error}, expected {http} or {code}"
        assert text in error.text, f"refused with {error.text!r}, expected a text with {text!r}"
    else:
        raise AssertionError(f"not refused, expected {http} or {code}")
