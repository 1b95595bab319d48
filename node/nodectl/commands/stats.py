"""`nodectl stats`."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import click
from rich.console import Console, Group, RenderableType
from rich.text import Text

from node.base.logs import printable
from node.nodectl.fleet import Fleet, Outcome
from node.nodectl.options import options
from node.nodectl.output import Row, amount, print_error, print_json, print_table
from node.nodectl.screen import show
from node.nodectl.session import Session
from node.nodectl.traffic import COLUMNS, KINDS, Watched, busiest, by_name, drawn, traffic
from protos import service_pb2 as pb

_FIGURES = ("system", "backend")
# Lines of the screen that are not names: the column heads and the last line.
_FRAME = 2


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
def command(session: Session, kind: str, name: str, reset: bool, every: float | None) -> None:
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
    for field in reply.DESCRIPTOR.fields:
        yield field.name, getattr(reply, field.name)


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
        table = drawn(lines[: max(1, console.height - _FRAME - len(faults))], many=len(watched) > 1)
        last = Text(f"{len(lines)} names; every {every:g} s; q quits")
        return Group(table, *(Text(printable(fault), no_wrap=True) for fault in faults), last)

    if console.is_terminal and not session.json:
        await show(fleet, console, traffic(kind, name), every, shown)
    else:
        await fleet.poll(traffic(kind, name), every, printed)
