"""What a sing-box process reports beside its counters: online users, run-time statistics, latencies."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from drivers.channel import FIGURES, LATENCY, ONLINE, asking
from drivers.sing_box.api import Api
from drivers.sing_box.config import Plan
from drivers.sing_box.groups import NOT_MEASURED, latencies, measures
from node.base.errors import Unsupported
from protos.service_pb2 import BackendStatsResponse, Latency


class StatusRun:
    """These calls of `node.contract.driver.Generation`, and `MeasuresLatency`."""

    _api: Api
    plan: Plan

    async def online(self, key: str) -> Mapping[str, int]:
        with asking(ONLINE):
            return await self._api.online(key)

    async def backend_stats(self) -> BackendStatsResponse:
        """Return all statistics where the build has v2ray_api; else only those of the api service."""
        with asking(FIGURES):
            figures = await self._api.sys_stats()
            if figures is not None:
                return BackendStatsResponse.FromString(figures.SerializeToString())
            status = await self._api.status()
            started = await self._api.started_at()
        return BackendStatsResponse(
            num_goroutine=status.goroutines,
            sys=status.memory,
            uptime=max(0, int(time.time() - started)),
        )

    async def latency(self) -> Sequence[Latency]:
        if not measures(self.plan.tree):
            raise Unsupported(NOT_MEASURED)
        with asking(LATENCY):
            return latencies(await self._api.groups())
