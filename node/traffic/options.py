"""The setting of the counters."""

from __future__ import annotations

from dataclasses import dataclass

from node.base.settings import Options, seconds, setting


@dataclass(frozen=True)
class TrafficOptions(Options):
    """Seconds between two readings of the counters."""

    interval: float = setting("TRAFFIC_INTERVAL", "10", seconds(0.1, 3600)).help(
        "seconds between the node's own readings of the core's traffic counters, 0.1 to 3600",
        "A core that crashes loses at most the bytes that it counted in this time. Lower it to lose fewer, "
        "raise it to save processor time with very many users. Requests for statistics read the counters anyway.",
    )
