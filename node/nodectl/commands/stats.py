"""`nodectl stats` and `top`: traffic by name with rates between two readings, figures, and live screens."""

from __future__ import annotations

import os
import sys
import termios
import tty
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, TypeVar

import click
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text
from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.interfaces import IReactorFDSet
from twisted.internet.main import CONNECTION_DONE
from twisted.python.failure import Failure

from node.base.errors import NodeError
from node.base.logs import printable
from node.nodectl.fleet import Descriptor, Fleet, Node, Outcome, Work
from node.nodectl.output import Row, Unusable, amount, print_error, print_json, print_table, rate, size, span, table
from node.nodectl.session import Session, options
from protos import service_pb2 as pb

KINDS = {"users": pb.UsersStat, "inbounds": pb.Inbounds, "outbounds": pb.Outbounds}
ONE = {"users": pb.UserStat, "inbounds": pb.Inbound, "outbounds": pb.Outbound}
T = TypeVar("T")
COLUMNS = ("name", "uplink", "downlink", "up", "down")
_FIGURES = ("system", "backend")
# Lines of the screens that are not names: of stats the column heads and the last line, of top also the machine.
_STATS_FRAME, _TOP_FRAME = 2, 7
_BAR = 40


@click.command
@click.argument("kind", type=click.Choice([*KINDS, *_FIGURES]), default="users")
@click.option("--name", default="", help="Show only this user, inbound or outbound.")
@click.option("--reset", is_flag=True, help="Set the counters to zero: a panel will not see what is printed here.")
@click.option(
    "--watch",
    "every",
    type=click.FloatRange(0.2, 3600),
    is_flag=False,
    flag_value=2.0,
    metavar="[SECONDS]",
    help="Repeat every SECONDS, with rates. [default: 2]",
)
@options
def stats(session: Session, kind: str, name: str, reset: bool, every: float | None) -> None:
    """Show bytes of users, inbounds or outbounds, or figures of the machine (system) or the core (backend)."""
    if kind in _FIGURES and (name or reset or every):
        raise click.UsageError(f"--name, --reset and --watch do not work with {kind}")
    if reset and every:
        raise click.UsageError("give --reset or --watch, not both")
    if kind == "system":
        session.report(session.ask(lambda node: node.client.system_stats()), ("figure", "value"), _figures)
    if kind == "backend":
        session.report(session.ask(lambda node: node.client.backend_stats()), ("figure", "value"), _figures)
    if every:
        session.attend(partial(_watch, session, kind, name, every))
    else:
        session.report(session.ask(traffic(kind, name, reset)), ("name", "uplink", "downlink"), _bytes)


def _figures(reply: pb.SystemStatsResponse | pb.BackendStatsResponse) -> Iterator[Row]:
    for figure in reply.DESCRIPTOR.fields:
        yield figure.name, getattr(reply, figure.name)


def _bytes(reply: pb.StatResponse) -> Iterator[Row]:
    for name, count in sorted(by_name(reply.stats).items()):
        yield name, amount(count.uplink), amount(count.downlink)


async def _watch(session: Session, kind: str, name: str, every: float, fleet: Fleet) -> None:
    """Show a live table on a terminal; elsewhere, print the rows of each reading. Until q or Ctrl-C."""
    console, watched = Console(), {node.name: Watched(node.name) for node in fleet.nodes}

    def printed(outcome: Outcome[pb.StatResponse]) -> None:
        watched[outcome.node].take(outcome, fleet.reactor.seconds())
        if session.json:
            print_json(outcome.document, indent=None)
        elif outcome.error is not None:
            print_error(outcome.node, outcome.error)
        else:
            lines = busiest([watched[outcome.node]])
            print_table(("node", *COLUMNS), [(line.node, *line.cells) for line in lines])

    def shown(outcome: Outcome[pb.StatResponse]) -> RenderableType:
        """Names of all nodes, the busiest first, as many as fit."""
        watched[outcome.node].take(outcome, fleet.reactor.seconds())
        faults = [f"{one.node}: {one.error.text}" for one in watched.values() if one.error is not None]
        lines = busiest(watched.values())
        table = drawn(lines, console.height - _STATS_FRAME - len(faults), many=len(watched) > 1)
        last = Text(f"{len(lines)} names; every {every:g} s; q quits")
        return Group(table, *(Text(printable(fault), no_wrap=True) for fault in faults), last)

    if console.is_terminal and not session.json:
        await show(fleet, console, traffic(kind, name), every, shown)
    else:
        await fleet.poll(traffic(kind, name), every, printed)


class Reading(NamedTuple):
    """The replies of one round of calls."""

    info: pb.BaseInfoResponse
    system: pb.SystemStatsResponse
    users: pb.StatResponse


@click.command
@click.option(
    "--every",
    type=click.FloatRange(0.2, 3600),
    default=2.0,
    metavar="SECONDS",
    help="Refresh the screen this often. [default: 2]",
)
@options
def top(session: Session, every: float) -> None:
    """Show a live screen of one node: the machine and its busiest users. q or Ctrl-C quits."""
    console = Console()
    if not console.is_terminal or session.json:
        raise Unusable("top needs a terminal; in scripts use nodectl stats --watch --json")
    if len(session.targets()) != 1:
        raise click.UsageError("top shows one node: name it with --node")
    session.attend(partial(_top, console, every))


async def _read(node: Node) -> Reading:
    client = node.client
    return Reading(await client.info(), await client.system_stats(), await traffic("users")(node))


async def _top(console: Console, every: float, fleet: Fleet) -> None:
    """Show the last reading of the one node."""
    users = Watched(fleet.nodes[0].name)
    last: Reading | None = None

    def shown(outcome: Outcome[Reading]) -> RenderableType:
        nonlocal last
        last = outcome.answer or last
        reply = None if outcome.answer is None else outcome.answer.users
        users.take(Outcome(outcome.node, reply, outcome.error), fleet.reactor.seconds())
        lines = busiest([users])
        status = f"{users.error.text}; these figures are old" if users.error else f"{len(lines)} users; q quits"
        head = (_head(users.node, last), _machine(last.system)) if last else ()
        table = drawn(lines, console.height - _TOP_FRAME)
        return Group(*head, Text(printable(status), no_wrap=True), table)

    await show(fleet, console, _read, every, shown)


def _head(node: str, reading: Reading) -> Text:
    info = reading.info
    words = f"{node}: {info.state}, {info.core_type} {info.core_version}, node {info.version}"
    return Text(printable(f"{words}, machine up {span(reading.system.uptime)}"), style="bold", no_wrap=True)


def _machine(system: pb.SystemStatsResponse) -> Table:
    made = Table.grid(padding=(0, 1))
    used = 100.0 * system.mem_used / max(1, system.mem_total)
    made.add_row("CPU", _bar(system.cpu_usage), f"{system.cpu_usage:.0f} % of {system.cpu_cores} cores")
    made.add_row("memory", _bar(used), f"{size(system.mem_used)} of {size(system.mem_total)}")
    speeds = f"in {rate(system.incoming_bandwidth_speed)}, out {rate(system.outgoing_bandwidth_speed)}"
    made.add_row("network", speeds)
    return made


def _bar(percent: float) -> ProgressBar:
    return ProgressBar(total=100.0, completed=percent, width=_BAR)


def traffic(kind: str, name: str = "", reset: bool = False) -> Work[pb.StatResponse]:
    """Work that reads the rows of a kind from a node, or only those of one name."""
    return lambda node: node.client.stats(ONE[kind] if name else KINDS[kind], name, reset)


class Bytes(NamedTuple):
    """From users, and to them: numbers of bytes, or rates in bytes a second."""

    uplink: float = 0
    downlink: float = 0


class Line(NamedTuple):
    """The traffic of one name on one node."""

    node: str
    name: str
    bytes: Bytes
    rate: Bytes

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
    rates: Mapping[str, Bytes] = field(default_factory=dict)
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
            yield Line(self.node, name, count, self.rates.get(name, Bytes()))


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


def rates(before: Mapping[str, Bytes], now: Mapping[str, Bytes], seconds: float) -> dict[str, Bytes]:
    """The rates between two readings. A new name has a rate of zero: when it began is not known."""
    return {
        name: Bytes(*(_grown(*pair) / seconds for pair in zip(before.get(name, count), count, strict=True)))
        for name, count in now.items()
    }


def _grown(before: float, now: float) -> float:
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
