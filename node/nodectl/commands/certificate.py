"""`nodectl certificate`: the certificate of the node on this machine."""

from __future__ import annotations

from pathlib import Path

import click

from node.nodectl import certificates
from node.nodectl.options import json_option
from node.nodectl.output import note, print_json, print_table
from node.nodectl.session import Session

# Characters of a PEM that deployed panels store, and days before its end from which to replace it.
PANEL, SOON = 2048, 30


@click.group
def command() -> None:
    """Show or make the certificate of the node on this machine, which controllers pin."""


@command.command
@click.option(
    "--file",
    "source",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Show the certificate in this file instead.",
)
@json_option
@click.pass_obj
def show(session: Session, source: Path | None) -> None:
    """Show the certificate's names, dates and fingerprint, and the PEM for controllers."""
    found = certificates.described(source or certificates.file_of(session.local_node))
    if session.json:
        print_json(found)
    else:
        fields = {name: ", ".join(value) if isinstance(value, list) else value for name, value in found.items()}
        pem = fields.pop("pem")
        print_table(("field", "value"), fields.items())
        click.echo(f"\n{pem}", nl=False)
    if found["days_left"] < SOON:
        note(f"the certificate expires on {found['valid_until']}: make a new one by nodectl certificate make --force")
    if len(found["pem"]) > PANEL:
        note(f"this PEM has {len(found['pem'])} characters; some panels store only {PANEL}")


@command.command
@click.option("--san", "names", multiple=True, metavar="NAME", help="Add this host name or address; may be repeated.")
@click.option(
    "--dir",
    "directory",
    type=click.Path(path_type=Path),
    help="Write both files into this directory. [default: the node's STATE_DIR]",
)
@click.option("--force", is_flag=True, help="Replace an existing pair. Controllers then need the new certificate.")
@click.pass_obj
def make(session: Session, names: tuple[str, ...], directory: Path | None, force: bool) -> None:
    """Make a key and a self-signed certificate with the names of this machine."""
    local = session.local_node
    sans = tuple(filter(None, map(str.strip, local.values.get("SSL_SANS", "").split(","))))
    made, left_out = certificates.make(directory or local.state, (*names, *sans), force)
    found = certificates.described(made)
    click.echo(f"{made}: {', '.join(found['names'])}\n{found['pem']}", nl=False)
    if left_out:
        note(f"names left out (invalid, or no room in the certificate): {', '.join(left_out)}")
    note("a running node loads it within ten seconds; give controllers the new PEM")
