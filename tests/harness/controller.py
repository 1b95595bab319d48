"""One face for both transports, so that one test body runs over REST and gRPC."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar

import grpc
from google.protobuf.message import Message

from protos import service_pb2
from protos.service_pb2 import BackendStatsResponse, BaseInfoResponse, Empty, StatRequest, StatResponse
from tests.harness.node import TRAFFIC_INTERVAL
from tests.harness.rest import Dialect, LogStream, Rest, RestError, Target, delimited
from tests.harness.rpc import Rpc
from tests.harness.wait import until

M = TypeVar("M", bound=Message)

# What is asked later than this after something was counted tells of it: see TRAFFIC_INTERVAL.
READING_AGE = TRAFFIC_INTERVAL / 10


class ControllerError(Exception):
    """The node refused. `status` is the HTTP status as digits or the name of the gRPC one, `text` the node's words."""

    def __init__(self, status: str, text: str) -> None:
        super().__init__(f"{status}: {text}")
        self.status, self.text = status, text


class Controller(Protocol):
    """What a controller can do. Every method but `close` may raise `ControllerError`."""

    def start(self, backend: service_pb2.Backend) -> BaseInfoResponse: ...
    def stop(self) -> None: ...
    def info(self) -> BaseInfoResponse: ...
    def stats(self, kind: service_pb2.StatType, name: str = "", reset: bool = False) -> StatResponse: ...
    def online(self, name: str) -> service_pb2.OnlineStatResponse: ...
    def online_ips(self, name: str) -> service_pb2.StatsOnlineIpListResponse: ...
    def system_stats(self) -> service_pb2.SystemStatsResponse: ...
    def backend_stats(self) -> BackendStatsResponse: ...
    def sync_user(self, *users: service_pb2.User) -> None: ...
    def sync_users(self, users: Iterable[service_pb2.User]) -> None: ...
    def sync_chunked(self, chunks: Iterable[service_pb2.UsersChunk]) -> None: ...
    def logs(self) -> LogReader: ...
    def close(self) -> None: ...


class _Common:
    """The methods with one request and one reply, over a transport's `_ask(method, request, reply)`."""

    def _ask(self, method: str, request: Message, reply: type[M]) -> M:
        raise NotImplementedError

    def start(self, backend: service_pb2.Backend) -> BaseInfoResponse:
        return self._ask("Start", backend, BaseInfoResponse)

    def stop(self) -> None:
        self._ask("Stop", Empty(), Empty)

    def info(self) -> BaseInfoResponse:
        return self._ask("GetBaseInfo", Empty(), BaseInfoResponse)

    def stats(self, kind: service_pb2.StatType, name: str = "", reset: bool = False) -> StatResponse:
        time.sleep(READING_AGE)
        return self._ask("GetStats", StatRequest(type=kind, name=name, reset=reset), StatResponse)

    def online(self, name: str) -> service_pb2.OnlineStatResponse:
        return self._ask("GetUserOnlineStats", StatRequest(name=name), service_pb2.OnlineStatResponse)

    def online_ips(self, name: str) -> service_pb2.StatsOnlineIpListResponse:
        return self._ask("GetUserOnlineIpListStats", StatRequest(name=name), service_pb2.StatsOnlineIpListResponse)

    def system_stats(self) -> service_pb2.SystemStatsResponse:
        return self._ask("GetSystemStats", Empty(), service_pb2.SystemStatsResponse)

    def backend_stats(self) -> BackendStatsResponse:
        return self._ask("GetBackendStats", Empty(), BackendStatsResponse)

    def sync_users(self, users: Iterable[service_pb2.User]) -> None:
        self._ask("SyncUsers", service_pb2.Users(users=users), Empty)


_ROUTES = {
    "Start": ("POST", "/start"),
    "Stop": ("PUT", "/stop"),
    "GetBaseInfo": ("GET", "/info"),
    "GetStats": ("GET", "/stats"),
    "GetUserOnlineStats": ("GET", "/stats/user/online"),
    "GetUserOnlineIpListStats": ("GET", "/stats/user/online_ip"),
    "GetSystemStats": ("GET", "/stats/system"),
    "GetBackendStats": ("GET", "/stats/backend"),
    "SyncUser": ("PUT", "/user/sync"),
    "SyncUsers": ("PUT", "/users/sync"),
}


class RestController(_Common):
    """A controller over REST. A user of `sync_user` is a request of his own; the first refusal ends it."""

    def __init__(self, node: Target, key: str | None = None, dialect: Dialect = "bearer") -> None:
        self.rest = Rest(node, key, dialect)

    def sync_user(self, *users: service_pb2.User) -> None:
        for user in users:
            self._ask("SyncUser", user, Empty)

    def sync_chunked(self, chunks: Iterable[service_pb2.UsersChunk]) -> None:
        with _rest_errors():
            self.rest.message("PUT", "/users/sync/chunked", delimited(chunks), Empty)

    def logs(self) -> LogReader:
        with _rest_errors():
            stream: LogStream = self.rest.logs()
        return LogReader(stream, stream.close)

    def close(self) -> None:
        """Nothing is kept open."""

    def _ask(self, method: str, request: Message, reply: type[M]) -> M:
        """The interface's operations without a request send no body."""
        with _rest_errors():
            return self.rest.message(*_ROUTES[method], None if isinstance(request, Empty) else request, reply)


class RpcController(_Common):
    """A controller over gRPC. The users of `sync_user` go over one stream."""

    def __init__(self, node: Target, key: str | None = None, dialect: Dialect = "bearer") -> None:
        self.rpc = Rpc(node, key, dialect)

    def sync_user(self, *users: service_pb2.User) -> None:
        with _rpc_errors():
            self.rpc.SyncUser(iter(users))

    def sync_chunked(self, chunks: Iterable[service_pb2.UsersChunk]) -> None:
        with _rpc_errors():
            self.rpc.SyncUsersChunked(iter(chunks))

    def logs(self) -> LogReader:
        call: Any = self.rpc.GetLogs(Empty())
        return LogReader(_details(call), call.cancel)

    def close(self) -> None:
        self.rpc.close()

    def _ask(self, method: str, request: Message, reply: type[M]) -> M:
        with _rpc_errors():
            answer = getattr(self.rpc, method)(request)
        assert isinstance(answer, reply)
        return answer


class LogReader:
    """Reads a log stream in a thread: `lines` grows until `close`, or the end of the `with` block.

    `ended` says that the stream is over; `error` is why, unless it ended by itself.
    """

    def __init__(self, stream: Iterable[str], cancel: Callable[[], object]) -> None:
        self.lines: list[str] = []
        self.error: Exception | None = None
        self._stream, self._cancel = stream, cancel
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    @property
    def ended(self) -> bool:
        return not self._thread.is_alive()

    def find(self, text: str, timeout: float = 10.0) -> str:
        """The first line with this text, once there is one. Raises `AssertionError` if none comes."""
        return until(lambda: next((line for line in self.lines if text in line), ""), timeout, f"a line with {text!r}")

    def close(self) -> None:
        self._cancel()
        self._thread.join(timeout=5)
        assert self.ended, "the log stream does not end when it is closed"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _read(self) -> None:
        try:
            for line in self._stream:
                self.lines.append(line)
        except Exception as error:  # noqa: BLE001 - kept for the test to look at
            self.error = error


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
    """Inside, the node must refuse with this HTTP status, or this gRPC status by name, and words that hold `text`."""
    try:
        yield
    except ControllerError as error:
        assert error.status in (str(http), code), f"refused with {error}, not with {http} or {code}"
        assert text in error.text, f"refused with {error.text!r}, which lacks {text!r}"
    else:
        raise AssertionError(f"not refused; {http} or {code} was due")


def _details(call: Iterable[service_pb2.Log]) -> Iterator[str]:
    try:
        for log in call:
            yield log.detail
    except grpc.RpcError as error:
        if error.code() is not grpc.StatusCode.CANCELLED:
            raise


@contextlib.contextmanager
def _rest_errors() -> Iterator[None]:
    try:
        yield
    except RestError as error:
        raise ControllerError(str(error.response.status), error.response.text) from error


@contextlib.contextmanager
def _rpc_errors() -> Iterator[None]:
    try:
        yield
    except grpc.RpcError as error:
        raise ControllerError(error.code().name, error.details()) from error
