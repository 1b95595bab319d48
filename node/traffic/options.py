"""The setting of the counters."""

from __future__ import annotations

from dataclasses import dataclass

from node.base.settings import Options, seconds, setting


@dataclass(frozen=True)
class TrafficOptions(Options):
    """Seconds between two readings of the counters, at most."""

    interval: float = setting("TRAFFIC_INTERVAL", "10", seconds(0.1, 3600)).help(
        "the most seconds between the node's own readings of the core's traffic counters, 0.1 to 3600",
        "The node reads them more often, up to once a second, as long as that takes at most one per cent of one "
        "processor, with the core's work and the disk's; `info` has the seconds now. A core that is killed, or a node "
        "with its cores, loses at most the bytes of this time. A value below 1 holds whatever it costs. Requests for "
        "statistics read the counters anyway.",
    )
