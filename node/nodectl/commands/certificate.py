"""`nodectl certificate`: that of the node of this machine."""

from __future__ import annotations

from pathlib import Path

import click

from node.nodectl import certificates
from node.nodectl.options import json_option
from node.nodectl.output import note, say_json, say_table
from node.nodectl.session import Session

# Characters that deployed panels keep of a PEM, and days before its end in which it is to be replaced.
PANEL, SOON = 2048, 30


@click.group
def command() -> None:
    """The certificate of the node here, which controllers pin."""


@command.command
@click.option("--file", "source", type=click.Path(path_type=Path), metavar="FILE", help="Another certificate.")
@json_option
@click.pass_obj
def show(session: Session, source: Path | None) -> None:
    """What it says, its fingerprint, and the PEM for controllers."""
    found = certificates.described(source or certificates.file_of(session.here))
    if session.json:
        say_json(found)
    else:
        words = {name: ", ".join(value) if isinstance(value, list) else value for name, value in found.items()}
        pem = words.pop("pem")
        say_table(("what", "value"), words.items())
        click.echo(f"\n{pem}", nl=False)
    if found["days_left"] < SOON:
        note(f"it ends on {found['valid_until']}: nodectl certificate make --force makes a new one")
    if len(found["pem"]) > PANEL:
        note(f"deployed panels keep no more than {PANEL} characters of a PEM: this one has {len(found['pem'])}")


@command.command
@click.option("--san", "names", multiple=True, metavar="NAME", help="A host name or address more; may be repeated.")
@click.option(
    "--dir", "directory", type=click.Path(path_type=Path), help="Where. [default: STATE_DIR of the node here]"
)
@click.option("--force", is_flag=True, help="Replace what is there. Controllers must be told the new one.")
@click.pass_obj
def make(session: Session, names: tuple[str, ...], directory: Path | None, force: bool) -> None:
    """A new self-signed certificate with the names of this machine, and its key."""
    here = session.here
    sans = tuple(filter(None, map(str.strip, here.values.get("SSL_SANS", "").split(","))))
    made, left_out = certificates.make(directory or here.state, (*names, *sans), force)
    found = certificates.described(made)
    click.echo(f"{made}: {', '.join(found['names'])}\n{found['pem']}", nl=False)
    if left_out:
        note(f"no room: {', '.join(left_out)}")
    note("a node that runs takes it up within ten seconds; tell controllers the new PEM")
