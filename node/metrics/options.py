"""The settings of the metrics."""

from __future__ import annotations

from dataclasses import dataclass

from node.base.settings import Options, chosen, port, setting


@dataclass(frozen=True)
class MetricsOptions(Options):
    """The metrics port, if it is opened, and whether bytes are reported by user."""

    port: int | None = setting("METRICS_PORT", read=port).help(
        "port of 127.0.0.1, 1 to 65535, that serves /metrics without TLS; programs that run "
        "as another user than the node need no key there (default: none)",
        "Set it for an agent on the same machine. See [metrics.md](metrics.md#scraping).",
    )
    users: bool = setting("METRICS_USERS", "off", chosen("on", "off")).help(
        "on or off: also report the bytes of each user as metrics, two series a user",
        "Turn it on for graphs by user. With many users each scrape takes processor time of the node: see "
        "[metrics.md](metrics.md#costs).",
    )
