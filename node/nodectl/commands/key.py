"""`nodectl key`: API keys of the node on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from node.nodectl import keyring
from node.nodectl.options import json_option
from node.nodectl.output import note, print_json, print_table
from node.nodectl.session import Session

_FILE = click.option(
    "--keys",
    "source",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="The file of keys. [default: the one of the node on this machine]",
)
_RELOADED = "a running node reads this within ten seconds"


@click.group
def command() -> None:
    """Manage the API keys of the node on this machine. Each has a name and a scope; the file stores only digests."""


@command.command
@click.argument("name")
@click.option(
    "--scope", type=click.Choice(keyring.SCOPES), default="all", show_default=True, help="What the key allows."
)
@_FILE
@json_option
@click.pass_obj
def new(session: Session, name: str, scope: str, source: Path | None) -> None:
    """Make a key and print it. It is not shown again."""
    key = keyring.new(source or session.local_node.keys, name, scope)
    if session.json:
        print_json({"name": name, "scope": scope, "key": key})
    else:
        click.echo(key)
    note(_RELOADED)


@command.command("list")
@_FILE
@json_option
@click.pass_obj
def list_keys(session: Session, source: Path | None) -> None:
    """List the names and scopes of the keys in the file. A key in the setting API_KEY is not listed."""
    found: list[dict[str, Any]] = keyring.known(source or session.local_node.keys)
    if session.json:
        print_json(found)
    else:
        print_table(("name", "scope"), [(key["name"], key["scope"]) for key in found])


@command.command
@click.argument("name")
@_FILE
@click.pass_obj
def revoke(session: Session, name: str, source: Path | None) -> None:
    """Remove a key. The node refuses it from then on, and closes streams that were opened with it."""
    keyring.revoke(source or session.local_node.keys, name)
    note(_RELOADED)
