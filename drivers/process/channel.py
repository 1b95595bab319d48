"""A gRPC channel to one run of a core, and the calls for counters, which two services of the cores have."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from typing import TypeVar

from google.protobuf.message import DecodeError, Message
from twisted.internet.defer import ensureDeferred
from twisted.internet.endpoints import TCP4ClientEndpoint
from twisted.internet.protocol import Factory

from node.base.alarm import Alarm
from node.base.errors import CoreFailed, Unsupported
from node.base.reactor import Reactor
from node.base.slices import a_turn
from node.base.sockets import dial
from node.base.waiting import Signal, together
from node.contract.counters import Seen
from node.http2 import headers
from node.http2.client import ClientConnection
from node.http2.stream import End, Status, Stream
from protos import xray_pb2
from protos.columns_pb2 import Counters, Stats
from protos.service_pb2 import BackendStatsResponse

# Seconds for a connection attempt; the core is on this machine.
CONNECT = 2.0
OVER = "the core has ended"
ENDED = "the core ended before it answered"
LATE = "the core did not answer in time"

# The beginnings of errors, by what the core was asked.
COUNTERS = "the core did not report its counters"
ONLINE = "the core did not report online users"
LATENCY = "the core did not report latencies"
ROUTING = "the core did not answer a routing call"
USERS = "the core did not list its users"
# Deployed controllers match the beginning of this text, and do not act on a node with it.
FIGURES = "failed to get sys stats"

_SILENT = (None, Status.DEADLINE_EXCEEDED, Status.UNAVAILABLE)
M = TypeVar("M", bound=Message)
# A call that has begun.
Call = Stream

# Seconds: for a usual call, and for one with a long reply.
DEADLINE = 5.0
BULK_DEADLINE = 10.0
# Cores limit a request to 4 MiB, which cannot be changed.
MAX_REQUEST = 4 * 1024 * 1024 - 64 * 1024
# Counters of a reply handled at a time (some 5 ms); in between the reactor serves others.
SLICE = 10_000


class ApiFailed(Exception):
    """A call that the core refused or did not answer. The text is the core's, or the reason why there is no answer."""

    def __init__(self, text: str, status: int | None = None) -> None:
        super().__init__(text)
        # The core has no such call; it did not answer; it has nothing of that name.
        self.unsupported = status == Status.UNIMPLEMENTED
        self.silent = status in _SILENT
        self.unknown = not self.unsupported and (status == Status.NOT_FOUND or "not found" in str(self))


@contextmanager
def asking(what: str, unsupported: str = "") -> Iterator[None]:
    """Turn `ApiFailed` into `CoreFailed` with the text `what`, or into `Unsupported` if the core has no such call."""
    try:
        yield
    except ApiFailed as error:
        if error.unsupported and unsupported:
            raise Unsupported(unsupported) from error
        raise CoreFailed(f"{what}: {error}") from error


class Channel:
    """Calls by path. The first call, and one after a loss, makes the connection. `metadata` is sent with each call."""

    def __init__(self, reactor: Reactor, target: str | int, metadata: Sequence[tuple[str, str]] = ()) -> None:
        """`target` is the path of a socket, or a port of this machine."""
        self._reactor = reactor
        self._target = target
        self._metadata = tuple(metadata)
        self._connection = ClientConnection()
        # The current connection, once it is made, and earlier ones with calls under way.
        self._connections: list[ClientConnection] = []
        # Fires when the connection is made, or cannot be; and why the last attempt failed.
        self._coming: Signal | None = None
        self._fault = ""
        self._closed = False
        # By call under way, when it is late (seconds). One alarm for all: a call takes less time than an alarm.
        self._deadlines: dict[Stream, float] = {}
        self._alarm = Alarm(reactor, self._end_late)

    def close(self) -> None:
        """Close all connections: calls under way and later ones fail. May be called again."""
        self._closed = True
        self._alarm.cancel()
        connections, self._connections = self._connections, []
        for connection in connections:
            connection.close(End(None, ENDED))

    async def call(self, path: str, request: Message | bytes, reply: type[M], seconds: float = DEADLINE) -> M:
        """Return the reply to one request. Raises `ApiFailed`."""
        return await self.result(await self.begin(path, request, seconds), reply)

    async def begin(self, path: str, request: Message | bytes, seconds: float | None = DEADLINE) -> Stream:
        """Begin a call, which ends after so many seconds; `result` or `give_up` must follow. Raises `ApiFailed`."""
        while not self._connection.usable:
            await self._connect()
        if self._closed:
            raise ApiFailed(OVER)
        body = request if isinstance(request, bytes) else request.SerializeToString()
        stream = self._connection.open(headers.request(path, self._metadata), body)
        if seconds is not None:
            self._deadlines[stream] = self._reactor.seconds() + seconds
            self._alarm.within(seconds)
        return stream

    def flush(self) -> None:
        """Send the calls that have begun now, and not at the end of the reactor's turn."""
        self._connection.flush()

    async def result(self, stream: Stream, reply: type[M]) -> M:
        """Wait for the one reply to a call. Raises `ApiFailed`."""
        try:
            while stream.end is None:
                await stream.progress()
        finally:
            self.give_up(stream)
        _require(stream.end)
        if not stream.messages:
            raise ApiFailed("the core answered without a message", Status.INTERNAL)
        return _read(reply, stream.messages[0])

    async def stream(
        self, path: str, request: Message, reply: type[M], seconds: float | None = None
    ) -> AsyncGenerator[M, None]:
        """Yield the replies to one request, until the core or the reader ends the call. Raises `ApiFailed`."""
        stream = await self.begin(path, request, seconds)
        try:
            while True:
                while stream.messages:
                    yield _read(reply, stream.take())
                if stream.end is not None:
                    break
                await stream.progress()
        finally:
            self.give_up(stream)
        _require(stream.end)

    def give_up(self, stream: Stream) -> None:
        """End a call, if it has not ended."""
        self._deadlines.pop(stream, None)
        stream.close()

    async def _connect(self) -> None:
        """Make a connection, or wait for the one that is being made. Raises `ApiFailed`."""
        if self._closed:
            raise ApiFailed(OVER)
        if self._coming is None or self._coming.fired:
            self._coming = Signal()
            ensureDeferred(self._make(self._coming))
        await self._coming.wait()
        if self._fault:
            raise ApiFailed(self._fault, Status.UNAVAILABLE)

    async def _make(self, coming: Signal) -> None:
        try:
            connection = self._connection = await self._dialled()
        except Exception as error:  # noqa: BLE001 - whatever the error, it is the callers' answer
            self._fault = f"the core's API cannot be reached: {error}"
        else:
            self._fault = ""
            self._connections = [*(before for before in self._connections if before.busy), connection]
            if self._closed:
                connection.close(End(None, ENDED))
        coming.fire()

    async def _dialled(self) -> ClientConnection:
        connection = ClientConnection()
        if not isinstance(self._target, int):
            dial(self._reactor, self._target, connection)
            return connection
        factory = Factory.forProtocol(lambda: connection)
        factory.noisy = False
        await TCP4ClientEndpoint(self._reactor, "127.0.0.1", self._target, CONNECT).connect(factory)
        with suppress(OSError):  # already broken, which reading will report
            connection.transport.setTcpNoDelay(True)
        return connection

    def _end_late(self) -> None:
        now = self._reactor.seconds()
        for stream in [stream for stream, deadline in self._deadlines.items() if deadline <= now]:
            # A caller may give up several calls when the first one is late.
            if self._deadlines.pop(stream, None) is not None:
                stream.close(End(Status.DEADLINE_EXCEEDED, LATE))
        if self._deadlines:
            self._alarm.within(min(self._deadlines.values()) - now)


def _read(reply: type[M], message: bytes) -> M:
    """Parse a message. Raises `ApiFailed`."""
    try:
        return reply.FromString(message)
    except DecodeError as error:
        raise ApiFailed(f"the core's answer cannot be read: {error}", Status.INTERNAL) from error


def _counters(rows: Sequence[bytes]) -> Iterable[tuple[str, int]]:
    """Parse the core's messages of single counters, all at once if each has a value. Raises `ApiFailed`."""
    columns = _read(Counters, b"".join(rows))
    if len(columns.name) == len(columns.value) == len(rows):
        return zip(columns.name, columns.value, strict=True)
    # A message has no value if that is zero.
    stats = _read(xray_pb2.QueryStatsResponse, Stats(stat=rows).SerializeToString()).stat
    return ((stat.name, stat.value) for stat in stats)


def _require(end: End) -> None:
    """Raise `ApiFailed` unless the call ended with OK."""
    if end.status != Status.OK:
        raise ApiFailed(end.text or f"status {end.status}", end.status)


class StatsApi:
    """Calls of one core process; `service` is the path of its counters. All calls raise `ApiFailed`."""

    def __init__(self, reactor: Reactor, channel: Channel, service: str) -> None:
        self._reactor = reactor
        self._channel = channel
        self._service = service

    async def close(self) -> None:
        self._channel.close()

    async def figures(self, seconds: float = DEADLINE) -> BackendStatsResponse:
        """The statistics of Go's run-time: the core's own message has the same fields."""
        path, request = f"{self._service}GetSysStats", xray_pb2.Nothing()
        return await self._channel.call(path, request, BackendStatsResponse, seconds)

    async def counters(self, pattern: str = "", seen: Seen | None = None) -> dict[str, int]:
        """All counters by name; of an Xray those whose name contains `pattern`. `seen`: see `Generation.counters`.

        Never with reset: the counts in a lost reply would be lost.
        """
        path, request = f"{self._service}QueryStats", xray_pb2.QueryStatsRequest(pattern=pattern, reset=False)
        reply = await self._channel.call(path, request, Stats, BULK_DEADLINE)
        now = set(reply.stat)
        if len(now) > SLICE:
            await a_turn(self._reactor)
        new = iter(now.difference(seen.rows if seen else ()))
        counters = dict[str, int]()
        while part := [*islice(new, SLICE)]:
            counters.update(_counters(part))
            if len(part) == SLICE:
                await a_turn(self._reactor)
        if seen:
            seen.rows = now
        return counters

    async def some_counters(self, names: Iterable[str]) -> dict[str, int]:
        """The counters of these names that the core has. Names too long for a request are left out."""
        requests = [xray_pb2.GetStatsRequest(name=name) for name in names if len(name.encode()) < MAX_REQUEST]
        found = await together(self._known("GetStats", one, xray_pb2.GetStatsResponse) for one in requests)
        return {reply.stat.name: reply.stat.value for reply in found if reply is not None}

    async def _known(self, name: str, request: Message, reply: type[M]) -> M | None:
        """Call the service; None if the core has nothing of the requested name."""
        try:
            return await self._channel.call(self._service + name, request, reply)
        except ApiFailed as error:
            if error.unknown:
                return None
            raise
