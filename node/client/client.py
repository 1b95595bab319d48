"""Every operation of METHODS as a coroutine of the reactor's, the same over both transports."""

from __future__ import annotations

import copy
import math
from collections.abc import AsyncIterator, Coroutine, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar
from weakref import WeakSet

from google.protobuf.message import DecodeError, Message
from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IReactorFromThreads, IReactorTime

from node.aio import Aio
from node.api.methods import METHODS
from node.client.events import EventStream
from node.client.failures import DeadlineExceeded, UnexpectedReply
from node.client.inbox import Inbox
from node.client.logs import LogStream
from node.client.target import Target
from node.client.transport import Transport
from protos import service_pb2 as pb

# Seconds that a call may take. A Start that does not come up takes the node some ten.
DEADLINE = 30.0
# Bytes of one chunk of users: far below what any gRPC server takes by default.
CHUNK = 1024 * 1024
# Names that one request asks for.
NAMES = 1000

M = TypeVar("M", bound=Message)
T = TypeVar("T")

_METHODS = {method.name: method for method in METHODS}


def connect(reactor: IReactorTime, target: Target, *, deadline: float = DEADLINE, aio: Aio | None = None) -> Client:
    """A client of this node. It connects with the first call. Whoever has many nodes gives one running `aio` to all.

    Raises `OSError` or `ValueError` for a key or a certificate that cannot be read.
    """
    # The libraries of a transport are loaded with it: a program that says one thing and ends would wait for both.
    if target.transport == "rest":
        from node.client.rest import RestTransport

        return Client(reactor, RestTransport(reactor, target), deadline)
    from node.client.rpc import RpcTransport

    bridge = aio or Aio(IReactorFromThreads(reactor))
    transport = RpcTransport(reactor, target, bridge, owned=aio is None)
    if aio is None:
        bridge.startService()
    return Client(reactor, transport, deadline)


class Client:
    """One node. Every call may raise `NodeError`: what the node says, or a `NoReply`.

    A call that is cancelled, or too late, ends on this side; the node goes on with what it has accepted.
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
        """End all that is open, streams too."""
        for stream in tuple(self._streams):
            stream.close()
        await self._transport.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    # Lifecycle

    async def start(self, backend: pb.Backend) -> pb.BaseInfoResponse:
        return await self.call("Start", pb.BaseInfoResponse, backend)

    async def stop(self) -> None:
        await self.call("Stop", pb.Empty, pb.Empty())

    async def info(self) -> pb.BaseInfoResponse:
        return await self.call("GetBaseInfo", pb.BaseInfoResponse, pb.Empty())

    def logs(self, patience: float = math.inf) -> LogStream:
        """Log lines, for `async with`. `patience`: seconds in which a connection that broke has to be back."""
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
        """Events behind a number, for `async with`; without `follow` those that there are. `patience` as for `logs`."""

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
        """With `reset` these rows begin at zero again; if the reply does not arrive they are in the next one."""
        return await self.call("GetStats", pb.StatResponse, pb.StatRequest(type=kind, name=name, reset=reset))

    async def online(self, name: str) -> pb.OnlineStatResponse:
        return await self.call("GetUserOnlineStats", pb.OnlineStatResponse, pb.StatRequest(name=name))

    async def online_ips(self, name: str) -> pb.StatsOnlineIpListResponse:
        return await self.call("GetUserOnlineIpListStats", pb.StatsOnlineIpListResponse, pb.StatRequest(name=name))

    async def latency(self, name: str = "") -> pb.LatencyResponse:
        return await self.call("GetOutboundsLatency", pb.LatencyResponse, pb.LatencyRequest(name=name))

    # Users

    async def sync_user(self, *users: pb.User) -> None:
        """Add, change or remove these, in their order: by one stream, or by a request for each over REST.

        Raises `UsersRefused` for those that cannot be applied; all others are.
        """
        await self.call("SyncUser", pb.Empty, *users)

    async def sync_users(self, users: Iterable[pb.User]) -> None:
        """These are the users, all others go. Raises `UsersRefused` as above."""
        await self.call("SyncUsers", pb.Empty, pb.Users(users=users))

    async def sync_chunked(self, users: Iterable[pb.User], size: int = CHUNK) -> None:
        """Add, change or remove these at once, sent in chunks of up to so many bytes. Raises `UsersRefused` as above.

        However it is sent, the node takes no more than 64 MiB together.
        """
        await self.call("SyncUsersChunked", pb.Empty, *chunks(users, size))

    async def list_users(
        self, after: str = "", limit: int = 0, names: Iterable[str] = (), credentials: bool = False
    ) -> pb.ListUsersResponse:
        """A page of them; `next` of the reply is `after` of the next one. See `all_users`."""
        request = pb.ListUsersRequest(after=after, limit=limit, names=names, credentials=credentials)
        return await self.call("ListUsers", pb.ListUsersResponse, request)

    async def all_users(
        self, names: Sequence[str] = (), credentials: bool = False
    ) -> AsyncIterator[pb.ListUsersResponse]:
        """All pages. Where one has another `revision` than that before it, the users changed meanwhile."""
        parts = [names[begin : begin + NAMES] for begin in range(0, len(names), NAMES)] or [()]
        for part in parts:
            after, more = "", True
            while more:
                page = await self.list_users(after, names=part, credentials=credentials)
                yield page
                if (more := bool(page.next)) and page.next <= after:
                    raise UnexpectedReply("the node lists its users in circles")
                after = page.next

    async def set_limits(self, limits: Mapping[str, pb.Limits | None]) -> pb.SetLimitsResponse:
        """Say what these users may use; None takes such a word back. The reply has what of it cannot be done."""
        words = [pb.UserLimits(name=name, limits=word) for name, word in limits.items()]
        return await self.call("SetLimits", pb.SetLimitsResponse, pb.SetLimitsRequest(users=words))

    async def get_limits(
        self, after: str = "", limit: int = 0, names: Iterable[str] = (), off: bool = False
    ) -> pb.GetLimitsResponse:
        """A page of what users may use and have used; `next` of the reply is `after` of the next one."""
        request = pb.GetLimitsRequest(after=after, limit=limit, names=names, off=off)
        return await self.call("GetLimits", pb.GetLimitsResponse, request)

    # Updates

    async def update_core(
        self, core: pb.BackendType, version: str = "", sha256: str = "", back: bool = False
    ) -> pb.Job:
        """Have another release of a core, or the one before. The job goes on when this has returned: see `jobs`."""
        request = pb.UpdateCoreRequest(type=core, version=version, sha256=sha256, back=back)
        return await self.call("UpdateCore", pb.Job, request)

    async def update_geo_files(self, files: Mapping[str, str] | None = None, back: bool = False) -> pb.Job:
        """Have the newest geo files, these by name with their digests, or those before."""
        named = [pb.GeoFile(name=name, sha256=digest) for name, digest in (files or {}).items()]
        return await self.call("UpdateGeoFiles", pb.Job, pb.UpdateGeoFilesRequest(files=named, back=back))

    async def update_node(self, version: str = "", sha256: str = "") -> pb.Job:
        """Have another version of the node, or what is installed by now."""
        return await self.call("UpdateNode", pb.Job, pb.UpdateNodeRequest(version=version, sha256=sha256))

    async def jobs(self, identity: str = "") -> list[pb.Job]:
        """The updates that the node knows, oldest first, or this one."""
        return list((await self.call("GetJob", pb.Jobs, pb.JobRequest(id=identity))).jobs)

    # Routing

    async def routing_rules(self) -> pb.RoutingRulesResponse:
        return await self.call("ListRoutingRules", pb.RoutingRulesResponse, pb.Empty())

    async def balancer_info(self, tag: str) -> pb.BalancerInfoResponse:
        return await self.call("GetBalancerInfo", pb.BalancerInfoResponse, pb.BalancerInfoRequest(tag=tag))

    async def test_route(self, route: pb.TestRouteRequest) -> pb.RouteResult:
        return await self.call("TestRoute", pb.RouteResult, route)

    async def add_routing_rule(self, rule: str, should_reset: bool = False) -> None:
        """`rule` is the JSON of one rule."""
        await self.call("AddRoutingRule", pb.Empty, pb.AddRoutingRuleRequest(rule=rule, should_reset=should_reset))

    async def remove_routing_rule(self, rule_tag: str) -> None:
        await self.call("RemoveRoutingRule", pb.Empty, pb.RemoveRoutingRuleRequest(rule_tag=rule_tag))

    async def override_balancer(self, balancer_tag: str, target: str) -> None:
        request = pb.OverrideBalancerTargetRequest(balancer_tag=balancer_tag, target=target)
        await self.call("OverrideBalancerTarget", pb.Empty, request)

    # All of them

    async def call(self, name: str, reply: type[M], *messages: Message) -> M:
        """An operation by its name in METHODS, with messages as they are."""
        body = await self._timed(self._transport.call(_METHODS[name], messages))
        try:
            return reply.FromString(body)
        except DecodeError as error:
            raise UnexpectedReply(f"the reply is not a {reply.DESCRIPTOR.name} message: {error}") from error

    async def _timed(self, work: Coroutine[Any, Any, T]) -> T:
        def late(_: object, seconds: float) -> T:
            raise DeadlineExceeded(f"no answer within {seconds:g} s")

        return await Deferred.fromCoroutine(work).addTimeout(self._deadline, self._reactor, late)


def chunks(users: Iterable[pb.User], size: int) -> Iterator[pb.UsersChunk]:
    """The users in chunks of no more than `size` bytes, or of one user that is larger; the last one is marked."""
    chunk, index, room = pb.UsersChunk(), 0, size
    for user in users:
        # A tag, and a length of up to five bytes; the index and the mark have twelve.
        needed = user.ByteSize() + 6
        if chunk.users and needed > room - 14:
            yield chunk
            index += 1
            chunk, room = pb.UsersChunk(index=index), size
        chunk.users.append(user)
        room -= needed
    chunk.last = True
    yield chunk
