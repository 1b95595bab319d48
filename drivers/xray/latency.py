"""What Xray's observatories have measured. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from drivers.xray.selectors import OBSERVATORIES, OURS
from protos.service_pb2 import Latency
from protos.xray_pb2 import Config, OutboundStatus

NOT_MEASURED = (
    "the configuration measures no outbound: add an `observatory` or a `burstObservatory` whose `subjectSelector` "
    "names outbounds"
)
# What deployed controllers are told of where it is from.
_SOURCE = "xray-observatory"


def measures(base: Config) -> bool:
    """Whether a configuration has an observatory; without one the core does not start with the service for it."""
    return any(app.type in OBSERVATORIES for app in base.app)


def latencies(statuses: Iterable[OutboundStatus]) -> list[Latency]:
    """The numbers are the core's: some observatories give an outbound that does not answer a delay of 99999999."""
    return [
        Latency(
            name=status.outbound_tag,
            alive=status.alive,
            # 0 is for who does not answer: one that takes less than a millisecond takes one.
            delay=max(status.delay, int(status.alive)),
            link=status.outbound_tag,
            last_seen_time=status.last_seen_time,
            last_try_time=status.last_try_time,
            source=_SOURCE,
        )
        for status in statuses
        if not status.outbound_tag.startswith(OURS)
    ]
