"""Xray's gRPC API over its unix socket.

A malformed call kills the whole core (no recover handler): only this module builds requests, and only from accounts
that were built for the inbound they go to.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from drivers.process.channel import BULK_DEADLINE, ApiFailed, Channel, StatsApi
from drivers.xray.messages import field
from drivers.xray.routing import Router
from node.base.reactor import Reactor
from node.base.waiting import together
from protos import xray_pb2

HANDLER = "/xray.app.proxyman.command.HandlerService/"
STATS = "/xray.app.stats.command.StatsService/"
OBSERVATORY = "/xray.core.app.observatory.command.ObservatoryService/"
# Calls in flight; more gain nothing (measured).
IN_FLIGHT = 64

# The two AlterInbound operations, as types of a TypedMessage.
_ADD = field(b"\x0a", b"xray.app.proxyman.command.AddUserOperation")
_REMOVE = field(b"\x0a", b"xray.app.proxyman.command.RemoveUserOperation")


class Operation(NamedTuple):
    """One AlterInbound call: `packed` is a serialised protocol.User to add, or None to remove `email`."""

    tag: str
    email: str
    packed: bytes | None


class Api(StatsApi):
    def __init__(self, reactor: Reactor, socket: str) -> None:
        super().__init__(reactor, Channel(reactor, socket), STATS)

    def router(self, rules: Iterable[xray_pb2.RoutingRule]) -> Router:
        """The routing API of a core that was started with these rules."""
        return Router(self._channel, rules)

    async def ready(self, seconds: float) -> bool:
        """Whether the core answers within so many seconds. Once it does, all inbounds are bound."""
        try:
            await self.sys_stats(seconds)
        except ApiFailed:
            return False
        return True

    async def online_ips(self, email: str) -> dict[str, int]:
        """A user's addresses and when each was last seen (Unix seconds); empty for a user who is offline or unknown."""
        request = xray_pb2.GetStatsRequest(name=f"user>>>{email}>>>online")
        reply = await self._known("GetStatsOnlineIpList", request, xray_pb2.GetStatsOnlineIpListResponse)
        return {} if reply is None else dict(reply.ips)

    async def all_online(self) -> list[str]:
        """The e-mails of all users online. Raises `ApiFailed`."""
        path, request = STATS + "GetAllOnlineUsers", xray_pb2.Nothing()
        reply = await self._channel.call(path, request, xray_pb2.GetAllOnlineUsersResponse, BULK_DEADLINE)
        return [name.removeprefix("user>>>").removesuffix(">>>online") for name in reply.users]

    async def online_count(self, email: str) -> int:
        """From how many addresses a user is connected; also for cores that cannot list them (before 25.3.6)."""
        request = xray_pb2.GetStatsRequest(name=f"user>>>{email}>>>online")
        reply = await self._known("GetStatsOnline", request, xray_pb2.GetStatsResponse)
        return 0 if reply is None else int(reply.stat.value)

    async def outbounds(self) -> list[xray_pb2.OutboundStatus]:
        """The observatory's measurements so far. Raises `ApiFailed`."""
        path, request = OBSERVATORY + "GetOutboundStatus", xray_pb2.Nothing()
        return list((await self._channel.call(path, request, xray_pb2.GetOutboundStatusResponse)).status.status)

    async def count_users(self, tag: str) -> int:
        path, request = HANDLER + "GetInboundUsersCount", xray_pb2.GetInboundUserRequest(tag=tag)
        return (await self._channel.call(path, request, xray_pb2.GetInboundUsersCountResponse)).count

    async def list_users(self, tag: str) -> list[xray_pb2.User]:
        path, request = HANDLER + "GetInboundUsers", xray_pb2.GetInboundUserRequest(tag=tag)
        return list((await self._channel.call(path, request, xray_pb2.GetInboundUserResponse, BULK_DEADLINE)).users)

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
        await self._channel.call(HANDLER + "AddInbound", add, xray_pb2.Nothing, BULK_DEADLINE)

    async def remove_inbound(self, tag: str) -> None:
        """Remove an inbound, if it is there: it stops accepting connections. Raises `ApiFailed`."""
        remove = xray_pb2.RemoveInboundRequest(tag=tag)
        try:
            await self._channel.call(HANDLER + "RemoveInbound", remove, xray_pb2.Nothing, BULK_DEADLINE)
        except ApiFailed as error:
            # The core's answer for an unknown tag (app/proxyman/inbound).
            if "not enough information for making a decision" not in str(error):
                raise

    async def _alter(self, operation: Operation) -> str | None:
        """Run one operation. Returns None, or why the core refused it. Raises `ApiFailed` if it did not answer."""
        fault = await self._tried(operation)
        if fault is not None and operation.packed is None and fault.endswith("not found."):
            return None
        if fault is not None and operation.packed is not None and fault.endswith("already exists."):
            # Replace a user of the same e-mail whom the core has and the node did not know of.
            return await self._tried(operation._replace(packed=None)) or await self._tried(operation)
        return fault

    async def _tried(self, operation: Operation) -> str | None:
        try:
            await self._channel.call(HANDLER + "AlterInbound", _request(operation), xray_pb2.Nothing)
        except ApiFailed as error:
            if error.silent:
                raise
            return str(error)
        return None


def _request(operation: Operation) -> bytes:
    if operation.packed is None:
        kind, value = _REMOVE, operation.email.encode()
    else:
        kind, value = _ADD, operation.packed
    return field(b"\x0a", operation.tag.encode()) + field(b"\x12", kind + field(b"\x12", field(b"\x0a", value)))
