"""sing-box's own gRPC API, its api service, with v2ray_api where the build has it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Iterable
from contextlib import aclosing
from typing import Any

from twisted.internet.defer import CancelledError, Deferred, DeferredList, DeferredLock
from twisted.internet.task import deferLater

from drivers.channel import ApiFailed, Channel
from drivers.sing_box.config import Endpoint
from drivers.sing_box.fronts import Fronts, Pair, pair_of
from drivers.sing_box.stats import BULK_DEADLINE, DEADLINE, Stats
from drivers.sing_box.table import Line, Table
from drivers.sing_box.tally import Stream, Tally
from node.logs import Logger
from node.reactor import Reactor
from node.waiting import Signal, together
from protos import sing_box_pb2
from protos.handover_pb2 import Label, SingBoxRun
from protos.sing_box_pb2 import Connection, ConnectionEvents, Group, Groups, Nothing, Status, Subscription

DAEMON = "/daemon.StartedService/"
# Seconds between two messages of a stream of connections: what a core that is killed takes along.
INTERVAL = 0.2
# How old a list of connections may be when somebody asks who is online.
FRESH = 0.2
# Between two looks at all connections while there are users whose connections are to be closed: events may be left out.
SWEEP = 2.0
# Between two looks at whether connections have ended.
IDLE_POLL = 0.01
# Between two lists of all connections while somebody wants to know them: at most, and at least where some are missing.
RENEW, MISSED = 10.0, 1.0
# Connections that may end before they are listed: the core remembers 1,000. Seconds until the next list when there were
# more than that: events are left out then, and the ends of which there is none cannot be counted.
UNLISTED = 100
CROWDED = 0.1
# Closes in flight.
IN_FLIGHT = 32


class Api:
    """The APIs of one run of the core.

    `barred` are the (tag, key) pairs whose connections are closed as they come; all of them while `closing`.
    """

    log = Logger()

    def __init__(self, reactor: Reactor, endpoint: Endpoint, live: Iterable[str], fronts: Fronts) -> None:
        self._reactor = reactor
        self.ports = [range(port, port + 1) for port in endpoint.ports]
        self._daemon = Channel(reactor, endpoint.port, [("authorization", f"Bearer {endpoint.secret}")])
        self._stats = None if endpoint.stats_port is None else Stats(reactor, endpoint.stats_port)
        self._tally = None if self._stats else Tally(live)
        self._under_way: list[Deferred[None]] = []
        self._fronts = fronts
        self._barred: set[Pair] = set()
        self._watched = self._closing = self._closed = False
        # Connections of removed users that were closed.
        self.cut = 0
        # How many connections had ended when they were listed, and whether too many have since then.
        self._listed_ends = 0
        self._crowded = Signal()
        self._listing = DeferredLock()
        self._listed: tuple[float, list[Connection]] = (0.0, [])
        # What is kept of the connections for somebody who wants to know, and tells them of new ones.
        self._table: Table | None = None
        self._heard: Callable[[list[Line]], None] = lambda _: None
        self._following = False
        self._renewed_at = 0.0
        self._lacking = Signal()

    def leave(self, run: SingBoxRun) -> None:
        """Note what the next program of the node needs."""
        run.barred.extend(Label(tag=tag, key=key) for tag, key in self._barred)
        run.cut = self.cut
        if self._tally is not None:
            run.tally.CopyFrom(self._tally.packed)

    def go_on(self, run: SingBoxRun) -> None:
        """Go on where an earlier program ended; before anything is asked."""
        self._barred = {(label.tag, label.key) for label in run.barred}
        self.cut = run.cut
        if self._tally is not None:
            self._tally.unpack(run.tally)
        if self._barred:
            self._watch()

    async def close(self) -> None:
        """End all that is under way; nothing is followed any more. May be called again meanwhile."""
        self._closed = True
        under_way = tuple(self._under_way)
        for work in under_way:
            work.cancel()
        await DeferredList(under_way)
        for channel in (self._daemon, self._stats):
            if channel is not None:
                channel.close()

    async def ready(self, seconds: float) -> bool:
        """Ask whether the core answers. Once it does all inbounds are bound."""
        try:
            await self._daemon.call(DAEMON + "GetVersion", Nothing(), sing_box_pb2.Version, seconds)
        except ApiFailed:
            return False
        return True

    async def begin(self) -> None:
        """Follow the connections, where that is what counts them."""
        if self._tally is not None:
            self._watch()

    @property
    def heeds(self) -> bool:
        """Whether the table of `heed` has all connections."""
        return self._following and self._table is not None and not self._table.lacks

    def heed(self, table: Table, heard: Callable[[list[Line]], None]) -> None:
        """Keep the table from now on, and have `heard` told of each connection that is new there, by its line."""
        self._table, self._heard = table, heard
        if self._watched:
            self._lacking.fire()  # else all is in what the stream begins with
        self._watch()
        if not self._closed:
            self._begin(self._again(self._fill, MISSED))

    async def counters(self) -> tuple[dict[str, int], int]:
        """All counters, by the core's names for them, and the bytes that they lack. Raises `ApiFailed`.

        Users are those whom v2ray_api was told of; without it, all but what they carried by live inbounds.
        """
        if self._tally is not None:
            status = await self.status()
            await self.connections()
            # The core's own sum is exact, and older than what is compared with it: it lacks no less than this.
            lacking = status.uplink_total + status.downlink_total - self._tally.carried
            return dict(self._tally.counters), max(0, lacking)
        assert self._stats is not None
        return await self._stats.counters(), 0

    async def some_counters(self, names: Iterable[str]) -> dict[str, int]:
        """Those of these names that there are; what its stream tells of is as old as the stream. Raises `ApiFailed`."""
        if self._tally is not None:
            counters = self._tally.counters
            return {name: counters[name] for name in names if name in counters}
        assert self._stats is not None
        return await self._stats.some_counters(names)

    async def online(self, key: str) -> dict[str, int]:
        """A user's addresses, and when their newest connection from there began (Unix seconds). Raises `ApiFailed`."""
        async with self._listing:
            now = self._reactor.seconds()
            if now - self._listed[0] > FRESH:
                self._listed = now, await self.connections()
        addresses: dict[str, int] = {}
        for connection in self._listed[1]:
            if pair_of(connection)[1] == key:
                address = connection.source.rpartition(":")[0].strip("[]")
                addresses[address] = max(addresses.get(address, 0), connection.created_at // 1000)
        return addresses

    async def status(self) -> Status:
        """Memory, goroutines, and the bytes of all connections. Raises `ApiFailed`."""
        request = Subscription(interval=10**9)
        async with aclosing(self._daemon.stream(DAEMON + "SubscribeStatus", request, Status, DEADLINE)) as stream:
            async for status in stream:
                return status  # type: ignore[no-any-return]
        return Status()

    async def groups(self) -> list[Group]:
        """The groups of outbounds, as they are now. Raises `ApiFailed`."""
        async with aclosing(self._daemon.stream(DAEMON + "SubscribeGroups", Nothing(), Groups, DEADLINE)) as stream:
            async for groups in stream:
                return list(groups.group)
        return []

    async def sys_stats(self) -> sing_box_pb2.SysStatsResponse | None:
        """The run-time's figures; None where the build does not have them. Raises `ApiFailed`."""
        return None if self._stats is None else await self._stats.sys_stats()

    async def started_at(self) -> float:
        """When this run began, Unix seconds. Raises `ApiFailed`."""
        reply = await self._daemon.call(DAEMON + "GetStartedAt", Nothing(), sing_box_pb2.StartedAt, DEADLINE)
        return float(reply.started_at) / 1000

    async def connections(self) -> list[Connection]:
        """The connections that are open now. Raises `ApiFailed`."""
        path, request = DAEMON + "SubscribeConnections", Subscription(interval=10**12)
        number = self._number
        async with aclosing(self._daemon.stream(path, request, ConnectionEvents, BULK_DEADLINE)) as stream:
            async for message in stream:
                if self._tally is not None:
                    Stream(self._tally).take(message)
                self._note(message, number)
                return [event.connection for event in message.events if not event.connection.closed_at]
        return []

    async def bar(self, pairs: Iterable[Pair]) -> None:
        """End the connections of these users by these inbounds, and every new one. Raises `ApiFailed`."""
        self._barred |= set(pairs)
        self._watch()
        await self._sweep()

    async def admit(self, pairs: Iterable[Pair]) -> None:
        """These users may come in again."""
        self._barred -= set(pairs)

    def bars(self, pair: Pair) -> bool:
        """Whether this user's connections end as they come."""
        return pair in self._barred

    async def until_idle(self, seconds: float) -> None:
        """Wait until there are no connections, or this time is over. Raises `ApiFailed`."""
        deadline = self._reactor.seconds() + seconds
        while await self.connections() and self._reactor.seconds() < deadline:
            await deferLater(self._reactor, IDLE_POLL)

    async def end(self, ids: Iterable[str]) -> set[str]:
        """End these connections, of users who may come again. Returns those of which the core says that it did."""
        return await self._close(ids)

    async def end_all(self) -> None:
        """End all connections, and every new one. Raises `ApiFailed`."""
        self._closing = True
        self._watch()
        await self._daemon.call(DAEMON + "CloseAllConnections", Nothing(), Nothing, BULK_DEADLINE)

    def _watch(self) -> None:
        if not self._watched and not self._closed:
            self._watched = True
            steps = [
                (self._follow, INTERVAL),
                (self._sweep, SWEEP),
                *([(self._keep_up, CROWDED)] if self._tally else []),
            ]
            for step, pause in steps:
                self._begin(self._again(step, pause))

    def _begin(self, work: Coroutine[Deferred[Any], Any, None]) -> None:
        """Do this beside what else is done, until we are closed."""
        under_way = Deferred.fromCoroutine(work)
        self._under_way.append(under_way)
        under_way.addErrback(lambda failure: failure.trap(CancelledError) and None)
        under_way.addBoth(lambda _: self._under_way.remove(under_way))

    async def _again(self, step: Callable[[], Awaitable[None]], pause: float) -> None:
        """Do this for as long as we are, whatever it ends with."""
        while True:
            try:
                await step()
            except CancelledError:
                raise
            except ApiFailed:
                pass  # the core is busy, or about to be gone
            except Exception:  # noqa: BLE001 - logged; removed users come in, and bytes are lost, where nobody follows
                self.log.failure("the connections of a core were not followed for a moment")
            await deferLater(self._reactor, pause)

    async def _follow(self) -> None:
        """Take the events as they come."""
        path, request = DAEMON + "SubscribeConnections", Subscription(interval=int(INTERVAL * 1e9))
        counted = Stream(self._tally) if self._tally is not None else None
        number = self._number
        try:
            async with aclosing(self._daemon.stream(path, request, ConnectionEvents)) as stream:
                async for message in stream:
                    self._following = True
                    if counted is not None:
                        counted.take(message)
                        self._note_ends(counted.tally)
                    self._close_barred(message)
                    self._note(message, number)
        finally:
            self._following = False

    @property
    def _number(self) -> int:
        return 0 if self._table is None else self._table.number

    def _note(self, message: ConnectionEvents, number: int) -> None:
        """Keep the table; `number` was so much when these events were asked for."""
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
            self._heard(fresh)

    async def _fill(self) -> None:
        """List the connections where the table lacks some."""
        await self._lacking.wait()
        await self.connections()
        self._lacking = Signal()

    def _note_ends(self, tally: Tally) -> None:
        if tally.ended >= self._listed_ends + UNLISTED:
            self._crowded.fire()

    async def _keep_up(self) -> None:
        """List the connections before the core forgets those that ended: of many it leaves ends out of the stream."""
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

    async def _sweep(self) -> None:
        """Close what events did not tell of."""
        if self._barred:
            await self._close_removed(self._unwanted(await self.connections()))
        elif self._table is not None and self._reactor.seconds() > self._renewed_at + RENEW:
            await self.connections()

    def _unwanted(self, connections: Iterable[Connection]) -> set[str]:
        """Which of these are to be closed."""
        some = list(connections)
        if self._closing:
            return {connection.id for connection in some}
        barred = [connection for connection in some if pair_of(connection) in self._barred]
        return {connection.id for connection in (*barred, *self._fronts.by_barred(some, self._barred))}

    async def _close_removed(self, ids: Iterable[str]) -> None:
        """End these connections of users who were removed, or of all."""
        closed = await self._close(ids)
        self.cut += 0 if self._closing else len(closed)

    async def _close(self, ids: Iterable[str]) -> set[str]:
        """Close these connections; one that is gone by itself is fine. Gives up where the core does not answer."""
        left, closed = iter(ids), set[str]()

        async def work() -> None:
            for id in left:
                try:
                    request = sing_box_pb2.CloseConnectionRequest(id=id)
                    await self._daemon.call(DAEMON + "CloseConnection", request, Nothing, DEADLINE)
                except ApiFailed as error:
                    if error.silent:
                        return
                else:
                    closed.add(id)

        await together(work() for _ in range(IN_FLIGHT))
        return closed
