"""`nodectl stats --watch`: a live table on a terminal; elsewhere, the rows of each reading."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console, Group, RenderableType
from rich.text import Text

from node.base.logs import printable
from node.nodectl.output import print_error, print_json, print_table, table
from node.nodectl.polling import Line, Watched, busiest, poll, until_quit
from node.nodectl.running import Fleet, Outcome
from node.nodectl.screen import screen
from node.nodectl.session import Session, document
from node.nodectl.traffic import traffic
from node.nodectl.units import rate, size
from protos import service_pb2 as pb

COLUMNS = ("name", "uplink", "downlink", "up", "down")
# Lines of the screen that are not names: the column heads and the last line.
_FRAME = 2


def watch(session: Session, kind: str, name: str, every: float) -> None:
    """Show traffic every `every` seconds, until q or Ctrl-C."""
    console = Console()
    if console.is_terminal and not session.json:
        session.attend(lambda fleet: _Table(fleet, console, every).run(kind, name))
    else:
        session.attend(lambda fleet: _stream(fleet, session, kind, name, every))


async def _stream(fleet: Fleet, session: Session, kind: str, name: str, every: float) -> None:
    watched = {node.name: Watched(node.name) for node in fleet.nodes}

    def take(outcome: Outcome[pb.StatResponse]) -> None:
        watched[outcome.node].take(outcome, fleet.reactor.seconds())
        if session.json:
            print_json(document(outcome), indent=None)
        elif outcome.error is not None:
            print_error(outcome.node, outcome.error)
        else:
            print_table(("node", *COLUMNS), [(line.node, *cells(line)) for line in busiest([watched[outcome.node]])])

    await poll(fleet, traffic(kind, name), every, take)


class _Table:
    """The screen: names of all nodes, the busiest first, as many as fit."""

    def __init__(self, fleet: Fleet, console: Console, every: float) -> None:
        self._fleet = fleet
        self._console = console
        self._every = every
        self._watched = {node.name: Watched(node.name) for node in fleet.nodes}

    async def run(self, kind: str, name: str) -> None:
        with screen(self._console) as draw:

            def take(outcome: Outcome[pb.StatResponse]) -> None:
                self._watched[outcome.node].take(outcome, self._fleet.reactor.seconds())
                draw(self._drawn())

            await until_quit(self._fleet, poll(self._fleet, traffic(kind, name), self._every, take))

    def _drawn(self) -> RenderableType:
        many = len(self._watched) > 1
        faults = [f"{one.node}: {one.error.text}" for one in self._watched.values() if one.error is not None]
        lines = busiest(self._watched.values())
        shown = lines[: max(1, self._console.height - _FRAME - len(faults))]
        last = f"{len(lines)} names; every {self._every:g} s; q quits"
        return Group(drawn(shown, many), *(Text(printable(fault), no_wrap=True) for fault in faults), Text(last))


def drawn(lines: Sequence[Line], many: bool = False) -> RenderableType:
    """A table of these lines; with `many` nodes, the first column names the node."""
    heads = ("node", *COLUMNS) if many else COLUMNS
    return table(heads, [[printable(cell) for cell in ((line.node,) if many else ()) + cells(line)] for line in lines])


def cells(line: Line) -> tuple[str, ...]:
    count, speed = line.bytes, line.rate
    return line.name, size(count.uplink), size(count.downlink), rate(speed.uplink), rate(speed.downlink)
