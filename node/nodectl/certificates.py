"""The certificate of the node of this machine: what it says, and how a new one is made."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization

from node import certificate
from node.nodectl.exits import Unusable
from node.nodectl.here import Here

_SSL = ("SSL_CERT_FILE", "SSL_KEY_FILE")


def file_of(here: Here) -> Path:
    """The one that the node serves. SSL_CERT_FILE counts where the node's own is missing: OpenSSL reads it, too."""
    own = here.state / certificate.CERTIFICATE
    named = here.values.get("SSL_CERT_FILE")
    return own if not named or (own.is_file() and not _in_settings(here)) else (here.directory / named).absolute()


def _in_settings(here: Here) -> bool:
    return here.service or here.values.get("SSL_CERT_FILE") != here.environ.get("SSL_CERT_FILE")


def described(file: Path) -> dict[str, Any]:
    """Subject, names, times, fingerprint, and the PEM that controllers pin. Raises `Unusable`."""
    try:
        first = x509.load_pem_x509_certificates(file.read_bytes())[0]
    except OSError as error:
        raise Unusable(f"{file} cannot be read: {error}; nodectl certificate make makes one")
    except ValueError as error:
        raise Unusable(f"{file} is no certificate: {error}")
    return {
        "file": str(file),
        "subject": first.subject.rfc4514_string(),
        "names": _names(first),
        "valid_from": first.not_valid_before_utc.isoformat(),
        "valid_until": first.not_valid_after_utc.isoformat(),
        "days_left": (first.not_valid_after_utc - datetime.now(UTC)).days,
        "sha256": first.fingerprint(hashes.SHA256()).hex(":").upper(),
        "pem": first.public_bytes(serialization.Encoding.PEM).decode(),
    }


def make(directory: Path, names: tuple[str, ...], force: bool) -> tuple[Path, tuple[str, ...]]:
    """A new pair in this directory: the certificate, and the names that found no room. Raises `Unusable`."""
    pair = directory / certificate.CERTIFICATE, directory / certificate.KEY
    there = [file for file in pair if file.exists()]
    if there and not force:
        said = " and ".join(map(str, there))
        raise Unusable(f"{said}: there already; --force replaces them, and controllers must be told")
    try:
        made = _replaced(directory, names, there) if there else certificate.ensure(directory, names)
    except (OSError, ValueError) as error:
        raise Unusable(f"no certificate was made: {error}")
    return made.certificate, made.left_out


def _replaced(directory: Path, names: tuple[str, ...], before: Sequence[Path]) -> certificate.Certificate:
    """The new pair; what was there before is there again if none can be made.

    It is moved, not copied: in a directory of others it may be a link, and what that leads to is not theirs to have.
    """
    with TemporaryDirectory(prefix=".replaced.", dir=directory) as aside:
        moved = {file: file.rename(Path(aside) / file.name) for file in before}
        try:
            return certificate.ensure(directory, names)
        except BaseException:
            for file, place in moved.items():
                place.replace(file)
            raise


def _names(found: x509.Certificate) -> list[str]:
    try:
        names = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return []
    return [str(name.value) for name in names]
