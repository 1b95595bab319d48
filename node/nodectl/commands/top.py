"""`nodectl top`."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import click
from rich.console import Console, Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from node.base.logs import printable
from node.nodectl.exits import Unusable
from node.nodectl.fleet import Fleet, Node, Outcome
from node.nodectl.options import options
from node.nodectl.output import rate, size, span
from node.nodectl.screen import show
from node.nodectl.session import Session
from node.nodectl.traffic import Watched, busiest, drawn, traffic
from protos import service_pb2 as pb

# Lines of the screen that are not users.
_FRAME = 7
_BAR = 40


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
def command(session: Session, every: float) -> None:
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
        table = drawn(lines[: max(1, console.height - _FRAME)])
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
