"""`nodectl logs`."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import click

from node.base.errors import NodeError
from node.base.logs import NODE_MARK, printable
from node.client.stream import CLIENT_MARK
from node.nodectl.fleet import Fleet, Node, parallel
from node.nodectl.output import Exit, Unusable, code_of, note, print_error, print_json, together
from node.nodectl.session import Session, options

# From the least to the most severe. Lines of the node and of access logs have none.
LEVELS = ("debug", "info", "warning", "error")
# Seconds without a line after which a node has sent its backlog.
QUIET = 0.5
# In brackets, or in capitals after the time.
_LEVEL = re.compile(r"\[(Debug|Info|Warning|Error)\]|\b(TRACE|DEBUG|INFO|WARN|ERROR|FATAL|PANIC)\b")
_WORDS = {"trace": "debug", "warn": "warning", "fatal": "error", "panic": "error"}
# Characters at a line's beginning that contain its level.
_HEAD = 80


@click.command
@click.option("--follow", "-f", is_flag=True, help="Keep printing new lines, over crashes and lost connections.")
@click.option("--grep", metavar="REGEX", help="Print only lines that match.")
@click.option(
    "--level", "least", type=click.Choice(LEVELS), help="Print only lines of the core, of this level or a worse one."
)
@click.option(
    "--source", type=click.Choice(("core", "node")), help="Print only lines of the core, or only of the node."
)
@options
def logs(session: Session, follow: bool, grep: str | None, least: str | None, source: str | None) -> None:
    """Print the newest log lines of the core and the node."""
    wanted = Wanted(_pattern(grep), least or "", source or "")
    raise click.exceptions.Exit(session.attend(partial(_print, wanted, session.json, follow)))


def level(line: str) -> str:
    """The level of a line, one of LEVELS; empty if it has none."""
    if source(line) == "node":
        return ""
    found = _LEVEL.search(line[:_HEAD])
    word = (found[1] or found[2]).lower() if found else ""
    return _WORDS.get(word, word)


def source(line: str) -> str:
    return "node" if line.startswith((NODE_MARK, CLIENT_MARK)) else "core"


@dataclass(frozen=True)
class Wanted:
    """A filter of log lines; all conditions must hold. With `least`, one of LEVELS, lines need a level."""

    pattern: re.Pattern[str] | None = None
    least: str = ""
    source: str = ""

    def fits(self, line: str) -> bool:
        return (
            (self.pattern is None or self.pattern.search(line) is not None)
            and (not self.source or source(line) == self.source)
            and (not self.least or level(line) in LEVELS[LEVELS.index(self.least) :])
        )


def _pattern(grep: str | None) -> re.Pattern[str] | None:
    try:
        return re.compile(grep) if grep else None
    except re.error as error:
        raise Unusable(f"--grep: {error}")


async def _print(wanted: Wanted, json: bool, follow: bool, fleet: Fleet) -> Exit:
    """Print lines and errors of all nodes as they arrive, to the end of the backlog or with `follow` without end."""

    def say(node: str, lines: Sequence[str]) -> None:
        for line in lines:
            if line.startswith(CLIENT_MARK):
                note(f"{node}: {line.removeprefix(CLIENT_MARK)}")
            elif not wanted.fits(line):
                continue
            elif json:
                print_json({"node": node, "source": source(line), "level": level(line), "line": line}, indent=None)
            else:
                sys.stdout.write(printable(f"{node}: {line}" if len(fleet.nodes) > 1 else line) + "\n")
        sys.stdout.flush()

    async def read(node: Node) -> Exit:
        try:
            async with node.client.logs() as stream:
                lines = await stream.next()
                while lines:
                    say(node.name, lines)
                    lines = await stream.next(None if follow else QUIET)
        except NodeError as error:
            print_error(node.name, error)
            return code_of(error)
        return Exit.OK

    return together(await parallel([partial(read, node) for node in fleet.nodes], len(fleet.nodes)))
