"""`nodectl certificate` and `key`: the certificate and the API keys of the node on this machine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization

from node.certificate import CERTIFICATE, KEY, MAX_PEM, Certificate, ensure, names_of
from node.keys import manage
from node.keys.keyfile import SCOPES, BadKeys, door_name
from node.nodectl.local_node import LocalNode
from node.nodectl.output import Unusable, note, print_json, print_table
from node.nodectl.session import Session, json_option

# Days before its end from which to replace a certificate.
SOON = 30
_FILE = click.option(
    "--keys",
    "source",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="The file of keys. [default: the one of the node on this machine]",
)
_RELOADED = "a running node reads this within ten seconds"


@click.group
def certificate() -> None:
    """Show or make the certificate of the node on this machine, which controllers pin."""


@certificate.command
@click.option(
    "--file",
    "source",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Show the certificate in this file instead.",
)
@json_option
def show(session: Session, source: Path | None) -> None:
    """Show the certificate's names, dates and fingerprint, and the PEM for controllers."""
    found = _described(source or file_of(session.local_node))
    if session.json:
        print_json(found)
    else:
        fields = {name: ", ".join(value) if isinstance(value, list) else value for name, value in found.items()}
        pem = fields.pop("pem")
        print_table(("field", "value"), fields.items())
        click.echo(f"\n{pem}", nl=False)
    if found["days_left"] < SOON:
        note(f"the certificate expires on {found['valid_until']}: make a new one by nodectl certificate make --force")
    if len(found["pem"]) > MAX_PEM:
        note(f"this PEM has {len(found['pem'])} characters; some panels store only {MAX_PEM}")


@certificate.command
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
    made = _made(directory or local.state, (*_secret_names(local), *names, *sans), force)
    found = _described(made.certificate)
    click.echo(f"{made.certificate}: {', '.join(found['names'])}\n{found['pem']}", nl=False)
    if made.left_out:
        note(f"names left out (invalid, or no room in the certificate): {', '.join(made.left_out)}")
    note("a running node loads it within ten seconds; give controllers the new PEM")


def _secret_names(local: LocalNode) -> Iterator[str]:
    """The name by which clients must ask for the node, if it turns strangers away. Raises `Unusable`."""
    values = local.values
    if values.get("STRANGERS", "answer").strip().lower() == "answer":
        return
    name = values.get("DOOR_NAME", "").strip() or "auto"
    if name.lower() != "auto":
        yield name
        return
    file = (local.directory / values["API_KEY_FILE"]) if values.get("API_KEY_FILE") else local.state / "api_key"
    try:
        yield door_name(values.get("API_KEY", "").strip() or file.read_text().strip())
    except (OSError, UnicodeDecodeError) as error:
        raise Unusable(f"DOOR_NAME=auto needs the API key: {file} cannot be read: {error}")


def file_of(local: LocalNode) -> Path:
    """The file of the certificate that the node serves."""
    named = local.values.get("SSL_CERT_FILE")
    return (local.directory / named).absolute() if named else local.state / CERTIFICATE


def _described(file: Path) -> dict[str, Any]:
    """Subject, names, dates, fingerprint, and the PEM that controllers pin. Raises `Unusable`."""
    try:
        first = x509.load_pem_x509_certificates(file.read_bytes())[0]
    except OSError as error:
        raise Unusable(f"{file} cannot be read: {error}; to make one: nodectl certificate make")
    except ValueError as error:
        raise Unusable(f"{file} is not a certificate: {error}")
    return {
        "file": str(file),
        "subject": first.subject.rfc4514_string(),
        "names": list(names_of(first)),
        "valid_from": first.not_valid_before_utc.isoformat(),
        "valid_until": first.not_valid_after_utc.isoformat(),
        "days_left": (first.not_valid_after_utc - datetime.now(UTC)).days,
        "sha256": first.fingerprint(hashes.SHA256()).hex(":").upper(),
        "pem": first.public_bytes(serialization.Encoding.PEM).decode(),
    }


def _made(directory: Path, names: tuple[str, ...], force: bool) -> Certificate:
    """Make a certificate and its key in this directory. Raises `Unusable`."""
    before = [file for file in (directory / CERTIFICATE, directory / KEY) if file.exists()]
    if before and not force:
        files = " and ".join(map(str, before))
        raise Unusable(f"already there: {files}. --force replaces them; controllers then need the new certificate")
    try:
        return _replaced(directory, names, before) if before else ensure(directory, names)
    except (OSError, ValueError) as error:
        raise Unusable(f"cannot make a certificate: {error}")


def _replaced(directory: Path, names: tuple[str, ...], before: Sequence[Path]) -> Certificate:
    """Make a new pair, and restore the old files if that fails.

    The old files are moved, not copied: in another user's directory one may be a link to a file that this user must
    not get a copy of.
    """
    with TemporaryDirectory(prefix=".replaced.", dir=directory) as aside:
        moved = {file: file.rename(Path(aside) / file.name) for file in before}
        try:
            return ensure(directory, names)
        except BaseException:
            for file, place in moved.items():
                place.replace(file)
            raise


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
