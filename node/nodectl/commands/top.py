"""`nodectl top`."""

from __future__ import annotations

from typing import NamedTuple

import click
from rich.console import Console, Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from node.base.logs import printable
from node.nodectl.exits import Unusable
from node.nodectl.live import drawn
from node.nodectl.options import options
from node.nodectl.polling import Watched, busiest, poll, until_quit
from node.nodectl.running import Fleet, Node, Outcome
from node.nodectl.screen import screen
from node.nodectl.session import Session
from node.nodectl.traffic import traffic
from node.nodectl.units import rate, size, span
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
@click.pass_obj
def command(session: Session, every: float) -> None:
    """Show a live screen of one node: the machine and its busiest users. q or Ctrl-C quits."""
    console = Console()
    if not console.is_terminal or session.json:
        raise Unusable("top needs a terminal; in scripts use nodectl stats --watch --json")
    if len(session.targets()) != 1:
        raise click.UsageError("top shows one node: name it with --node")
    session.attend(lambda fleet: _Top(fleet, console, every).run())


async def _read(node: Node) -> Reading:
    client = node.client
    return Reading(await client.info(), await client.system_stats(), await traffic("users")(node))


class _Top:
    """Draws the last reading."""

    def __init__(self, fleet: Fleet, console: Console, every: float) -> None:
        self._fleet = fleet
        self._console = console
        self._every = every
        self._users = Watched(fleet.nodes[0].name)
        self._last: Reading | None = None

    async def run(self) -> None:
        with screen(self._console) as draw:

            def take(outcome: Outcome[Reading]) -> None:
                self._last = outcome.answer or self._last
                users = None if outcome.answer is None else outcome.answer.users
                self._users.take(Outcome(outcome.node, users, outcome.error), self._fleet.reactor.seconds())
                draw(self._drawn())

            await until_quit(self._fleet, poll(self._fleet, _read, self._every, take))

    def _drawn(self) -> RenderableType:
        lines = busiest([self._users])
        shown = drawn(lines[: max(1, self._console.height - _FRAME)])
        fault = self._users.error
        status = f"{fault.text}; these figures are old" if fault else f"{len(lines)} users; q quits"
        head = (_head(self._users.node, self._last), _machine(self._last.system)) if self._last else ()
        return Group(*head, Text(printable(status), no_wrap=True), shown)


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
