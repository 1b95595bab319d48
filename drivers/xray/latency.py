"""Latencies of outbounds, as measured by Xray's observatories. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from drivers.xray.selectors import OBSERVATORIES, OURS
from protos.service_pb2 import Latency
from protos.xray_pb2 import Config, OutboundStatus

NOT_MEASURED = (
    "the configuration measures no outbound: add an `observatory` or a `burstObservatory` whose `subjectSelector` "
    "names outbounds"
)
# The source that deployed controllers expect.
_SOURCE = "xray-observatory"


def measures(base: Config) -> bool:
    """Whether a configuration has an observatory; without one the core does not start with the API service for it."""
    return any(app.type in OBSERVATORIES for app in base.app)


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
            source=_SOURCE,
        )
        for status in statuses
        if not status.outbound_tag.startswith(OURS)
    ]
