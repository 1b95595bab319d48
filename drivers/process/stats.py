"""Client of the counters that Xray has, and builds of sing-box with v2ray_api: the same calls of two services."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import TypeVar

from google.protobuf.message import Message

from drivers.process.channel import ApiFailed, Channel
from node.base.reactor import Reactor
from node.base.slices import a_turn
from node.base.waiting import together
from protos import xray_pb2

M = TypeVar("M", bound=Message)

# Seconds: for a usual call, and for one with a long reply.
DEADLINE = 5.0
BULK_DEADLINE = 10.0
# Cores limit a request to 4 MiB, which cannot be changed.
MAX_REQUEST = 4 * 1024 * 1024 - 64 * 1024
# Counters of a reply handled at a time; in between the reactor serves others.
SLICE = 2000


class StatsApi:
    """Calls of one core process; `service` is the path of its counters. All calls raise `ApiFailed`."""

    def __init__(self, reactor: Reactor, channel: Channel, service: str) -> None:
        self._reactor = reactor
        self._channel = channel
        self._service = service

    async def close(self) -> None:
        self._channel.close()

    async def sys_stats(self, seconds: float = DEADLINE) -> xray_pb2.SysStatsResponse:
        """The statistics of Go's run-time."""
        return await self._call(f"{self._service}GetSysStats", xray_pb2.Nothing(), xray_pb2.SysStatsResponse, seconds)

    async def counters(self) -> dict[str, int]:
        """All counters by name. Never with reset: the counts in a lost reply would be lost."""
        path, request = f"{self._service}QueryStats", xray_pb2.QueryStatsRequest(pattern="", reset=False)
        reply = await self._call(path, request, xray_pb2.QueryStatsResponse, BULK_DEADLINE)
        # By an iterator: a slice of the field makes objects that cost the garbage collector 80 ms at 50,000 users.
        stats, counters = iter(reply.stat), dict[str, int]()
        while part := {stat.name: stat.value for stat in islice(stats, SLICE)}:
            counters |= part
            await a_turn(self._reactor)
        return counters

    async def some_counters(self, names: Iterable[str]) -> dict[str, int]:
        """The counters of these names that the core has. Names too long for a request are left out."""
        requests = [xray_pb2.GetStatsRequest(name=name) for name in names if len(name.encode()) < MAX_REQUEST]
        found = await together(self._known("GetStats", one, xray_pb2.GetStatsResponse) for one in requests)
        return {reply.stat.name: reply.stat.value for reply in found if reply is not None}

    async def _known(self, name: str, request: Message, reply: type[M]) -> M | None:
        """Call the service; None if the core has nothing of the requested name."""
        try:
            return await self._call(self._service + name, request, reply)
        except ApiFailed as error:
            if error.unknown:
                return None
            raise

    async def _call(self, path: str, request: Message | bytes, reply: type[M], seconds: float = DEADLINE) -> M:
        found: M = await self._channel.call(path, request, reply, seconds)
        return found
