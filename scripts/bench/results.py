"""The figures of a run: rows with goals, as a table, as JSON, and compared with another run."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple

# The share by which a row may be worse than in another run.
TOLERANCE = 0.15
# Units in which more is better.
_MORE = ("/s", "%")
_COLUMNS = ("ours", "goal", "here", "peer", "core", "transport")


class Goal(NamedTuple):
    """The goal of a row, on a machine on which the Go node of this interface measures `beside`."""

    value: float
    beside: float | None = None

    def here(self, peer: float | None) -> float:
        """The goal scaled to this machine, where the Go node measures `peer`."""
        return self.value * peer / self.beside if peer and self.beside else self.value


GOALS: dict[str, Goal] = {
    "Start of 10,000, reply": Goal(180, 1_050),
    "Start of 50,000, reply": Goal(550, 1_140),
    "Start of 50,000, first byte": Goal(500, 930),
    "PUT /user/sync, one by one": Goal(700, 715),
    "PUT /user/sync, CPU": Goal(1.2, 0.7),
    "SyncUser stream": Goal(2_500, 1_885),
    "one user added, to effect": Goal(2, 1.8),
    "one user removed, to effect": Goal(2, 1.3),
    "SyncUsersChunked, 5,000 of 10,000": Goal(900, 1_020),
    "SyncUsersChunked, dropped": Goal(0),
    "GetBaseInfo over gRPC, p50": Goal(0.4, 0.12),
    "GetBaseInfo over gRPC, CPU": Goal(300, 90),
    "GetBaseInfo over REST, p50": Goal(0.25, 0.12),
    "GetBaseInfo over REST, CPU": Goal(300, 90),
    "a day over gRPC, CPU of node and core": Goal(0.7 * 2.3, 2.3),
    "a day over REST, CPU of node and core": Goal(0.7 * 3.0, 3.0),
    "log lines, delivered to each reader": Goal(100),
    "log lines, p50 lateness": Goal(20),
    "listens after its start": Goal(350),
    "RSS without users": Goal(60),
    "RSS with 10,000": Goal(68),
    "RSS with 50,000": Goal(100),
}


@dataclass(frozen=True)
class Row:
    """A figure of this node, and those of another node, the core alone and a bare transport in the same run."""

    name: str
    unit: str
    ours: float
    peer: float | None = None
    core: float | None = None
    transport: float | None = None
    # Of how many values it is a percentile or the like.
    samples: int | None = None

    @property
    def more(self) -> bool:
        """Whether more is better."""
        return self.unit in _MORE

    @property
    def floor(self) -> float | None:
        """The figure of the core alone, else of the bare transport: it shows how fast the machine was at that time."""
        return self.core or self.transport

    @property
    def goal(self) -> float | None:
        """The goal for this machine."""
        goal = _goal(self)
        return goal and goal.here(self.peer)

    @property
    def missed(self) -> bool:
        return self.goal is not None and (self.ours < self.goal if self.more else self.ours > self.goal)


def _goal(row: Row) -> Goal | None:
    """The goal of a row: GetStats' depends on the core's figure, that of log lines' CPU on the other node's."""
    if row.name.startswith("GetStats") and row.core:
        return Goal(1.2 * row.core)
    if row.name == "log lines, CPU" and row.peer:
        return Goal(2 * row.peer)
    return GOALS.get(row.name)


def table(rows: Iterable[Row]) -> list[str]:
    """The rows as lines of text. A star marks a missed goal."""
    head = f"{'':40} {'':4}" + "".join(f" {column:>9}" for column in _COLUMNS)
    return [head, *(line(row) for row in rows)]


def line(row: Row) -> str:
    goal = _goal(row)
    cells = (row.ours, goal and goal.value, row.goal, row.peer, row.core, row.transport)
    return f"{row.name:40} {row.unit:>4}" + "".join(f" {number(cell):>9}" for cell in cells) + " *" * row.missed


def markdown(rows: Iterable[Row]) -> list[str]:
    """The rows as a Markdown table. A missed goal is bold."""
    head = ["| | unit | " + " | ".join(_COLUMNS) + " |", "|---" * (2 + len(_COLUMNS)) + "|"]
    return head + [f"| {' | '.join(_cells(row))} |" for row in rows]


def _cells(row: Row) -> Sequence[str]:
    goal = _goal(row)
    ours = f"**{number(row.ours)}**" if row.missed else number(row.ours)
    rest = (goal and goal.value, row.goal, row.peer, row.core, row.transport)
    return [row.name, row.unit, ours, *map(number, rest)]


def number(value: float | None) -> str:
    """The value with about three digits; "" for None."""
    if value is None:
        return ""
    digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2
    return f"{value:,.{digits}f}"


def to_json(rows: Iterable[Row], machine: str) -> str:
    return json.dumps({"machine": machine, "rows": [asdict(row) for row in rows]}, indent=2) + "\n"


def from_json(text: str) -> list[Row]:
    return [Row(**row) for row in json.loads(text)["rows"]]


def worse(now: Row, before: Row) -> float:
    """The share by which a row is worse; negative if it is better.

    A row with a floor in both runs is compared relative to it, as another or a busier machine has another floor.
    """
    scale = now.floor / before.floor if now.floor and before.floor else 1.0
    then, found = before.ours * scale, now.ours
    if now.more:
        then, found = found, then
    if not then:
        return float(found > 0)
    return found / then - 1


def regressions(rows: Iterable[Row], before: Iterable[Row]) -> list[tuple[Row, float]]:
    """The rows that are worse by more than the tolerance, each with its share."""
    earlier = {row.name: row for row in before}
    found = [(row, worse(row, earlier[row.name])) for row in rows if row.name in earlier]
    return [(row, share) for row, share in found if share > TOLERANCE]


def better(first: Row, second: Row) -> Row:
    """The better of two measurements of a row, relative to their floors: noise only adds."""
    return first if worse(first, second) < 0 else second


def merged(rows: Iterable[Row], again: Iterable[Row]) -> list[Row]:
    """For each row the better of two measurements."""
    second = {row.name: row for row in again}
    return [better(row, second[row.name]) if row.name in second else row for row in rows]
