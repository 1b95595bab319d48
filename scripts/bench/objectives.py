"""The objectives of docs/slo.md, and the verdict on measured ones. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from scripts.bench.calls import NAMES
from scripts.bench.results import Row, number
from scripts.bench.stage import LIVE


class Objective(NamedTuple):
    """A measured value may be `most` at most."""

    most: float
    unit: str = "ms"


# Milliseconds of a call, p99. The first word is the name of the call.
CALLS: Mapping[str, float] = {
    "GetBaseInfo": 100,
    "GetSystemStats": 100,
    "GetBackendStats": 100,
    "GetStats of all users, reset": 250,
    "GetStats of outbounds, reset": 100,
    "GetStats of one user": 100,
    "GetUserOnlineStats": 100,
    "GetUserOnlineIpListStats": 100,
    "GetOutboundsLatency": 100,
    "GetBill": 100,
    "GetLimits of one user": 100,
    "SetLimits of one user": 100,
    "ListUsers, a page": 250,
    "ListOnline, a page": 500,
    "SyncUser": 100,
    "SyncUsersChunked, 100 users": 250,
    "DropConnections": 750,
    "ListRoutingRules": 100,
    "TestRoute": 100,
    "GetBalancerInfo": 100,
    "OverrideBalancerTarget": 100,
    "GetJob": 100,
}
# The same for calls with all users, or which the core checks with all users.
LISTS: Mapping[str, float] = {
    "SyncUsers": 1_000,
    "Start again": 1_000,
    "AddRoutingRule": 750,
    "RemoveRoutingRule": 100,
    "Stop and Start": 1_250,
}
_DROPPED = Objective(0, f"of {LIVE}")
OBJECTIVES: Mapping[str, Objective] = {
    **{
        f"{what} over {way}, p99": Objective(most)
        for what, most in {**CALLS, **LISTS}.items()
        for way in NAMES.values()
    },
    "first Start, p99": Objective(1_500),
    "changed configuration, longest": Objective(2_500),
    "dropped by syncs and other calls": _DROPPED,
    "dropped by repeated Starts": _DROPPED,
    "dropped by changed configurations": _DROPPED,
    "dropped by upgrades": _DROPPED,
    "dropped by kill -9 of the node": _DROPPED,
    "new connections failed in these three": Objective(1, "of 1,000"),
    "upgrade, longest without a reply": Objective(2, "s"),
    "node killed, serves again, longest": Objective(4, "s"),
    "core killed, users served again, longest": Objective(1, "s"),
    "bytes lost by restarts": Objective(0, "B"),
    "bytes lost by kill -9 of the node": Objective(0, "B"),
    "kill -9 of a core, age of lost bytes": Objective(3, "s"),
    "kills that lost more than promised": Objective(0, ""),
    "kills after which too much was billed": Objective(0, ""),
}


def missed(row: Row) -> bool:
    return not row.ours <= OBJECTIVES[row.name].most


def faults(rows: Sequence[Row], needed: Iterable[str]) -> list[str]:
    """A line of text for each row that misses its objective, and for each needed objective without a row."""
    found = {row.name for row in rows}
    return [f"missed: {line(row)}" for row in rows if missed(row)] + [
        f"not measured: {name}" for name in needed if name not in found
    ]


def line(row: Row) -> str:
    """A row of text: objective, measured value, and of how many samples. A star marks a missed one."""
    return f"{row.name:42} {promised(row.name):>14} {_measured(row):>9} {row.samples or 0:>9,}" + " *" * missed(row)


def markdown(rows: Iterable[Row]) -> list[str]:
    """The rows as a Markdown table. A missed objective is bold."""
    return ["| | objective | measured | samples |", "|---|---|---|---|", *map(_cells, rows)]


def promised(name: str) -> str:
    most, unit = OBJECTIVES[name]
    return f"{most:,g} {unit}".rstrip()


def _measured(row: Row) -> str:
    return number(row.ours) if row.ours else "0"


def _cells(row: Row) -> str:
    ours = f"**{_measured(row)}**" if missed(row) else _measured(row)
    return f"| {row.name} | {promised(row.name)} | {ours} | {row.samples or 0:,} |"
