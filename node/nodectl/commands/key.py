"""`nodectl key`: the keys of the node of this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from node.nodectl import keyring
from node.nodectl.options import json_option
from node.nodectl.output import note, say_json, say_table
from node.nodectl.session import Session

_FILE = click.option(
    "--keys",
    "source",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="The file of keys. [default: that of the node here]",
)
_TAKEN_UP = "a node that runs takes this up within ten seconds"


@click.group
def command() -> None:
    """Keys of the node here, each with a name and a scope; the file has their digests alone."""


@command.command
@click.argument("name")
@click.option("--scope", type=click.Choice(keyring.SCOPES), default="all", show_default=True, help="What it may do.")
@_FILE
@json_option
@click.pass_obj
def new(session: Session, name: str, scope: str, source: Path | None) -> None:
    """Make a key. It is printed this once."""
    key = keyring.new(source or session.here.keys, name, scope)
    if session.json:
        say_json({"name": name, "scope": scope, "key": key})
    else:
        click.echo(key)
    note(_TAKEN_UP)


@command.command("list")
@_FILE
@json_option
@click.pass_obj
def list_keys(session: Session, source: Path | None) -> None:
    """The names and scopes of the keys in the file; API_KEY, if it is set, is another one."""
    found: list[dict[str, Any]] = keyring.known(source or session.here.keys)
    if session.json:
        say_json(found)
    else:
        say_table(("name", "scope"), [(key["name"], key["scope"]) for key in found])


@command.command
@click.argument("name")
@_FILE
@click.pass_obj
def revoke(session: Session, name: str, source: Path | None) -> None:
    """Remove a key. Whoever has it is refused from then on, and their open streams end."""
    keyring.revoke(source or session.here.keys, name)
    note(_TAKEN_UP)
