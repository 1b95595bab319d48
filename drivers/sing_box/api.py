"""Client of sing-box's gRPC APIs: its `api` service, and v2ray_api where the build has it."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from contextlib import aclosing
from typing import Any, TypeVar

from google.protobuf.message import Message
from twisted.internet.defer import CancelledError, Deferred, DeferredList, DeferredLock
from twisted.internet.task import deferLater

from drivers.process.channel import BULK_DEADLINE, DEADLINE, LATE, ApiFailed, Channel, StatsApi
from drivers.sing_box.config import ApiAddress
from drivers.sing_box.table import Detours, Line, Pair, Table, online_by_key, pair_of
from drivers.sing_box.tally import Stream, Tally
from node.base.logs import Logger
from node.base.reactor import Reactor
from node.base.waiting import Signal, together
from node.contract.counters import Seen
from protos import sing_box_pb2
from protos.handover_pb2 import Label, SingBoxRun
from protos.service_pb2 import BackendStatsResponse
from protos.sing_box_pb2 import Connection, ConnectionEvents, Group, Groups, Nothing, Status, Subscription

M = TypeVar("M", bound=Message)

DAEMON = "/daemon.StartedService/"
# v2ray_api, the exact counters that some builds have.
STATS = "/v2ray.core.app.stats.command.StatsService/"
# Seconds between two messages of a stream of connections; what came since the last one is lost if the core is killed.
INTERVAL = 0.2
# Seconds for which a list of connections serves requests for online users.
FRESH = 0.2
# Seconds between two lists of all connections while users are barred: the stream may omit their events.
SWEEP = 2.0
# Seconds between two checks whether all connections have ended.
IDLE_POLL = 0.01
# Seconds between two lists of all connections while the table is followed: the longest, and the shortest when the table
# lacks some.
RENEW, MISSED = 10.0, 1.0
# Connections that may end before the node lists them: the core remembers 1,000. Seconds until the next list when more
# have ended: then the stream omits events, and bytes of connections whose end was omitted are lost.
UNLISTED = 100
CROWDED = 0.1
# Seconds within which a core that does not hang answers a small request, and from an answer to the next request.
ANSWER = 2.0
LOOK = 0.2
# CloseConnection calls at the same time.
IN_FLIGHT = 32


class Api:
    """The APIs of one core process.

    `_barred` are the (tag, key) pairs whose connections are closed as they begin; while `_closing`, all are.
    """

    log = Logger()

    def __init__(self, reactor: Reactor, endpoint: ApiAddress, live: Iterable[str], detours: Detours) -> None:
        self._reactor = reactor
        self.ports = [range(port, port + 1) for port in endpoint.ports]
        self._daemon = Channel(reactor, endpoint.port, [("authorization", f"Bearer {endpoint.secret}")])
        port = endpoint.stats_port
        self._stats = None if port is None else StatsApi(reactor, Channel(reactor, port), STATS)
        self._tally = None if self._stats else Tally(live)
        self._under_way: list[Deferred[None]] = []
        self._detours = detours
        self._barred: set[Pair] = set()
        self._watched = self._closing = self._closed = False
        # The number of connections of removed users that were closed.
        self.cut = 0
        # How many connections had ended at the last list; the signal fires when UNLISTED more have.
        self._listed_ends = 0
        self._crowded = Signal()
        self._listing = DeferredLock()
        self._online: tuple[float, Mapping[str, Mapping[str, int]]] = (0.0, {})
        # The table of open connections, if one is kept, and the callback for new lines in it.
        self._table: Table | None = None
        self._on_new: Callable[[list[Line]], None] = lambda _: None
        self._following = False
        self._renewed_at = 0.0
        self._lacking = Signal()

    def leave(self, run: SingBoxRun) -> None:
        """Write what the next node process needs into `run`."""
        run.barred.extend(Label(tag=tag, key=key) for tag, key in self._barred)
        run.cut = self.cut
        if self._tally is not None:
            run.tally.CopyFrom(self._tally.packed)

    def go_on(self, run: SingBoxRun) -> None:
        """Restore what a previous node process left; to be called before anything else."""
        self._barred = {(label.tag, label.key) for label in run.barred}
        self.cut = run.cut
        if self._tally is not None:
            self._tally.unpack(run.tally)
        if self._barred:
            self._watch()

    async def close(self) -> None:
        """Cancel everything under way and close the channels. May be called again meanwhile."""
        self._closed = True
        under_way = tuple(self._under_way)
        for work in under_way:
            work.cancel()
        await DeferredList(under_way)
        self._daemon.close()
        if self._stats is not None:
            await self._stats.close()

    async def ready(self, seconds: float) -> bool:
        """Whether the core answers within `seconds`. Once it does, all inbounds are bound."""
        try:
            await self._daemon.call(DAEMON + "GetVersion", Nothing(), sing_box_pb2.Version, seconds)
        except ApiFailed:
            return False
        return True

    def begin(self) -> None:
        """Follow the stream of connections if the build has no other counters."""
        if self._tally is not None:
            self._watch()

    @property
    def table_is_complete(self) -> bool:
        """Whether the kept table has all open connections."""
        return self._following and self._table is not None and not self._table.lacks

    def keep_table(self, table: Table, on_new: Callable[[list[Line]], None]) -> None:
        """Keep the table up to date from now on, and call `on_new` with the lines of new connections."""
        self._table, self._on_new = table, on_new
        if self._watched:
            self._lacking.fire()  # else the stream that starts below begins with a list of all
        self._watch()
        if not self._closed:
            self._begin(self._again(self._fill, MISSED))

    async def counters(self, seen: Seen | None = None) -> tuple[dict[str, int], int]:
        """Return all counters by the core's names, and the number of bytes that they lack. Raises `ApiFailed`.

        `seen`: see `Generation.counters`; only counters of v2ray_api can be left out.

        With v2ray_api these have the users of the configuration; without it all users, except for their bytes in live
        inbounds. After the core has ended, these are the last sums known from its stream.
        """
        if self._tally is not None and self._closed:
            return dict(self._tally.counters), 0
        if self._tally is not None:
            status = await self.status()
            await self.connections()
            # The core's own sum is exact, and was read before the list: at least this many bytes are lacking.
            lacking = status.uplink_total + status.downlink_total - self._tally.carried
            return dict(self._tally.counters), max(0, lacking)
        assert self._stats is not None
        return await self._stats.counters(seen=seen), 0

    async def some_counters(self, names: Iterable[str]) -> dict[str, int]:
        """Return those of these counters that exist; without v2ray_api as of the last event. Raises `ApiFailed`."""
        if self._tally is not None:
            counters = self._tally.counters
            return {name: counters[name] for name in names if name in counters}
        assert self._stats is not None
        return await self._stats.some_counters(names)

    async def online(self) -> Mapping[str, Mapping[str, int]]:
        """By user online: the addresses, and the start of the newest connection from each (Unix seconds).

        Raises `ApiFailed`.
        """
        async with self._listing:
            now = self._reactor.seconds()
            if now - self._online[0] > FRESH:
                self._online = now, online_by_key(await self.connections())
        return self._online[1]

    async def status(self) -> Status:
        """Return memory, goroutines, and the bytes of all connections. Raises `ApiFailed`."""
        return await self._first("SubscribeStatus", Subscription(interval=10**9), Status)

    async def groups(self) -> list[Group]:
        """Return the current groups of outbounds. Raises `ApiFailed`."""
        return list((await self._first("SubscribeGroups", Nothing(), Groups)).group)

    async def figures(self) -> BackendStatsResponse:
        """Return all statistics where the build has v2ray_api; else only those of the api service."""
        if self._stats is not None:
            return await self._stats.figures()
        status = await self.status()
        reply = await self._daemon.call(DAEMON + "GetStartedAt", Nothing(), sing_box_pb2.StartedAt)
        uptime = max(0, int(time.time() - reply.started_at / 1000))
        return BackendStatsResponse(num_goroutine=status.goroutines, sys=status.memory, uptime=uptime)

    async def connections(self) -> list[Connection]:
        """List the open connections. Raises `ApiFailed`."""
        request, number = Subscription(interval=10**12), self._number
        message = await self._first("SubscribeConnections", request, ConnectionEvents, BULK_DEADLINE)
        if self._tally is not None:
            Stream(self._tally).take(message)
        self._note(message, number)
        return [event.connection for event in message.events if not event.connection.closed_at]

    async def _first(self, name: str, request: Message, reply: type[M], seconds: float = DEADLINE) -> M:
        """The first message of a stream; an empty one if the stream has none. Raises `ApiFailed`."""
        async with aclosing(self._daemon.stream(DAEMON + name, request, reply, seconds)) as stream:
            async for message in stream:
                return message
        return reply()

    def bar(self, pairs: Iterable[Pair]) -> None:
        """Close every new connection of these users in these inbounds; `sweep` closes the existing ones.

        Sweeps repeat in the background, also while the core does not answer.
        """
        self._barred |= set(pairs)
        self._watch()

    async def answering(self, work: Coroutine[Deferred[Any], Any, None]) -> None:
        """Await `work` while the core answers small requests beside it. Raises `ApiFailed` if it stops answering."""
        hangs = False

        async def guard() -> None:
            nonlocal hangs
            while await self.ready(ANSWER):
                await deferLater(self._reactor, LOOK)
            hangs = True
            going.cancel()

        going = Deferred.fromCoroutine(work)
        guarding = Deferred.fromCoroutine(guard())
        guarding.addErrback(lambda failure: failure.trap(CancelledError) and None)
        try:
            await going
        except CancelledError:
            if hangs:
                raise ApiFailed(LATE) from None
            raise
        finally:
            guarding.cancel()

    def admit(self, pairs: Iterable[Pair]) -> None:
        """Let these users connect again."""
        self._barred -= set(pairs)

    def bars(self, pair: Pair) -> bool:
        """Whether this user's connections are closed as they begin."""
        return pair in self._barred

    async def until_idle(self, seconds: float) -> None:
        """Wait until no connection is open, or `seconds` have passed. Raises `ApiFailed`."""
        deadline = self._reactor.seconds() + seconds
        while await self.connections() and self._reactor.seconds() < deadline:
            await deferLater(self._reactor, IDLE_POLL)

    async def end_all(self) -> None:
        """Close all connections, and every new one from now on. Raises `ApiFailed`."""
        self._closing = True
        self._watch()
        await self._daemon.call(DAEMON + "CloseAllConnections", Nothing(), Nothing, BULK_DEADLINE)

    def _watch(self) -> None:
        if not self._watched and not self._closed:
            self._watched = True
            steps = [
                (self._follow, INTERVAL),
                (self.sweep, SWEEP),
                *([(self._keep_up, CROWDED)] if self._tally else []),
            ]
            for step, pause in steps:
                self._begin(self._again(step, pause))

    def _begin(self, work: Coroutine[Deferred[Any], Any, None]) -> None:
        """Run `work` in the background until `close`."""
        under_way = Deferred.fromCoroutine(work)
        self._under_way.append(under_way)
        under_way.addErrback(lambda failure: failure.trap(CancelledError) and None)
        under_way.addBoth(lambda _: self._under_way.remove(under_way))

    async def _again(self, step: Callable[[], Awaitable[None]], pause: float) -> None:
        """Repeat `step` for ever, `pause` seconds apart, whatever it raises."""
        while True:
            try:
                await step()
            except CancelledError:
                raise
            except ApiFailed:
                pass  # the core is busy, or about to end
            except Exception:  # noqa: BLE001 - logged; without another try removed users connect and bytes are lost
                self.log.failure(
                    "following a core's connections failed, the node tries again: until then removed users may connect "
                    "and bytes may not be counted"
                )
            await deferLater(self._reactor, pause)

    async def _follow(self) -> None:
        """Process the events of the stream as they arrive."""
        path, request = DAEMON + "SubscribeConnections", Subscription(interval=int(INTERVAL * 1e9))
        counted = Stream(self._tally) if self._tally is not None else None
        number = self._number
        try:
            async with aclosing(self._daemon.stream(path, request, ConnectionEvents)) as stream:
                async for message in stream:
                    self._following = True
                    if counted is not None:
                        counted.take(message)
                        if counted.tally.ended >= self._listed_ends + UNLISTED:
                            self._crowded.fire()
                    self._close_barred(message)
                    self._note(message, number)
        finally:
            self._following = False

    @property
    def _number(self) -> int:
        return 0 if self._table is None else self._table.number

    def _note(self, message: ConnectionEvents, number: int) -> None:
        """Update the table; `number` is the value that `Table.number` had when the events were requested."""
        if self._table is None:
            return
        now = self._reactor.seconds()
        if message.reset:
            self._renewed_at = now
            fresh = self._table.renew(message, number, now)
        else:
            fresh = self._table.take(message, now)
        if self._table.lacks:
            self._lacking.fire()
        if fresh:
            self._on_new(fresh)

    async def _fill(self) -> None:
        """Wait until the table lacks connections, then list them all."""
        await self._lacking.wait()
        await self.connections()
        self._lacking = Signal()

    async def _keep_up(self) -> None:
        """List the connections before the core forgets ended ones: when many end, the stream omits some ends."""
        assert self._tally is not None
        await self._crowded.wait()
        self._crowded = Signal()
        await self.connections()
        before, self._listed_ends = self._listed_ends, self._tally.ended
        if self._tally.ended >= before + UNLISTED:
            self._crowded.fire()

    def _close_barred(self, message: ConnectionEvents) -> None:
        if self._barred or self._closing:
            known = [event.connection for event in message.events if event.HasField("connection")]
            wanted = self._unwanted(connection for connection in known if not connection.closed_at)
            if wanted:
                self._begin(self._close_removed(wanted))

    async def sweep(self) -> None:
        """Close connections of barred users that the stream omitted. Raises `ApiFailed`."""
        if self._barred:
            await self._close_removed(self._unwanted(await self.connections()))
        elif self._table is not None and self._reactor.seconds() > self._renewed_at + RENEW:
            await self.connections()

    def _unwanted(self, connections: Iterable[Connection]) -> set[str]:
        """Return the ids of those that are to be closed."""
        some = list(connections)
        if self._closing:
            return {connection.id for connection in some}
        barred = [connection for connection in some if pair_of(connection) in self._barred]
        return {connection.id for connection in (*barred, *self._detours.by_barred(some, self._barred))}

    async def _close_removed(self, ids: Iterable[str]) -> None:
        """Close these connections, and count them in `cut` unless all connections are being closed."""
        closed = await self.end(ids)
        self.cut += 0 if self._closing else len(closed)

    async def end(self, ids: Iterable[str]) -> set[str]:
        """Close these connections; one that has already ended is fine. Gives up if the core does not answer.

        Returns the ids that the core confirmed.
        """
        left, closed = iter(ids), set[str]()

        async def work() -> None:
            for id in left:
                try:
                    request = sing_box_pb2.CloseConnectionRequest(id=id)
                    await self._daemon.call(DAEMON + "CloseConnection", request, Nothing, ANSWER)
                except ApiFailed as error:
                    if error.silent:
                        return
                else:
                    closed.add(id)

        await together(work() for _ in range(IN_FLIGHT))
        return closed
