"""Clients for every operation over REST and over gRPC, with the messages of deployed controllers."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from io import BytesIO
from types import TracebackType
from typing import Any, Protocol, Self

import grpc
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from google.protobuf.proto import parse_length_prefixed

from protos.service_pb2 import Empty, Event, EventsRequest
from scripts.staging.acceptor import wake
from scripts.staging.rpc import SERVICE, Rpc
from scripts.staging.target import Dialect, Target
from tests.harness.rest import Response, Rest, delimited

# The interface's paths as literals, independent of the product's code.
PATHS = {
    "Start": "POST /start",
    "Stop": "PUT /stop",
    "GetBaseInfo": "GET /info",
    "GetLogs": "GET /logs",
    "GetSystemStats": "GET /stats/system",
    "GetBackendStats": "GET /stats/backend",
    "GetStats": "GET /stats",
    "GetUserOnlineStats": "GET /stats/user/online",
    "GetUserOnlineIpListStats": "GET /stats/user/online_ip",
    "GetOutboundsLatency": "GET /stats/latency",
    "GetBill": "GET /stats/bill",
    "SyncUser": "PUT /user/sync",
    "SyncUsers": "PUT /users/sync",
    "SyncUsersChunked": "PUT /users/sync/chunked",
    "ListUsers": "GET /users",
    "SetLimits": "PUT /users/limits",
    "GetLimits": "GET /users/limits",
    "DropConnections": "PUT /users/drop",
    "ListOnline": "GET /users/online",
    "ListRoutingRules": "GET /routing/rules",
    "GetBalancerInfo": "POST /routing/balancer",
    "TestRoute": "POST /routing/test",
    "AddRoutingRule": "PUT /routing/rules",
    "RemoveRoutingRule": "DELETE /routing/rules",
    "OverrideBalancerTarget": "PUT /routing/balancer/override",
    "UpdateCore": "PUT /core/update",
    "UpdateGeoFiles": "PUT /geo/update",
    "UpdateNode": "PUT /node/update",
    "GetJob": "GET /jobs",
    "StreamEvents": "GET /events",
}
_LACKING = ("404", "405", "501", "UNIMPLEMENTED")


class Refused(Exception):
    """The node refused. `status` is HTTP's as digits, or the name of gRPC's."""

    def __init__(self, status: str, text: str) -> None:
        self.status, self.text = status, text.strip()
        super().__init__(f"{status}: {self.text[:500]}")

    @property
    def lacking(self) -> bool:
        """Whether the node lacks the operation."""
        return self.status in _LACKING


class Lines:
    """Reads a log stream in the background, until its `with` block ends. `over` is why the node ended it."""

    def __init__(self, read: Callable[[], Iterable[str]], close: Callable[[], object]) -> None:
        self.lines: list[str] = []
        self.over = ""
        self._close = close
        self._closed = False
        self._thread = threading.Thread(target=self._read, args=(read,), daemon=True)
        self._thread.start()

    def _read(self, read: Callable[[], Iterable[str]]) -> None:
        try:
            for line in read():
                self.lines.append(line)
            why = "it ended in good order"
        except (Refused, OSError, ValueError, AttributeError, http.client.HTTPException) as error:
            why = f"{type(error).__name__}: {error}"
        except grpc.RpcError as error:
            why = str(_refused(error))
        self.over = "" if self._closed else why

    def ends(self, within: float) -> bool:
        """Whether it ends within so many seconds."""
        self._thread.join(within)
        return not self._thread.is_alive()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closed = True
        self._close()
        self._thread.join(5)


class Wire(Protocol):
    """A client of one protocol, with one key. Refusals of the node raise `Refused`."""

    def call(self, name: str, *messages: Message) -> Any:
        """Call an operation by its name; client streams take any number of messages."""

    def logs(self) -> Lines: ...

    def events(self, since: int = 0, epoch: str = "") -> list[Event]:
        """The kept events after number `since`."""

    def close(self) -> None: ...


class RestWire:
    """REST. SyncUser sends a request for each user, and raises the last refusal."""

    def __init__(self, target: Target, key: str | None = None, dialect: Dialect = "x-api-key") -> None:
        self.rest = Rest(target, key, dialect)

    def call(self, name: str, *messages: Message) -> Any:
        method = SERVICE.methods_by_name[name]
        verb, path = PATHS[name].split()
        if name == "SyncUsersChunked":
            return _reply(method, self.rest.call(verb, path, delimited(messages)))  # type: ignore[arg-type]
        responses = [self.rest.call(verb, path, message) for message in messages]
        return [_reply(method, response) for response in sorted(responses, key=lambda response: response.status)][-1]

    def logs(self) -> Lines:
        connection = self.rest.connection()
        connection.request("GET", "/logs", headers=self.rest.credentials)
        link = connection.sock
        link.settimeout(None)

        def read() -> Iterator[str]:
            with closing(connection), connection.getresponse() as response:
                if response.status != http.client.OK:
                    raise Refused(str(response.status), response.read(500).decode(errors="replace"))
                while line := response.readline():
                    yield line.decode(errors="replace").rstrip("\r\n")

        return Lines(read, lambda: wake(link))

    def events(self, since: int = 0, epoch: str = "") -> list[Event]:
        verb, path = PATHS["StreamEvents"].split()
        response = self.rest.call(verb, path, EventsRequest(since=since, epoch=epoch))
        if response.status != http.client.OK:
            raise Refused(str(response.status), response.text)
        source, found = BytesIO(response.body), list[Event]()
        while (event := parse_length_prefixed(Event, source)) is not None:
            found += [event] if event.kind else []
        return found

    def close(self) -> None:
        """Do nothing: each call has its own connection."""


class GrpcWire:
    """gRPC. All calls share a connection."""

    def __init__(self, target: Target, key: str | None = None, dialect: Dialect = "x-api-key") -> None:
        self.rpc = Rpc(target, key, dialect)

    def call(self, name: str, *messages: Message) -> Any:
        invoke = getattr(self.rpc, name)
        try:
            return invoke(iter(messages) if SERVICE.methods_by_name[name].client_streaming else messages[0])
        except grpc.RpcError as error:
            raise _refused(error) from error

    def logs(self) -> Lines:
        call = self.rpc.GetLogs(Empty())
        return Lines(lambda: (log.detail for log in call), call.cancel)

    def events(self, since: int = 0, epoch: str = "") -> list[Event]:
        try:
            return list(self.rpc.StreamEvents(EventsRequest(since=since, epoch=epoch), timeout=10))
        except grpc.RpcError as error:
            raise _refused(error) from error

    def close(self) -> None:
        self.rpc.close()


def _refused(error: Any) -> Refused:
    return Refused(error.code().name, error.details() or "")


def _reply(method: MethodDescriptor, response: Response) -> Any:
    if response.status // 100 != 2:
        raise Refused(str(response.status), response.body.decode(errors="replace"))
    return GetMessageClass(method.output_type).FromString(response.body)
