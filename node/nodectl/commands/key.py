"""`nodectl key`: API keys of the node on this machine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click

from node.keys import manage
from node.keys.keyfile import SCOPES, BadKeys
from node.nodectl.output import Unusable, note, print_json, print_table
from node.nodectl.session import Session, json_option

_FILE = click.option(
    "--keys",
    "source",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="The file of keys. [default: the one of the node on this machine]",
)
_RELOADED = "a running node reads this within ten seconds"


@click.group
def key() -> None:
    """Manage the API keys of the node on this machine. Each has a name and a scope; the file stores only digests."""


@key.command
@click.argument("name")
@click.option("--scope", type=click.Choice([*SCOPES]), default="all", show_default=True, help="What the key allows.")
@_FILE
@json_option
def new(session: Session, name: str, scope: str, source: Path | None) -> None:
    """Make a key and print it. It is not shown again."""
    with _keys(session, source) as file:
        key = manage.new(file, name, scope)
    if session.json:
        print_json({"name": name, "scope": scope, "key": key})
    else:
        click.echo(key)
    note(_RELOADED)


@key.command("list")
@_FILE
@json_option
def list_keys(session: Session, source: Path | None) -> None:
    """List the names and scopes of the keys in the file. A key in the setting API_KEY is not listed."""
    with _keys(session, source) as file:
        found = [{"name": key.name, "scope": key.scope.word} for key in manage.keys(file)]
    if session.json:
        print_json(found)
    else:
        print_table(("name", "scope"), [(key["name"], key["scope"]) for key in found])


@key.command
@click.argument("name")
@_FILE
@click.pass_obj
def revoke(session: Session, name: str, source: Path | None) -> None:
    """Remove a key. The node refuses it from then on, and closes streams that were opened with it."""
    with _keys(session, source) as file:
        manage.revoke(file, name)
    note(_RELOADED)


@contextmanager
def _keys(session: Session, source: Path | None) -> Iterator[Path]:
    """The file of keys. Raises `Unusable` if it cannot be used, or as it was to be."""
    file = source or session.local_node.keys
    try:
        yield file
    except BadKeys as error:
        text = str(error)
        raise Unusable(text if str(file) in text else f"{file}: {text}")
    except OSError as error:
        raise Unusable(f"{file} cannot be used: {error}; run this as the node's user or as root")
