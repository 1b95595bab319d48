"""The client: every operation of METHODS as a coroutine on the reactor, the same over both transports."""

from __future__ import annotations

import copy
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from typing import Any, Self, TypeVar
from weakref import WeakSet

from google.protobuf.message import DecodeError, Message
from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IReactorFromThreads, IReactorTime

from node.api.methods import METHODS
from node.base.aio import Aio
from node.client.failures import DeadlineExceeded, UnexpectedReply
from node.client.stream import EventStream, LogStream
from node.client.target import Target
from node.client.transport import Inbox, Transport
from protos import service_pb2 as pb

# Seconds that a call may take. A Start whose core fails takes the node some ten.
DEADLINE = 30.0
# Bytes of one chunk of users: far below the default limit of gRPC servers.
CHUNK = 1024 * 1024
# Names in one request.
NAMES = 1000

M = TypeVar("M", bound=Message)
P = TypeVar("P", pb.ListUsersResponse, pb.GetLimitsResponse, pb.ListOnlineResponse)
T = TypeVar("T")

_METHODS = {method.name: method for method in METHODS}


def connect(reactor: IReactorTime, target: Target, *, deadline: float = DEADLINE, aio: Aio | None = None) -> Client:
    """Make a client for this node. It connects at the first call. Clients for many nodes can share one running `aio`.

    Raises `OSError` or `ValueError` for a key or a certificate that cannot be read.
    """
    # Each transport's libraries are imported only when it is used: a short program need not wait for both.
    if target.transport == "rest":
        from node.client.rest import RestTransport

        return Client(reactor, RestTransport(reactor, target), deadline)
    from node.client.rpc import RpcTransport

    bridge = aio or Aio(IReactorFromThreads(reactor))
    transport = RpcTransport(reactor, target, bridge, owned=aio is None)
    if aio is None:
        bridge.start()
    return Client(reactor, transport, deadline)


class Client:
    """A client for one node. Every call may raise `NodeError`: the node's own error, or a `NoReply`.

    A cancelled call, or one past its deadline, ends on this side; the node goes on with what it has accepted.
    """

    def __init__(self, reactor: IReactorTime, transport: Transport, deadline: float = DEADLINE) -> None:
        self._reactor = reactor
        self._transport = transport
        self._deadline = deadline
        self._streams: WeakSet[LogStream | EventStream] = WeakSet()

    def within(self, seconds: float) -> Client:
        """The same client with another deadline for each call: `await client.within(5).info()`."""
        other = copy.copy(self)
        other._deadline = seconds
        return other

    async def close(self) -> None:
        """Close all streams and connections."""
        for stream in tuple(self._streams):
            stream.close()
        await self._transport.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # Lifecycle

    async def start(self, backend: pb.Backend) -> pb.BaseInfoResponse:
        return await self.call("Start", pb.BaseInfoResponse, backend)

    async def stop(self) -> None:
        await self.call("Stop", pb.Empty, pb.Empty())

    async def info(self) -> pb.BaseInfoResponse:
        return await self.call("GetBaseInfo", pb.BaseInfoResponse, pb.Empty())

    def logs(self, patience: float = math.inf) -> LogStream:
        """Open a stream of log lines, for `async with`. `patience`: seconds for which it tries to reconnect."""
        lines = self._transport.lines
        stream = LogStream(self._reactor, lambda last: self._timed(lines(_METHODS["GetLogs"], last)), patience)
        self._streams.add(stream)
        return stream

    def events(
        self,
        since: int = 0,
        epoch: str = "",
        kinds: Iterable[str] = (),
        *,
        follow: bool = True,
        patience: float = math.inf,
    ) -> EventStream:
        """Open a stream of events after a number, for `async with`. Without `follow` it ends after the existing ones.

        `patience` is as for `logs`.
        """

        async def connected(request: pb.EventsRequest) -> Inbox[pb.Event]:
            return await self._timed(self._transport.events(_METHODS["StreamEvents"], request))

        request = pb.EventsRequest(since=since, epoch=epoch, kinds=kinds, follow=follow)
        stream = EventStream(self._reactor, connected, request, patience)
        self._streams.add(stream)
        return stream

    # Statistics

    async def system_stats(self) -> pb.SystemStatsResponse:
        return await self.call("GetSystemStats", pb.SystemStatsResponse, pb.Empty())

    async def backend_stats(self) -> pb.BackendStatsResponse:
        return await self.call("GetBackendStats", pb.BackendStatsResponse, pb.Empty())

    async def stats(self, kind: pb.StatType, name: str = "", reset: bool = False) -> pb.StatResponse:
        """Read traffic counters. `reset` sets these to zero; if the reply is not delivered, the next one has them."""
        return await self.call("GetStats", pb.StatResponse, pb.StatRequest(type=kind, name=name, reset=reset))

    async def online(self, name: str) -> pb.OnlineStatResponse:
        return await self.call("GetUserOnlineStats", pb.OnlineStatResponse, pb.StatRequest(name=name))

    async def online_ips(self, name: str) -> pb.StatsOnlineIpListResponse:
        return await self.call("GetUserOnlineIpListStats", pb.StatsOnlineIpListResponse, pb.StatRequest(name=name))

    async def latency(self, name: str = "") -> pb.LatencyResponse:
        return await self.call("GetOutboundsLatency", pb.LatencyResponse, pb.LatencyRequest(name=name))

    async def bill(self, since: str = "") -> pb.Bill:
        """Read the bill since a date (YYYY-MM-DD), or since the month of NODE_QUOTA began."""
        return await self.call("GetBill", pb.Bill, pb.BillRequest(since=since))

    # Users

    async def sync_user(self, *users: pb.User) -> None:
        """Add, change or remove these users, in order: by one stream over gRPC, by a request for each over REST.

        Raises `UsersRefused` for users that cannot be applied; all others are.
        """
        await self.call("SyncUser", pb.Empty, *users)

    async def sync_users(self, users: Iterable[pb.User]) -> None:
        """Replace the whole set of users. Raises `UsersRefused` as above."""
        await self.call("SyncUsers", pb.Empty, pb.Users(users=users))

    async def sync_chunked(self, users: Iterable[pb.User], size: int = CHUNK) -> None:
        """Add, change or remove these users at once, in chunks of up to `size` bytes. Raises `UsersRefused` as above.

        The node takes no more than 64 MiB in all chunks together.
        """
        await self.call("SyncUsersChunked", pb.Empty, *chunks(users, size))

    async def list_users(
        self,
        after: str = "",
        limit: int = 0,
        names: Iterable[str] = (),
        credentials: bool = False,
        traffic: bool = False,
    ) -> pb.ListUsersResponse:
        """Read a page of the users; pass the reply's `next` as `after` for the next page. See `all_users`."""
        request = pb.ListUsersRequest(after=after, limit=limit, names=names, credentials=credentials, traffic=traffic)
        return await self.call("ListUsers", pb.ListUsersResponse, request)

    def all_users(
        self, names: Sequence[str] = (), credentials: bool = False, traffic: bool = False
    ) -> AsyncIterator[pb.ListUsersResponse]:
        """Read all pages. If a page has another `revision` than the one before it, the users have changed meanwhile."""
        return _pages(names, lambda after, part: self.list_users(after, 0, part, credentials, traffic))

    async def drop_connections(
        self, name: str = "", address: str = "", inbound: str = ""
    ) -> pb.DropConnectionsResponse:
        """End the connections to which all of these apply; their users may come back at once."""
        request = pb.DropConnectionsRequest(name=name, address=address, inbound=inbound)
        return await self.call("DropConnections", pb.DropConnectionsResponse, request)

    async def list_online(self, after: str = "", limit: int = 0) -> pb.ListOnlineResponse:
        """Read a page of the users online; pass the reply's `next` as `after` for the next page. See `all_online`."""
        return await self.call("ListOnline", pb.ListOnlineResponse, pb.ListOnlineRequest(after=after, limit=limit))

    def all_online(self) -> AsyncIterator[pb.ListOnlineResponse]:
        """Read all pages."""
        return _pages((), lambda after, _: self.list_online(after))

    async def set_limits(self, limits: Mapping[str, pb.Limits | None]) -> pb.SetLimitsResponse:
        """Set the limits of these users; None removes a user's own limits. The reply lists those that cannot be set."""
        users = [pb.UserLimits(name=name, limits=own) for name, own in limits.items()]
        return await self.call("SetLimits", pb.SetLimitsResponse, pb.SetLimitsRequest(users=users))

    async def get_limits(
        self, after: str = "", limit: int = 0, names: Iterable[str] = (), off: bool = False
    ) -> pb.GetLimitsResponse:
        """Read a page of users' limits and usage; pass the reply's `next` as `after` for the next page."""
        request = pb.GetLimitsRequest(after=after, limit=limit, names=names, off=off)
        return await self.call("GetLimits", pb.GetLimitsResponse, request)

    def all_limits(self, names: Sequence[str] = (), off: bool = False) -> AsyncIterator[pb.GetLimitsResponse]:
        """Read all pages."""
        return _pages(names, lambda after, part: self.get_limits(after, names=part, off=off))

    # Updates

    async def update_core(
        self, core: pb.BackendType, version: str = "", sha256: str = "", back: bool = False
    ) -> pb.Job:
        """Start an update of a core to a release, or `back` to the one before. It runs as a job: see `jobs`."""
        request = pb.UpdateCoreRequest(type=core, version=version, sha256=sha256, back=back)
        return await self.call("UpdateCore", pb.Job, request)

    async def update_geo_files(self, files: Mapping[str, str] | None = None, back: bool = False) -> pb.Job:
        """Start an update to the newest geo files, to these by name and digest, or `back` to those before."""
        named = [pb.GeoFile(name=name, sha256=digest) for name, digest in (files or {}).items()]
        return await self.call("UpdateGeoFiles", pb.Job, pb.UpdateGeoFilesRequest(files=named, back=back))

    async def update_node(self, version: str = "", sha256: str = "") -> pb.Job:
        """Start an update of the node to a version, or to what is installed by now."""
        return await self.call("UpdateNode", pb.Job, pb.UpdateNodeRequest(version=version, sha256=sha256))

    async def jobs(self, identity: str = "") -> list[pb.Job]:
        """Return the update jobs that the node remembers, oldest first, or the one with this identity."""
        return list((await self.call("GetJob", pb.Jobs, pb.JobRequest(id=identity))).jobs)

    # Routing

    async def routing_rules(self) -> pb.RoutingRulesResponse:
        return await self.call("ListRoutingRules", pb.RoutingRulesResponse, pb.Empty())

    async def balancer_info(self, tag: str) -> pb.BalancerInfoResponse:
        return await self.call("GetBalancerInfo", pb.BalancerInfoResponse, pb.BalancerInfoRequest(tag=tag))

    async def test_route(self, route: pb.TestRouteRequest) -> pb.RouteResult:
        return await self.call("TestRoute", pb.RouteResult, route)

    async def add_routing_rule(self, rule: str, should_reset: bool = False) -> None:
        """Add one routing rule, given as JSON."""
        await self.call("AddRoutingRule", pb.Empty, pb.AddRoutingRuleRequest(rule=rule, should_reset=should_reset))

    async def remove_routing_rule(self, rule_tag: str) -> None:
        await self.call("RemoveRoutingRule", pb.Empty, pb.RemoveRoutingRuleRequest(rule_tag=rule_tag))

    async def override_balancer(self, balancer_tag: str, target: str) -> None:
        request = pb.OverrideBalancerTargetRequest(balancer_tag=balancer_tag, target=target)
        await self.call("OverrideBalancerTarget", pb.Empty, request)

    # Any operation

    async def call(self, name: str, reply: type[M], *messages: Message) -> M:
        """Call an operation by its name in METHODS, with these messages."""
        body = await self._timed(self._transport.call(_METHODS[name], messages))
        try:
            return reply.FromString(body)
        except DecodeError as error:
            raise UnexpectedReply(f"the reply is not a {reply.DESCRIPTOR.name} message: {error}") from error

    async def _timed(self, work: Coroutine[Any, Any, T]) -> T:
        def late(_: object, seconds: float) -> T:
            raise DeadlineExceeded(f"no answer within {seconds:g} s")

        return await Deferred.fromCoroutine(work).addTimeout(self._deadline, self._reactor, late)


async def _pages(names: Sequence[str], ask: Callable[[str, Sequence[str]], Awaitable[P]]) -> AsyncIterator[P]:
    """Read all pages of all names, `NAMES` in one request. Raises `UnexpectedReply` if the pages do not advance."""
    for begin in range(0, len(names) or 1, NAMES):
        after, more = "", True
        while more:
            page = await ask(after, names[begin : begin + NAMES])
            yield page
            if (more := bool(page.next)) and page.next <= after:
                raise UnexpectedReply("the node's list of users does not advance: `next` is not after the last page")
            after = page.next


def chunks(users: Iterable[pb.User], size: int) -> Iterator[pb.UsersChunk]:
    """Split users into chunks of at most `size` bytes, or of a single larger user; the last chunk is marked."""
    chunk, index, room = pb.UsersChunk(), 0, size
    for user in users:
        # Each user has a tag, and a length of up to five bytes; the index and the mark have twelve.
        needed = user.ByteSize() + 6
        if chunk.users and needed > room - 14:
            yield chunk
            index += 1
            chunk, room = pb.UsersChunk(index=index), size
        chunk.users.append(user)
        room -= needed
    chunk.last = True
    yield chunk
