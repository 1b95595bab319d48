"""The settings of the metrics."""

from __future__ import annotations

import re
from dataclasses import dataclass

from node.base.settings import Options, chosen, port, setting


def _prefix(text: str) -> str:
    name = text.lower()
    if name and (not re.fullmatch(r"[a-z][a-z0-9]{0,31}", name) or name == "txnode"):
        raise ValueError(f"{name!r} is not a prefix: use lower-case letters and digits, and not txnode")
    return name


@dataclass(frozen=True)
class MetricsOptions(Options):
    """The metrics port, if it is opened; whether bytes are reported by user; the prefix of other exporters' names."""

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
    prefix: str = setting("METRICS_NAMES", read=_prefix).help(
        "prefix such as v2ray: also report figures under the names that exporters of cores use; see docs/metrics.md",
        "Set it to keep a dashboard that was made for such an exporter.",
    )
