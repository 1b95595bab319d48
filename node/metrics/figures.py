"""Reads the values of all metrics from the parts of the node, on the reactor."""

from __future__ import annotations

import shutil
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from node import __version__
from node.backend.state import State
from node.base.part import Parts
from node.contract.counters import DIRECTIONS, Both, Row, Scope
from node.contract.driver import Generation
from node.engine.engine import Engine
from node.machine.usage import Usage, most_files, open_files, usage
from node.metrics.families import Sample, Samples
from node.metrics.lag import Lag
from node.metrics.options import MetricsOptions
from node.metrics.readiness import Readiness
from node.state.store import Store
from protos.service_pb2 import BaseInfoResponse, LimitsSummary

# Seconds to wait for the disk and the counters; after that the last known values are used.
PATIENCE = 2.0

Figure = tuple[str, Sequence[str], float]


@dataclass(frozen=True)
class Sources:
    """The sources of the figures. `places`: the most connections.

    `connections` yields, for each, its port ("rest" or "grpc") and whether it is known. `expires`: when the certificate
    does, in Unix time.
    """

    engine: Engine
    parts: Parts
    store: Store
    options: MetricsOptions
    state_dir: Path
    places: int
    connections: Callable[[], Iterable[tuple[str, bool]]]
    expires: Callable[[], float]

    @property
    def limits(self) -> LimitsSummary:
        """The users with limits and, if there is one, the node's own quota."""
        info = BaseInfoResponse()
        self.parts.summary(info)
        return info.limits


class Figures:
    """Reads all metrics."""

    def __init__(self, sources: Sources, lag: Lag, readiness: Readiness) -> None:
        self._sources = sources
        self._lag = lag
        self._readiness = readiness

    async def read(self) -> Samples:
        """Read all values. Waits at most PATIENCE for the disk and the counters."""
        sources = self._sources
        await sources.engine.traffic.settled(PATIENCE)
        node = _node(sources, self._lag, self._readiness)
        found = [*node, *_core(sources), *_users(sources), *_traffic(sources), *_bill(sources), *_state(sources)]
        samples: defaultdict[str, list[Sample]] = defaultdict(list)
        for name, labels, value in found:
            samples[name].append((labels, value))
        return {**samples, **self._bytes()}

    def _bytes(self) -> dict[str, Iterable[Sample]]:
        """The sums of bytes, made into samples lazily, when a thread writes them."""
        totals = self._sources.engine.traffic.totals
        scopes = [*([Scope.USER] if self._sources.options.users else []), Scope.INBOUND, Scope.OUTBOUND]
        found: dict[str, Iterable[Sample]] = {
            f"txnode_{scope.value}_bytes_total": _both(totals(scope)) for scope in scopes
        }
        if self._sources.options.users:
            found["txnode_user_quota_bytes"] = _counts(self._sources.engine.limits.usage())
        return found


def _node(sources: Sources, lag: Lag, readiness: Readiness) -> Iterator[Figure]:
    yield "txnode_info", (__version__,), 1
    own = usage() or Usage(0, 0.0, 0.0)
    yield "txnode_uptime_seconds", (), own.age
    yield "txnode_resident_memory_bytes", (), own.resident
    yield "txnode_cpu_seconds_total", (), own.cpu
    yield "txnode_open_fds", (), open_files()
    yield "txnode_max_fds", (), most_files()
    yield "txnode_reactor_lag_seconds", (), lag.worst
    yield "txnode_warnings", (), len(sources.parts.warnings)
    yield "txnode_ready", (), readiness.ready
    for check in readiness.checks:
        yield "txnode_check_ok", (check,), check not in readiness.faults
    connections = Counter(sources.connections())
    for door in ("rest", "grpc"):
        for known in (True, False):
            yield "txnode_connections", (door, "yes" if known else "no"), connections[door, known]
    yield "txnode_max_connections", (), sources.places
    if (limits := sources.limits).HasField("node"):
        quota = limits.node
        yield "txnode_quota_bytes", (), quota.bytes
        yield "txnode_quota_used_bytes", (), quota.used
        yield "txnode_quota_closed", (), quota.closed


def _core(sources: Sources) -> Iterator[Figure]:
    runner, runs = sources.engine.runner, sources.engine.generations
    if (accepted := runner.accepted) is not None:
        yield "txnode_core_info", (accepted.driver.name, accepted.version), 1
    yield "txnode_core_running", (), runner.status.running and runs.current is not None
    for state in State:
        yield "txnode_core_state", (state.value,), runner.status.state is state
    for place, some in (
        ("current", filter(None, [runs.current])),
        ("draining", runs.draining),
        ("ending", runs.ending),
    ):
        yield "txnode_generations", (place,), len([*some])
    current = _usage(runs.current)
    yield "txnode_core_uptime_seconds", (), current.age
    yield "txnode_core_cpu_seconds_total", (), current.cpu
    yield "txnode_core_resident_memory_bytes", ("current",), current.resident
    draining = sum(_usage(run).resident for run in runs.draining)
    yield "txnode_core_resident_memory_bytes", ("draining",), draining
    happened = runner.supervisor.happened
    for reason, times in happened.losses.items():
        yield "txnode_core_restarts_total", (reason,), times
    yield "txnode_draining_connections", (), happened.draining
    yield "txnode_dropped_connections_total", (), happened.dropped
    yield "txnode_cut_connections_total", (), happened.cut


def _usage(run: Generation | None) -> Usage:
    """Memory and processor time of a core's process; zero without a core."""
    pid = run.pid if run is not None else None
    return (usage(pid) if pid is not None else None) or Usage(0, 0.0, 0.0)


def _users(sources: Sources) -> Iterator[Figure]:
    desired, current = sources.engine.runner.desired, sources.engine.generations.current
    confirmed = current.accounts if current is not None else {}
    yield "txnode_users_wanted", (), len(desired.roster.users)
    limits = sources.limits
    yield "txnode_users_limited", (), limits.limited
    yield "txnode_users_off", ("quota",), limits.off_quota
    yield "txnode_users_off", ("expiry",), limits.off_expired
    yield "txnode_users_near_quota", (), limits.near
    yield "txnode_limited_connections_total", (), limits.too_many_addresses
    yield "txnode_users_off", ("abuse",), limits.off_abuse
    for kind, counted in limits.abuse.items():
        yield "txnode_abuse_requests_total", (kind,), counted.requests
        yield "txnode_abuse_cases_total", (kind,), counted.cases
    yield "txnode_users_confirmed", (), len(set[str]().union(*confirmed.values()))
    yield "txnode_users_refused_total", (), desired.refusals
    for tag, accounts in desired.target.items():
        yield "txnode_inbound_users", (tag, "wanted"), len(accounts)
        yield "txnode_inbound_users", (tag, "confirmed"), len(confirmed.get(tag, ()))


def _traffic(sources: Sources) -> Iterator[Figure]:
    yield "txnode_counters_age_seconds", (), sources.engine.traffic.age
    for scope, rows in sources.engine.traffic.pending.items():
        yield "txnode_ledger_rows", (scope.value,), rows


def _bill(sources: Sources) -> Iterator[Figure]:
    bill = sources.engine.bill.current()
    for name, count in (
        ("users", bill.users),
        ("inbounds", bill.inbounds),
        ("outbounds", bill.outbounds),
        ("interfaces", bill.interfaces),
        ("controllers", bill.controllers),
    ):
        yield "txnode_bill_bytes", (name, "received"), count.received
        yield "txnode_bill_bytes", (name, "sent"), count.sent
    yield "txnode_bill_unexplained_bytes", ("others",), bill.others
    yield "txnode_bill_unexplained_bytes", ("missing",), bill.missing


def _state(sources: Sources) -> Iterator[Figure]:
    yield "txnode_state_writable", (), not sources.store.fault
    with suppress(OSError):  # the disk is gone, as the line before reports
        yield "txnode_state_file_bytes", (), sources.store.size
        yield "txnode_disk_free_bytes", (), shutil.disk_usage(sources.state_dir).free
    yield "txnode_certificate_expiry_timestamp_seconds", (), sources.expires()


def _both(rows: Iterable[Row]) -> Iterator[Sample]:
    for row in rows:
        for direction, value in zip(DIRECTIONS, row.both, strict=True):
            yield (row.name, direction), value


def _counts(usage: Iterable[tuple[str, Mapping[str, Both]]]) -> Iterator[Sample]:
    for name, counts in usage:
        for count, both in counts.items():
            for direction, value in zip(DIRECTIONS, both, strict=True):
                yield (name, direction, count), value
