"""Describe and make the certificate of the node on this machine."""

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
from node.nodectl.local_node import LocalNode


def file_of(local: LocalNode) -> Path:
    """The file of the certificate that the node serves."""
    named = local.values.get("SSL_CERT_FILE")
    return (local.directory / named).absolute() if named else local.state / certificate.CERTIFICATE


def described(file: Path) -> dict[str, Any]:
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
        "names": _names(first),
        "valid_from": first.not_valid_before_utc.isoformat(),
        "valid_until": first.not_valid_after_utc.isoformat(),
        "days_left": (first.not_valid_after_utc - datetime.now(UTC)).days,
        "sha256": first.fingerprint(hashes.SHA256()).hex(":").upper(),
        "pem": first.public_bytes(serialization.Encoding.PEM).decode(),
    }


def make(directory: Path, names: tuple[str, ...], force: bool) -> tuple[Path, tuple[str, ...]]:
    """Make a certificate and its key in this directory. Returns it and the names left out. Raises `Unusable`."""
    pair = directory / certificate.CERTIFICATE, directory / certificate.KEY
    there = [file for file in pair if file.exists()]
    if there and not force:
        files = " and ".join(map(str, there))
        raise Unusable(f"already there: {files}. --force replaces them; controllers then need the new certificate")
    try:
        made = _replaced(directory, names, there) if there else certificate.ensure(directory, names)
    except (OSError, ValueError) as error:
        raise Unusable(f"cannot make a certificate: {error}")
    return made.certificate, made.left_out


def _replaced(directory: Path, names: tuple[str, ...], before: Sequence[Path]) -> certificate.Certificate:
    """Make a new pair, and restore the old files if that fails.

    The old files are moved, not copied: in another user's directory one may be a link to a file that this user must
    not get a copy of.
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
