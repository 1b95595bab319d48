"""Every name that is told, once: what kind it is, what it means, its labels. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    InfoMetricFamily,
    Metric,
    UntypedMetricFamily,
)

# What is told of one name: values of its labels, and a number.
Sample = tuple[Sequence[str], float]
Samples = Mapping[str, Iterable[Sample]]


class Kind(Enum):
    """As Prometheus has them."""

    GAUGE = "gauge"
    COUNTER = "counter"
    INFO = "info"
    HISTOGRAM = "histogram"
    UNTYPED = "untyped"


@dataclass(frozen=True)
class Family:
    """One name and its series."""

    name: str
    kind: Kind
    text: str
    labels: tuple[str, ...] = ()


CALLS = Family(
    "txnode_call_duration_seconds",
    Kind.HISTOGRAM,
    "Seconds until a call was answered, by method and class of HTTP status; streams of lines are left out",
    ("method", "status"),
)
REFUSALS = Family(
    "txnode_key_refusals_total",
    Kind.COUNTER,
    "Requests that were refused for their key: missing, wrong, or forbidden by its scope",
    ("reason",),
)
# These two are counted as they happen.
LIVE = (CALLS, REFUSALS)
READ = (
    Family("txnode_info", Kind.INFO, "The node", ("version",)),
    Family("txnode_uptime_seconds", Kind.GAUGE, "Seconds since the node began"),
    Family("txnode_resident_memory_bytes", Kind.GAUGE, "Memory of the node, without its core"),
    Family("txnode_cpu_seconds_total", Kind.COUNTER, "Processor time of the node, without its core"),
    Family("txnode_open_fds", Kind.GAUGE, "Descriptors that the node has open"),
    Family("txnode_max_fds", Kind.GAUGE, "Descriptors that the node may have open"),
    Family("txnode_reactor_lag_seconds", Kind.GAUGE, "The latest that the node's loop was within the last minute"),
    Family("txnode_warnings", Kind.GAUGE, "Warnings that info tells at the moment"),
    Family("txnode_ready", Kind.GAUGE, "1 if every check of /readyz succeeds"),
    Family("txnode_check_ok", Kind.GAUGE, "1 if this check of /readyz succeeds", ("check",)),
    Family("txnode_core_info", Kind.INFO, "The core that is wanted", ("core", "version")),
    Family("txnode_core_running", Kind.GAUGE, "1 if the core runs and serves"),
    Family("txnode_core_state", Kind.GAUGE, "1 for the state that the backend is in", ("state",)),
    Family("txnode_core_uptime_seconds", Kind.GAUGE, "Seconds since the process of the core began"),
    Family(
        "txnode_core_restarts_total",
        Kind.COUNTER,
        "Cores that were wanted and went away (exit, signal, hung), and tries that did not start",
        ("reason",),
    ),
    Family(
        "txnode_core_resident_memory_bytes",
        Kind.GAUGE,
        "Memory of the core that serves, and of those that drain",
        ("generation",),
    ),
    Family("txnode_core_cpu_seconds_total", Kind.COUNTER, "Processor time of the core that serves"),
    Family("txnode_generations", Kind.GAUGE, "Runs of the core that there are", ("state",)),
    Family("txnode_draining_connections", Kind.GAUGE, "Connections of the runs that drain, a second ago"),
    Family("txnode_dropped_connections_total", Kind.COUNTER, "Connections that were ended with a core that drained"),
    Family("txnode_cut_connections_total", Kind.COUNTER, "Connections of removed users that were ended"),
    Family("txnode_users_wanted", Kind.GAUGE, "Users that controllers want"),
    Family("txnode_users_limited", Kind.GAUGE, "Users who have limits, of their own or by the settings"),
    Family("txnode_users_off", Kind.GAUGE, "Users who are out of the core for a limit", ("limit",)),
    Family("txnode_users_near_quota", Kind.GAUGE, "Users who are in, and have used four fifths of their quota"),
    Family(
        "txnode_limited_connections_total",
        Kind.COUNTER,
        "Connections that were ended because their user had too many addresses",
    ),
    Family("txnode_users_confirmed", Kind.GAUGE, "Users that the core confirmed, on any inbound"),
    Family("txnode_users_refused_total", Kind.COUNTER, "Users that the node or the core refused, each time"),
    Family(
        "txnode_inbound_users",
        Kind.GAUGE,
        "Users of a managed inbound, as wanted and as confirmed by the core",
        ("inbound", "state"),
    ),
    Family(
        "txnode_inbound_bytes_total",
        Kind.COUNTER,
        "Bytes by inbound since the state file began, whatever was reset or restarted",
        ("inbound", "direction"),
    ),
    Family(
        "txnode_outbound_bytes_total",
        Kind.COUNTER,
        "Bytes by outbound since the state file began, whatever was reset or restarted",
        ("outbound", "direction"),
    ),
    Family(
        "txnode_user_bytes_total",
        Kind.COUNTER,
        "With METRICS_USERS=on: bytes by user since the state file began",
        ("user", "direction"),
    ),
    Family(
        "txnode_counters_age_seconds", Kind.GAUGE, "How old the core's counters are: large where it does not answer"
    ),
    Family("txnode_ledger_rows", Kind.GAUGE, "Rows that wait for a controller", ("scope",)),
    Family("txnode_state_writable", Kind.GAUGE, "1 if the disk took what was written to it last"),
    Family("txnode_state_file_bytes", Kind.GAUGE, "Bytes of the state file"),
    Family("txnode_disk_free_bytes", Kind.GAUGE, "Bytes that are free on the disk of STATE_DIR"),
    Family("txnode_certificate_expiry_timestamp_seconds", Kind.GAUGE, "When the certificate that is served ends"),
    Family("txnode_quota_bytes", Kind.GAUGE, "NODE_QUOTA: bytes that the node may use in a month"),
    Family("txnode_quota_used_bytes", Kind.GAUGE, "Bytes that it has used of them"),
    Family("txnode_quota_closed", Kind.GAUGE, "1 if no new connections are taken because they are used up"),
    Family("txnode_connections", Kind.GAUGE, "Connections by port; known ones have shown a key", ("door", "known")),
    Family("txnode_max_connections", Kind.GAUGE, "Places for connections, on both ports together"),
)
FAMILIES = (*READ, *LIVE)

# What exporters of cores tell, behind a prefix: `METRICS_NAMES`.
ALIASES = (
    Family("up", Kind.GAUGE, "1 if the core answered"),
    Family("scrape_duration_seconds", Kind.GAUGE, "Seconds that the reading took"),
    Family("scrapes_total", Kind.COUNTER, "Readings so far"),
    Family("uptime_seconds", Kind.GAUGE, "Seconds since the core began"),
    Family("traffic_uplink_bytes_total", Kind.COUNTER, "Bytes up", ("dimension", "target")),
    Family("traffic_downlink_bytes_total", Kind.COUNTER, "Bytes down", ("dimension", "target")),
    Family("goroutines", Kind.GAUGE, "Goroutines of the core"),
    Family("memstats_alloc_bytes", Kind.GAUGE, "Bytes of living objects"),
    # No counter: in OpenMetrics it would have the name of the one before it.
    Family("memstats_alloc_bytes_total", Kind.UNTYPED, "Bytes allocated so far"),
    Family("memstats_sys_bytes", Kind.GAUGE, "Bytes that the core has of the system"),
    Family("memstats_mallocs_total", Kind.COUNTER, "Objects allocated so far"),
    Family("memstats_frees_total", Kind.COUNTER, "Objects freed so far"),
    Family("memstats_num_gc", Kind.UNTYPED, "Collections of garbage so far"),
    Family("memstats_pause_total_ns", Kind.UNTYPED, "Nanoseconds of pauses for them so far"),
)

_MADE: Mapping[Kind, type[Metric]] = {
    Kind.GAUGE: GaugeMetricFamily,
    Kind.COUNTER: CounterMetricFamily,
    Kind.UNTYPED: UntypedMetricFamily,
}


def made(families: Iterable[Family], samples: Samples, prefix: str = "") -> Iterator[Metric]:
    """As the library has them, in the order of the table; a name of which nothing is known is left out."""
    for family in families:
        if (known := samples.get(prefix + family.name)) is not None:
            yield (_info if family.kind is Kind.INFO else _numbers)(family, prefix + family.name, known)


def _info(family: Family, name: str, samples: Iterable[Sample]) -> Metric:
    metric = InfoMetricFamily(name.removesuffix("_info"), family.text)
    for labels, _ in samples:
        metric.add_metric([], dict(zip(family.labels, labels, strict=True)))
    return metric


def _numbers(family: Family, name: str, samples: Iterable[Sample]) -> Metric:
    metric: GaugeMetricFamily = _MADE[family.kind](name, family.text, labels=family.labels)  # type: ignore[call-arg, assignment]
    for labels, value in samples:
        metric.add_metric(labels, value)
    return metric
