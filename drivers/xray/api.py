"""Xray's gRPC API over its unix socket.

A malformed call kills the whole core (no recover handler): only this module builds requests, and only from accounts
that were built for the inbound they go to.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any, NamedTuple

from google.protobuf.message import Message
from twisted.internet.task import deferLater

from drivers.channel import ApiFailed, Channel
from drivers.xray.router import Router
from drivers.xray.wire import field
from node.base.reactor import Reactor
from node.base.waiting import together
from protos import xray_pb2

HANDLER = "/xray.app.proxyman.command.HandlerService/"
STATS = "/xray.app.stats.command.StatsService/"
OBSERVATORY = "/xray.core.app.observatory.command.ObservatoryService/"
# Calls in flight; more gain nothing (measured).
IN_FLIGHT = 64
# Counters of a reply handled at a time; in between the reactor serves others.
SLICE = 2000
# Seconds.
USER_DEADLINE = 5.0
BULK_DEADLINE = 10.0
# The core limits a request to 4 MiB, which cannot be changed.
MAX_REQUEST = 4 * 1024 * 1024 - 64 * 1024

# The two AlterInbound operations, as types of a TypedMessage.
_ADD = field(b"\x0a", b"xray.app.proxyman.command.AddUserOperation")
_REMOVE = field(b"\x0a", b"xray.app.proxyman.command.RemoveUserOperation")


class Operation(NamedTuple):
    """One AlterInbound call: `packed` is a serialised protocol.User to add, or None to remove `email`."""

    tag: str
    email: str
    packed: bytes | None


class Api:
    """The API of one run of the core."""

    def __init__(self, reactor: Reactor, socket: str) -> None:
        self._reactor = reactor
        self._channel = Channel(reactor, socket)

    def router(self, rules: Iterable[xray_pb2.RoutingRule]) -> Router:
        """The routing API of a core that was started with these rules."""
        return Router(self._channel, rules)

    async def close(self) -> None:
        self._channel.close()

    async def ready(self, seconds: float) -> bool:
        """Whether the core answers within so many seconds. Once it does, all inbounds are bound."""
        try:
            await self.sys_stats(seconds)
        except ApiFailed:
            return False
        return True

    async def sys_stats(self, seconds: float = USER_DEADLINE) -> xray_pb2.SysStatsResponse:
        path = STATS + "GetSysStats"
        reply: xray_pb2.SysStatsResponse
        reply = await self._call(path, xray_pb2.Nothing(), xray_pb2.SysStatsResponse, seconds)
        return reply

    async def counters(self) -> dict[str, int]:
        """All counters by name. Never with reset: the counts in a lost reply would be lost."""
        request = xray_pb2.QueryStatsRequest(pattern="", reset=False)
        reply: xray_pb2.QueryStatsResponse
        reply = await self._call(STATS + "QueryStats", request, xray_pb2.QueryStatsResponse, BULK_DEADLINE)
        # By an iterator: a slice of the field makes objects that cost the garbage collector 80 ms at 50,000 users.
        stats, counters = iter(reply.stat), dict[str, int]()
        while part := {stat.name: stat.value for stat in islice(stats, SLICE)}:
            counters |= part
            await deferLater(self._reactor, 0)
        return counters

    async def some_counters(self, names: Iterable[str]) -> dict[str, int]:
        """The counters of these names that the core has. Names too long for a request are left out."""
        found = await together(self._counter(name) for name in names if len(name.encode()) < MAX_REQUEST)
        return {stat.name: stat.value for stat in found if stat is not None}

    async def _counter(self, name: str) -> xray_pb2.Stat | None:
        request = xray_pb2.GetStatsRequest(name=name)
        reply: xray_pb2.GetStatsResponse
        try:
            reply = await self._call(STATS + "GetStats", request, xray_pb2.GetStatsResponse)
        except ApiFailed as error:
            if error.unknown:
                return None
            raise
        return reply.stat

    async def online_ips(self, email: str) -> dict[str, int]:
        """A user's addresses and when each was last seen (Unix seconds); empty for a user who is offline or unknown."""
        request = xray_pb2.GetStatsRequest(name=f"user>>>{email}>>>online")
        try:
            reply = await self._call(STATS + "GetStatsOnlineIpList", request, xray_pb2.GetStatsOnlineIpListResponse)
        except ApiFailed as error:
            if error.unknown:
                return {}
            raise
        return dict(reply.ips)

    async def all_online(self) -> list[str]:
        """The e-mails of all users online. Raises `ApiFailed`."""
        reply: xray_pb2.GetAllOnlineUsersResponse
        path = STATS + "GetAllOnlineUsers"
        reply = await self._call(path, xray_pb2.Nothing(), xray_pb2.GetAllOnlineUsersResponse, BULK_DEADLINE)
        return [name.removeprefix("user>>>").removesuffix(">>>online") for name in reply.users]

    async def online_count(self, email: str) -> int:
        """From how many addresses a user is connected; also for cores that cannot list them (before 25.3.6)."""
        request = xray_pb2.GetStatsRequest(name=f"user>>>{email}>>>online")
        try:
            reply = await self._call(STATS + "GetStatsOnline", request, xray_pb2.GetStatsResponse)
        except ApiFailed as error:
            if error.unknown:
                return 0
            raise
        return int(reply.stat.value)

    async def outbounds(self) -> list[xray_pb2.OutboundStatus]:
        """The observatory's measurements so far. Raises `ApiFailed`."""
        path = OBSERVATORY + "GetOutboundStatus"
        reply: xray_pb2.GetOutboundStatusResponse
        reply = await self._call(path, xray_pb2.Nothing(), xray_pb2.GetOutboundStatusResponse)
        return list(reply.status.status)

    async def count_users(self, tag: str) -> int:
        request = xray_pb2.GetInboundUserRequest(tag=tag)
        reply: xray_pb2.GetInboundUsersCountResponse
        reply = await self._call(HANDLER + "GetInboundUsersCount", request, xray_pb2.GetInboundUsersCountResponse)
        return reply.count

    async def list_users(self, tag: str) -> list[xray_pb2.User]:
        request = xray_pb2.GetInboundUserRequest(tag=tag)
        reply: xray_pb2.GetInboundUserResponse
        path = HANDLER + "GetInboundUsers"
        reply = await self._call(path, request, xray_pb2.GetInboundUserResponse, BULK_DEADLINE)
        return list(reply.users)

    async def alter(self, operations: Sequence[Operation], in_flight: int = IN_FLIGHT) -> list[str | None]:
        """Run operations, `in_flight` in parallel. Returns for each None, or the reason of its failure.

        Adding a user who is there replaces them, removing an absent one succeeds. After a call without an answer the
        rest are not tried: thousands of timeouts would take hours.
        """
        results: list[str | None] = [None] * len(operations)
        left, silence = iter(enumerate(operations)), ""

        async def work() -> None:
            nonlocal silence
            for place, operation in left:
                try:
                    results[place] = silence or await self._alter(operation)
                except ApiFailed as error:
                    results[place] = silence = str(error)

        await together(work() for _ in range(min(in_flight, len(operations))))
        return results

    async def replace_inbound(self, handler: xray_pb2.InboundHandlerConfig) -> None:
        """Remove an inbound, if it is there, and add it again as given. Raises `ApiFailed`."""
        await self.remove_inbound(handler.tag)
        add = xray_pb2.AddInboundRequest(inbound=handler)
        await self._call(HANDLER + "AddInbound", add, xray_pb2.Nothing, BULK_DEADLINE)

    async def remove_inbound(self, tag: str) -> None:
        """Remove an inbound, if it is there: it stops accepting connections. Raises `ApiFailed`."""
        remove = xray_pb2.RemoveInboundRequest(tag=tag)
        try:
            await self._call(HANDLER + "RemoveInbound", remove, xray_pb2.Nothing, BULK_DEADLINE)
        except ApiFailed as error:
            # The core's answer for an unknown tag (app/proxyman/inbound).
            if "not enough information for making a decision" not in str(error):
                raise

    async def _alter(self, operation: Operation) -> str | None:
        """Run one operation. Returns None, or why the core refused it. Raises `ApiFailed` if it did not answer."""
        try:
            await self._call(HANDLER + "AlterInbound", _request(operation), xray_pb2.Nothing)
        except ApiFailed as error:
            if error.silent:
                raise
            text = str(error)
            if operation.packed is None and text.endswith("not found."):
                return None
            if operation.packed is not None and text.endswith("already exists."):
                return await self._alter_again(operation)
            return text
        return None

    async def _alter_again(self, operation: Operation) -> str | None:
        """Replace a user of the same e-mail whom the core has and the node did not know of."""
        try:
            await self._call(HANDLER + "AlterInbound", _request(operation._replace(packed=None)), xray_pb2.Nothing)
            await self._call(HANDLER + "AlterInbound", _request(operation), xray_pb2.Nothing)
        except ApiFailed as error:
            if error.silent:
                raise
            return str(error)
        return None

    async def _call(self, path: str, request: Message | bytes, reply: type[Any], seconds: float = USER_DEADLINE) -> Any:
        return await self._channel.call(path, request, reply, seconds)


def _request(operation: Operation) -> bytes:
    """Encode an AlterInboundRequest."""
    if operation.packed is None:
        kind, value = _REMOVE, operation.email.encode()
    else:
        kind, value = _ADD, operation.packed
    return field(b"\x0a", operation.tag.encode()) + field(b"\x12", kind + field(b"\x12", field(b"\x0a", value)))
