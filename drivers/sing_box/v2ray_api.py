"""Client of v2ray_api, the exact counters that some builds of sing-box have."""

from __future__ import annotations

from collections.abc import Iterable

from drivers.channel import ApiFailed, Channel
from node.base.reactor import Reactor
from node.base.waiting import together
from protos import sing_box_pb2
from protos.sing_box_pb2 import Stat

STATS = "/v2ray.core.app.stats.command.StatsService/"
# Seconds.
DEADLINE = 5.0
BULK_DEADLINE = 10.0


class Stats:
    """The v2ray_api of one core process. All calls raise `ApiFailed`."""

    def __init__(self, reactor: Reactor, port: int) -> None:
        self._channel = Channel(reactor, port)

    def close(self) -> None:
        self._channel.close()

    async def counters(self) -> dict[str, int]:
        """Return all counters by name."""
        request = sing_box_pb2.QueryStatsRequest()
        path = STATS + "QueryStats"
        reply = await self._channel.call(path, request, sing_box_pb2.QueryStatsResponse, BULK_DEADLINE)
        return {stat.name: stat.value for stat in reply.stat}

    async def some_counters(self, names: Iterable[str]) -> dict[str, int]:
        """Return those of these counters that exist."""
        found = await together(self._counter(name) for name in names)
        return {stat.name: stat.value for stat in found if stat is not None}

    async def _counter(self, name: str) -> Stat | None:
        request = sing_box_pb2.GetStatsRequest(name=name)
        reply: sing_box_pb2.GetStatsResponse
        try:
            reply = await self._channel.call(STATS + "GetStats", request, sing_box_pb2.GetStatsResponse, DEADLINE)
        except ApiFailed as error:
            if error.unknown:
                return None
            raise
        return reply.stat

    async def sys_stats(self) -> sing_box_pb2.SysStatsResponse:
        """Return the statistics of Go's run-time."""
        reply: sing_box_pb2.SysStatsResponse
        path = STATS + "GetSysStats"
        reply = await self._channel.call(path, sing_box_pb2.Nothing(), sing_box_pb2.SysStatsResponse, DEADLINE)
        return reply
