"""The table of metrics: name, kind, meaning, labels. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    InfoMetricFamily,
    Metric,
)

# One sample of a metric: the values of its labels, and a number.
Sample = tuple[Sequence[str], float]
Samples = Mapping[str, Iterable[Sample]]


class Kind(Enum):
    """The types of metrics in Prometheus."""

    GAUGE = "gauge"
    COUNTER = "counter"
    INFO = "info"
    HISTOGRAM = "histogram"


@dataclass(frozen=True)
class Family:
    """A metric and the labels of its series."""

    name: str
    kind: Kind
    text: str
    labels: tuple[str, ...] = ()


CALLS = Family(
    "txnode_call_duration_seconds",
    Kind.HISTOGRAM,
    "Seconds until a call was answered, by method and class of HTTP status; without log and event streams",
    ("method", "status"),
)
REFUSALS = Family(
    "txnode_key_refusals_total",
    Kind.COUNTER,
    "Requests refused because of their key: missing, wrong, or of too small a scope (forbidden)",
    ("reason",),
)
# Counted as they happen; the others are read on request.
LIVE = (CALLS, REFUSALS)
READ = (
    Family("txnode_info", Kind.INFO, "The version of the node", ("version",)),
    Family("txnode_uptime_seconds", Kind.GAUGE, "Seconds since the node started"),
    Family("txnode_resident_memory_bytes", Kind.GAUGE, "Resident memory of the node, without its core"),
    Family("txnode_cpu_seconds_total", Kind.COUNTER, "Processor time of the node, without its core"),
    Family("txnode_open_fds", Kind.GAUGE, "Open file descriptors of the node"),
    Family("txnode_max_fds", Kind.GAUGE, "File descriptors that the node may have open"),
    Family("txnode_reactor_lag_seconds", Kind.GAUGE, "Longest delay of the node's event loop within the last minute"),
    Family("txnode_warnings", Kind.GAUGE, "Number of warnings in GetBaseInfo now"),
    Family("txnode_ready", Kind.GAUGE, "1 if every check of /readyz succeeds"),
    Family("txnode_check_ok", Kind.GAUGE, "1 if this check of /readyz succeeds", ("check",)),
    Family("txnode_core_info", Kind.INFO, "The core that the backend uses, and its version", ("core", "version")),
    Family("txnode_core_running", Kind.GAUGE, "1 if the core runs and serves"),
    Family("txnode_core_state", Kind.GAUGE, "1 for the current state of the backend, 0 for the others", ("state",)),
    Family("txnode_core_uptime_seconds", Kind.GAUGE, "Seconds since the core process started"),
    Family(
        "txnode_core_restarts_total",
        Kind.COUNTER,
        "Cores that ended unexpectedly (exit, signal, hung), and starts that failed",
        ("reason",),
    ),
    Family(
        "txnode_core_resident_memory_bytes",
        Kind.GAUGE,
        "Resident memory of the current core, and of all draining cores together",
        ("generation",),
    ),
    Family("txnode_core_cpu_seconds_total", Kind.COUNTER, "Processor time of the current core process"),
    Family("txnode_generations", Kind.GAUGE, "Core processes that are current, draining or ending", ("state",)),
    Family("txnode_draining_connections", Kind.GAUGE, "Connections of draining cores, up to a second ago"),
    Family(
        "txnode_dropped_connections_total", Kind.COUNTER, "Connections that ended because their draining core was ended"
    ),
    Family("txnode_cut_connections_total", Kind.COUNTER, "Connections of removed users that were cut"),
    Family("txnode_users_wanted", Kind.GAUGE, "Users that controllers have set"),
    Family("txnode_users_limited", Kind.GAUGE, "Users with limits, of their own or by default"),
    Family("txnode_users_off", Kind.GAUGE, "Users who are barred because of a limit", ("limit",)),
    Family("txnode_users_near_quota", Kind.GAUGE, "Users who have used four fifths of their quota and are not barred"),
    Family(
        "txnode_limited_connections_total",
        Kind.COUNTER,
        "Connections closed because their user had too many addresses",
    ),
    Family(
        "txnode_abuse_requests_total",
        Kind.COUNTER,
        "Requests of users that ABUSE is for: torrent, scan or mail",
        ("kind",),
    ),
    Family("txnode_abuse_cases_total", Kind.COUNTER, "How often a user began with one of them", ("kind",)),
    Family("txnode_users_confirmed", Kind.GAUGE, "Users that the core has confirmed, on any inbound"),
    Family("txnode_users_refused_total", Kind.COUNTER, "Refusals of users, by the node or the core"),
    Family(
        "txnode_inbound_users",
        Kind.GAUGE,
        "Users of a managed inbound: wanted by controllers, and confirmed by the core",
        ("inbound", "state"),
    ),
    Family(
        "txnode_inbound_bytes_total",
        Kind.COUNTER,
        "Bytes by inbound since the state file was made; resets and restarts do not matter",
        ("inbound", "direction"),
    ),
    Family(
        "txnode_outbound_bytes_total",
        Kind.COUNTER,
        "Bytes by outbound since the state file was made; resets and restarts do not matter",
        ("outbound", "direction"),
    ),
    Family(
        "txnode_user_bytes_total",
        Kind.COUNTER,
        "With METRICS_USERS=on: bytes by user since the state file was made",
        ("user", "direction"),
    ),
    Family(
        "txnode_user_quota_bytes",
        Kind.GAUGE,
        "With METRICS_USERS=on and WEIGHTS: bytes of users since the count of their quota began, raw and weighted",
        ("user", "direction", "count"),
    ),
    Family(
        "txnode_counters_age_seconds",
        Kind.GAUGE,
        "Seconds since the core's counters were read; large if the core does not answer",
    ),
    Family(
        "txnode_ledger_rows", Kind.GAUGE, "Rows of statistics that no controller has fetched with reset yet", ("scope",)
    ),
    Family("txnode_state_writable", Kind.GAUGE, "1 if the last write of the state file succeeded"),
    Family("txnode_state_file_bytes", Kind.GAUGE, "Size of the state file"),
    Family("txnode_disk_free_bytes", Kind.GAUGE, "Free bytes on the disk of STATE_DIR"),
    Family("txnode_certificate_expiry_timestamp_seconds", Kind.GAUGE, "When the node's certificate expires, Unix time"),
    Family("txnode_quota_bytes", Kind.GAUGE, "NODE_QUOTA: bytes that the machine may carry in a month"),
    Family("txnode_quota_used_bytes", Kind.GAUGE, "Bytes of NODE_QUOTA used in this month"),
    Family("txnode_quota_closed", Kind.GAUGE, "1 if the node takes no new connections because NODE_QUOTA is used up"),
    Family(
        "txnode_bill_bytes",
        Kind.GAUGE,
        "Bytes since NODE_QUOTA's month began, as the machine receives and sends them: of users, inbounds, outbounds, "
        "interfaces and controllers",
        ("of", "direction"),
    ),
    Family(
        "txnode_bill_unexplained_bytes",
        Kind.GAUGE,
        "Of these, bytes of interfaces that are more than headers and TLS can be (others), and bytes that were counted "
        "and not carried (missing)",
        ("what",),
    ),
    Family(
        "txnode_connections",
        Kind.GAUGE,
        "Connections of controllers by port; known ones have presented a key",
        ("door", "known"),
    ),
    Family("txnode_max_connections", Kind.GAUGE, "Most connections of controllers at once, on both ports together"),
)
FAMILIES = (*READ, *LIVE)

_MADE: Mapping[Kind, type[Metric]] = {
    Kind.GAUGE: GaugeMetricFamily,
    Kind.COUNTER: CounterMetricFamily,
}


def made(families: Iterable[Family], samples: Samples) -> Iterator[Metric]:
    """Convert samples to the library's metrics, in the order of the table; metrics without samples are left out."""
    for family in families:
        if (known := samples.get(family.name)) is not None:
            yield (_info if family.kind is Kind.INFO else _numbers)(family, known)


def _info(family: Family, samples: Iterable[Sample]) -> Metric:
    metric = InfoMetricFamily(family.name.removesuffix("_info"), family.text)
    for labels, _ in samples:
        metric.add_metric([], dict(zip(family.labels, labels, strict=True)))
    return metric


def _numbers(family: Family, samples: Iterable[Sample]) -> Metric:
    metric: GaugeMetricFamily = _MADE[family.kind](family.name, family.text, labels=family.labels)  # type: ignore[call-arg, assignment]
    for labels, value in samples:
        metric.add_metric(labels, value)
    return metric
