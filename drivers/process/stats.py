"""Client of the counters that Xray has, and builds of sing-box with v2ray_api: the same calls of two services."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from google.protobuf.message import Message

from drivers.process.channel import ApiFailed, Channel
from node.base.reactor import Reactor
from node.base.slices import slices
from node.base.waiting import together
from node.contract.counters import Seen
from protos import xray_pb2
from protos.columns_pb2 import Stats

M = TypeVar("M", bound=Message)

# Seconds: for a usual call, and for one with a long reply.
DEADLINE = 5.0
BULK_DEADLINE = 10.0
# Cores limit a request to 4 MiB, which cannot be changed.
MAX_REQUEST = 4 * 1024 * 1024 - 64 * 1024
# Counters of a reply handled at a time (some 5 ms); in between the reactor serves others.
SLICE = 10_000


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

    async def counters(self, pattern: str = "", seen: Seen | None = None) -> dict[str, int]:
        """All counters by name; of an Xray those whose name contains `pattern`. `seen`: see `Generation.counters`.

        Never with reset: the counts in a lost reply would be lost.
        """
        path, request = f"{self._service}QueryStats", xray_pb2.QueryStatsRequest(pattern=pattern, reset=False)
        reply = await self._call(path, request, Stats, BULK_DEADLINE)
        counters, now = dict[str, int](), Seen()
        async for part in slices(self._reactor, reply.stat, SLICE):
            now.update(map(hash, part))
            new = [raw for raw in part if hash(raw) not in seen] if seen else part
            parsed = xray_pb2.QueryStatsResponse.FromString(Stats(stat=new).SerializeToString())
            counters |= {stat.name: stat.value for stat in parsed.stat}
        if seen is not None:
            seen.clear()
            seen.update(now)
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
