"""Traffic of users, inbounds or outbounds: bytes by name, rates between two readings, tables, and the live screen."""

from __future__ import annotations

import os
import sys
import termios
import tty
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from rich.console import Console, RenderableType
from rich.live import Live
from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.interfaces import IReactorFDSet
from twisted.internet.main import CONNECTION_DONE
from twisted.python.failure import Failure

from node.base.errors import NodeError
from node.base.logs import printable
from node.nodectl.fleet import Descriptor, Fleet, Outcome, Work
from node.nodectl.output import rate, size, table
from protos import service_pb2 as pb

KINDS = {"users": pb.UsersStat, "inbounds": pb.Inbounds, "outbounds": pb.Outbounds}
ONE = {"users": pb.UserStat, "inbounds": pb.Inbound, "outbounds": pb.Outbound}
T = TypeVar("T")
COLUMNS = ("name", "uplink", "downlink", "up", "down")


def traffic(kind: str, name: str = "", reset: bool = False) -> Work[pb.StatResponse]:
    """Work that reads the rows of a kind from a node, or only those of one name."""
    return lambda node: node.client.stats(ONE[kind] if name else KINDS[kind], name, reset)


class Bytes(NamedTuple):
    """From users, and to them."""

    uplink: int = 0
    downlink: int = 0


class Rate(NamedTuple):
    """Bytes a second."""

    uplink: float = 0.0
    downlink: float = 0.0


class Line(NamedTuple):
    """The traffic of one name on one node."""

    node: str
    name: str
    bytes: Bytes
    rate: Rate

    @property
    def cells(self) -> tuple[str, ...]:
        """The cells of `COLUMNS`."""
        count, speed = self.bytes, self.rate
        return self.name, size(count.uplink), size(count.downlink), rate(speed.uplink), rate(speed.downlink)


@dataclass
class Watched:
    """The traffic of one node: the last reading, and its rates since the one before."""

    node: str
    counts: Mapping[str, Bytes] = field(default_factory=dict)
    rates: Mapping[str, Rate] = field(default_factory=dict)
    error: NodeError | None = None
    at: float | None = None

    def take(self, outcome: Outcome[pb.StatResponse], now: float) -> None:
        self.error = outcome.error
        if outcome.answer is None:
            self.rates = {}
            return
        counts = by_name(outcome.answer.stats)
        if self.at is not None and now > self.at:
            self.rates = rates(self.counts, counts, now - self.at)
        self.counts, self.at = counts, now

    def lines(self) -> Iterator[Line]:
        for name, count in self.counts.items():
            yield Line(self.node, name, count, self.rates.get(name, Rate()))


def busiest(watched: Iterable[Watched]) -> list[Line]:
    """All names, by their rate now, then by their total, the largest first."""
    lines = (line for one in watched for line in one.lines())
    return sorted(lines, key=lambda line: (-sum(line.rate), -sum(line.bytes), line.node, line.name))


def drawn(lines: Sequence[Line], room: int, many: bool = False) -> RenderableType:
    """A table of the first `room` of these lines; with `many` nodes, the first column names the node."""
    heads = ("node", *COLUMNS) if many else COLUMNS
    rows = [((line.node,) if many else ()) + line.cells for line in lines[: max(1, room)]]
    return table(heads, [[printable(cell) for cell in row] for row in rows])


def by_name(rows: Iterable[pb.Stat]) -> dict[str, Bytes]:
    """Bytes by name from the rows of GetStats."""
    found: dict[str, Bytes] = {}
    for row in rows:
        if row.type in Bytes._fields:
            found[row.name] = found.get(row.name, Bytes())._replace(**{row.type: row.value})
    return found


def rates(before: Mapping[str, Bytes], now: Mapping[str, Bytes], seconds: float) -> dict[str, Rate]:
    """The rates between two readings. A new name has a rate of zero: when it began is not known."""
    return {
        name: Rate(*(_grown(*pair) / seconds for pair in zip(before.get(name, count), count, strict=True)))
        for name, count in now.items()
    }


def _grown(before: int, now: int) -> int:
    """The growth of a counter. If it was reset meanwhile, only what it has now is known."""
    return now - before if now >= before else now


async def show(
    fleet: Fleet, console: Console, work: Work[T], every: float, drawn: Callable[[Outcome[T]], RenderableType]
) -> None:
    """Poll the nodes `every` seconds, and show what `drawn` makes of each answer. Restores the screen at the end."""
    with Live(console=console, screen=True, auto_refresh=False) as live:
        polling = Deferred.fromCoroutine(
            fleet.poll(work, every, lambda outcome: live.update(drawn(outcome), refresh=True))
        )
        quitting = _keys(IReactorFDSet(fleet.reactor), lambda key: polling.cancel() if key in "qQ" else None)
        with quitting, suppress(CancelledError):
            await polling


@contextmanager
def _keys(reactor: IReactorFDSet, pressed: Callable[[str], None]) -> Iterator[None]:
    """Call `pressed` with each key, without echo. Does nothing if standard input is not a terminal."""
    if not sys.stdin.isatty():
        yield
        return
    number = sys.stdin.fileno()
    before = termios.tcgetattr(number)
    tty.setcbreak(number)

    def read() -> Failure | None:
        found = os.read(number, 64)
        for key in found.decode("ascii", "ignore"):
            pressed(key)
        return None if found else Failure(CONNECTION_DONE)

    # If the terminal is gone, a signal ends this process.
    reader = Descriptor(number, read, lambda: reactor.removeReader(reader))
    reactor.addReader(reader)
    try:
        yield
    finally:
        reactor.removeReader(reader)
        termios.tcsetattr(number, termios.TCSADRAIN, before)
