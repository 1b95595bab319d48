"""Print answers and errors: tables on terminals, plain columns in pipes, JSON for scripts; and the exit codes.

Errors go to standard error. Control characters are escaped: texts of nodes may come from others. Numbers get units that
people read.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Sequence
from enum import IntEnum
from typing import Any

import click
from google.protobuf.message import Message
from rich.console import Console
from rich.table import Table
from rich.text import Text

from node.base import errors
from node.base.errors import NodeError
from node.base.logs import printable
from node.client import NoReply, UnexpectedReply

Row = Sequence[object]
_NOT_ASCII = re.compile("[^\n -~]")
_STEP = 1024
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


class Exit(IntEnum):
    """Exit codes of nodectl. With several nodes: the code of all, or FAILED if they differ."""

    OK = 0
    # The node refused the call or failed; or several nodes had different results.
    FAILED = 1
    # The command line, the nodes file or another file cannot be used. No node was called.
    USAGE = 2
    # No reply: no connection, an untrusted certificate, or a timeout.
    UNREACHABLE = 3
    # The node does not know the key, or its scope is too small.
    KEY_REFUSED = 4
    # No backend was started on the node, or its core is down.
    NOT_RUNNING = 5
    # Done, except for some users.
    USERS_REFUSED = 6
    # `users diff`: the users of the node and of the file differ.
    DIFFERENT = 7
    INTERRUPTED = 130


# Errors of calls, with their exit codes and what to do about them; empty where the error's own text says that.
_ERRORS: tuple[tuple[type[NodeError], Exit, str], ...] = (
    (UnexpectedReply, Exit.UNREACHABLE, "check port and transport in the nodes file"),
    (
        NoReply,
        Exit.UNREACHABLE,
        "check that the node runs, that its port is reachable, and that the certificate is this node's",
    ),
    (
        errors.Unauthenticated,
        Exit.KEY_REFUSED,
        "give the node's key as key_file in the nodes file, or in NODECTL_KEY",
    ),
    (errors.Forbidden, Exit.KEY_REFUSED, "use a key with a wider scope"),
    (errors.NotInitialized, Exit.NOT_RUNNING, "start the core first: nodectl start CONFIG"),
    (errors.NotStarted, Exit.NOT_RUNNING, "the node is starting the core: try again in a few seconds"),
    (errors.CoreFailed, Exit.NOT_RUNNING, "for the core's last lines: nodectl logs"),
    (errors.UsersRefused, Exit.USERS_REFUSED, ""),
    (NodeError, Exit.FAILED, ""),
)


class Unusable(click.ClickException):
    """An argument or a file cannot be used; no node was called."""

    exit_code = Exit.USAGE

    def format_message(self) -> str:
        """Escape control characters: files may come from others."""
        return "\n".join(map(printable, self.message.split("\n")))


def code_of(error: NodeError) -> Exit:
    return next(code for kind, code, _ in _ERRORS if isinstance(error, kind))


def advice_for(error: NodeError) -> str:
    """What to do about an error; empty where its own text says that."""
    return next(advice for kind, _, advice in _ERRORS if isinstance(error, kind))


def together(codes: Iterable[Exit]) -> Exit:
    """The exit code of several nodes."""
    found = set(codes)
    return found.pop() if len(found) == 1 else Exit.FAILED if found else Exit.OK


def as_json(value: Any) -> Any:
    """Convert for JSON: a message becomes all its fields, by their names in the proto; integers stay integers."""
    if isinstance(value, Message):
        return {field.name: _field(value, field) for field in value.DESCRIPTOR.fields}
    if isinstance(value, dict):
        return {str(name): as_json(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [as_json(item) for item in value]
    return value


def _field(message: Message, field: Any) -> Any:
    value = getattr(message, field.name)
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        return as_json(dict(value))
    if field.is_repeated:
        return as_json(list(value))
    if field.has_presence and not message.HasField(field.name):
        return None
    if field.message_type is not None:
        return as_json(value)
    return field.enum_type.values_by_number[value].name if field.enum_type is not None else value


def print_json(document: Any, indent: int | None = 2) -> None:
    text = json.dumps(as_json(document), indent=indent, ensure_ascii=False)
    click.echo(_NOT_ASCII.sub(_seen, text))


def _seen(match: re.Match[str]) -> str:
    """Escape a character that is not printable: a terminal may obey it."""
    return match[0] if match[0].isprintable() else json.dumps(match[0])[1:-1]


def print_table(columns: Sequence[str], rows: Iterable[Row]) -> None:
    """Print a table on a terminal; else columns, at least two spaces apart, with nothing truncated."""
    cells = [[printable(str(cell)) for cell in row] for row in rows]
    console = Console()
    if console.is_terminal:
        console.print(table(columns, cells))
    else:
        click.echo("\n".join(plain(columns, cells)))


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """A table for a terminal; columns that have only numbers are aligned to the right."""
    made = Table(box=None, pad_edge=False, header_style="bold")
    for at, name in enumerate(columns):
        numbers = bool(rows) and all(row[at][:1].isdigit() for row in rows)
        made.add_column(Text(name), justify="right" if numbers else "left", overflow="fold")
    for row in rows:
        made.add_row(*map(Text, row))
    return made


def plain(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [list(columns), *map(list, rows)]
    widths = [max(len(line[at]) for line in lines) for at in range(len(columns))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]


def amount(count: float) -> str:
    """A number of bytes: with a unit on a terminal, plain in a pipe."""
    return size(count) if sys.stdout.isatty() else str(count)


def print_error(node: str, error: NodeError) -> None:
    advice = advice_for(error)
    click.echo(printable(f"{node}: {error.text}{f' ({advice})' if advice else ''}"), err=True)


def note(text: str) -> None:
    """Print a remark for people on standard error."""
    click.echo(printable(text), err=True)


def size(count: float) -> str:
    """Bytes, in the largest unit that fits, with up to four digits."""
    for unit in _UNITS[:-1]:
        if abs(count) < _STEP:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= _STEP
    return f"{count:.1f} {_UNITS[-1]}"


def rate(count: float) -> str:
    """Bytes a second."""
    return f"{size(count)}/s"


def rate_of_bits(count: int) -> str:
    """Bits per second in decimal units; empty for 0, no limit."""
    for unit, letter in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
        if count >= unit:
            return f"{count / unit:g}{letter}"
    return str(count or "")


def span(seconds: int) -> str:
    """A duration in its two largest units."""
    units = ((86_400, "d"), (3_600, "h"), (60, "min"), (1, "s"))
    for at, (length, unit) in enumerate(units):
        if seconds >= length:
            rest = [(seconds % length) // units[at + 1][0], units[at + 1][1]] if at + 1 < len(units) else []
            more = f" {rest[0]} {rest[1]}" if rest and rest[0] else ""
            return f"{seconds // length} {unit}{more}"
    return "0 s"
