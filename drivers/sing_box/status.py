"""Figures of a sing-box process beside its counters: users online, run-time statistics, latencies of outbounds."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence

from drivers.process.channel import FIGURES, LATENCY, ONLINE, asking
from drivers.sing_box.api import Api
from drivers.sing_box.config import Plan
from node.base.errors import Unsupported
from protos.service_pb2 import BackendStatsResponse, Latency
from protos.sing_box_pb2 import Group

URL_TEST = "urltest"
NOT_MEASURED = (
    f"the configuration measures no outbound: add an outbound of the type `{URL_TEST}` whose `outbounds` names others"
)


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
        if all(outbound.get("type") != URL_TEST for outbound in self.plan.tree.get("outbounds", [])):
            raise Unsupported(NOT_MEASURED)
        with asking(LATENCY):
            return latencies(await self._api.groups())


def latencies(groups: Iterable[Group]) -> list[Latency]:
    """Return the latency of each outbound in a urltest group, once. After a failed test the core reports no time."""
    items = {item.tag: item for group in groups if group.type == URL_TEST for item in group.items}
    return [
        Latency(
            name=item.tag,
            alive=bool(item.url_test_time),
            # 0 means no answer: less than a millisecond is reported as one.
            delay=max(item.url_test_delay, int(bool(item.url_test_time))),
            link=item.tag,
            last_seen_time=item.url_test_time,
            last_try_time=item.url_test_time,
            source="sing-box-urltest",
        )
        for item in items.values()
    ]
