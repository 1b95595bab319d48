"""`nodectl logs`."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from functools import partial

import click

from node.base.logs import printable
from node.client.logs import CLIENT_MARK
from node.nodectl.exits import Unusable
from node.nodectl.loglines import LEVELS, SOURCES, Wanted, level, source
from node.nodectl.options import options
from node.nodectl.output import note, print_json
from node.nodectl.running import Node
from node.nodectl.session import Session

# Seconds without a line after which a node has sent its backlog.
QUIET = 0.5


@click.command
@click.option("--follow", "-f", is_flag=True, help="Keep printing new lines, over crashes and lost connections.")
@click.option("--grep", metavar="REGEX", help="Print only lines that match.")
@click.option(
    "--level", "least", type=click.Choice(LEVELS), help="Print only lines of the core, of this level or a worse one."
)
@click.option("--source", type=click.Choice(SOURCES), help="Print only lines of the core, or only of the node.")
@options
@click.pass_obj
def command(session: Session, follow: bool, grep: str | None, least: str | None, source: str | None) -> None:
    """Print the newest log lines of the core and the node."""
    wanted = Wanted(_pattern(grep), least or "", source or "")
    say = _Sayer(wanted, session.json, many=len(session.targets()) > 1)
    session.stream(partial(_read, follow, say))


def _pattern(grep: str | None) -> re.Pattern[str] | None:
    try:
        return re.compile(grep) if grep else None
    except re.error as error:
        raise Unusable(f"--grep: {error}")


async def _read(follow: bool, say: _Sayer, node: Node) -> None:
    """Print lines to the end of the backlog, or with `follow` without end."""
    async with node.client.logs() as stream:
        lines = await stream.next()
        while lines:
            say(node.name, lines)
            lines = await stream.next(None if follow else QUIET)


class _Sayer:
    """Prints matching lines as they arrive, with the node's name if there are many nodes."""

    def __init__(self, wanted: Wanted, json: bool, many: bool) -> None:
        self._wanted = wanted
        self._json = json
        self._many = many

    def __call__(self, node: str, lines: Sequence[str]) -> None:
        for line in lines:
            if line.startswith(CLIENT_MARK):
                note(f"{node}: {line.removeprefix(CLIENT_MARK)}")
            elif self._wanted.fits(line):
                self._say(node, line)
        sys.stdout.flush()

    def _say(self, node: str, line: str) -> None:
        if self._json:
            print_json({"node": node, "source": source(line), "level": level(line), "line": line}, indent=None)
        else:
            sys.stdout.write(printable(f"{node}: {line}" if self._many else line) + "\n")
