"""Figures of a run of Xray beside its counters: users online, run-time statistics, latencies of outbounds."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from drivers.process.channel import FIGURES, LATENCY, ONLINE, asking
from drivers.sockets.connections import endpoint
from drivers.xray.accounts import email_of
from drivers.xray.api import Api
from drivers.xray.config import Plan, measures
from drivers.xray.messages import OURS
from node.base.errors import Unsupported
from node.base.waiting import together
from node.contract.accounts import Accounts, key_of
from node.contract.connections import Address
from protos.service_pb2 import BackendStatsResponse, Latency
from protos.xray_pb2 import OutboundStatus

_NOT_TOLD = "this core cannot list the addresses of users; Xray 25.3.6 and later can"
NOT_MEASURED = (
    "the configuration measures no outbound: add an `observatory` or a `burstObservatory` whose `subjectSelector` "
    "names outbounds"
)
# Users whose addresses are requested in parallel.
SLICE = 64


class StatusRun:
    """These calls of `node.contract.driver.Generation`, `CountsOnline` and `MeasuresLatency`."""

    _api: Api
    plan: Plan
    accounts: dict[str, Accounts]

    async def online(self, key: str) -> Mapping[str, int]:
        with asking(ONLINE, _NOT_TOLD):
            for email in self._spellings(key):
                return await self._api.online_ips(email)
        return {}

    async def online_count(self, key: str) -> int:
        with asking(ONLINE, _NOT_TOLD):
            for email in self._spellings(key):
                return await self._api.online_count(email)
        return 0

    async def backend_stats(self) -> BackendStatsResponse:
        with asking(FIGURES):
            figures = await self._api.sys_stats()
        return BackendStatsResponse.FromString(figures.SerializeToString())

    async def latency(self) -> Sequence[Latency]:
        if not measures(self.plan.base):
            raise Unsupported(NOT_MEASURED)
        with asking(LATENCY):
            return latencies(await self._api.outbounds())

    async def _online(self) -> Mapping[Address, Collection[str]]:
        """The keys of the users online, by address. Raises `ApiFailed`."""
        emails = await self._api.all_online()
        found: dict[Address, set[str]] = {}
        for begin in range(0, len(emails), SLICE):
            part = emails[begin : begin + SLICE]
            for email, addresses in zip(part, await together(map(self._api.online_ips, part)), strict=True):
                for address in addresses:
                    found.setdefault(endpoint(address, 0)[:-2], set()).add(key_of(email))
        return found

    def _spellings(self, key: str) -> list[str]:
        found = (accounts[key] for accounts in self.accounts.values() if key in accounts)
        return list(dict.fromkeys(map(email_of, found)))


def latencies(statuses: Iterable[OutboundStatus]) -> list[Latency]:
    """Convert the core's figures (ms); some observatories give an outbound that does not answer a delay of 99999999."""
    return [
        Latency(
            name=status.outbound_tag,
            alive=status.alive,
            # 0 means no answer, so less than a millisecond counts as one.
            delay=max(status.delay, int(status.alive)),
            link=status.outbound_tag,
            last_seen_time=status.last_seen_time,
            last_try_time=status.last_try_time,
            # The source that deployed controllers expect.
            source="xray-observatory",
        )
        for status in statuses
        if not status.outbound_tag.startswith(OURS)
    ]
