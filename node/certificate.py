"""Make the node's own certificate and API key: `python -m node.certificate DIR [--san NAME ...]`.

For operators who have none. The certificate is self-signed and its own authority, so that a controller can pin the one
PEM as its only root and keep host-name checking on.
"""

from __future__ import annotations

import argparse
import re
import socket
import sys
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

import psutil
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from node.base.secret_file import write_secret
from node.settings import BadSettings, given

CERTIFICATE = "certificate.pem"
KEY = "key.pem"

# Deployed panels keep the PEM in a column of this many characters (measured on panel 5.2.1, November 2026).
MAX_PEM = 2048

_DESCRIPTION = "Make the node's self-signed certificate and key, unless DIR has both, and print their names."
_BACKDATED = timedelta(days=1)  # clocks of controllers differ
_VALID = timedelta(days=3652)
# Began the common name of certificates that earlier versions made.
_PRODUCT = "CN=txnode "
_LABEL = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?")


class BadName(ValueError):
    """Neither a host name nor an IP address."""


@dataclass(frozen=True)
class Certificate:
    """The two files, whether they were made just now, the names inside, and the wanted names that are missing."""

    certificate: Path
    key: Path
    made: bool
    names: tuple[str, ...]
    left_out: tuple[str, ...]


def own_names() -> Iterator[str]:
    """Names and addresses of this machine, the most useful first. May query the DNS."""
    yield socket.gethostname()
    yield socket.getfqdn()
    yield from ("localhost", "127.0.0.1", "::1")
    for addresses in psutil.net_if_addrs().values():
        for address in addresses:
            # A link-local IPv6 address needs its scope, which a certificate cannot hold.
            if address.family in (socket.AF_INET, socket.AF_INET6) and "%" not in address.address:
                yield address.address


def ensure(
    directory: Path, extra_sans: Sequence[str] = (), own: Callable[[], Iterable[str]] = own_names
) -> Certificate:
    """Return the certificate and key in `directory`; make them (EC P-256, ten years) unless both exist.

    `extra_sans` are names or addresses that come first; `own` returns those of the machine, and is called only when a
    certificate is made. `left_out` has the names that a PEM of 2,048 characters has no room for, and the extra names
    that an existing certificate lacks.
    Raises BadName for an invalid extra name, ValueError for a file that is not a certificate, OSError.
    """
    certificate, key = directory / CERTIFICATE, directory / KEY
    wanted = [str(_general_name(name).value) for name in extra_sans]
    if certificate.exists() and key.exists():
        names = _names_in(certificate)
        return Certificate(certificate, key, False, names, tuple(name for name in wanted if name not in names))
    made, private, left_out = make([*wanted, *own()])
    _directory(directory)
    certificate.unlink(missing_ok=True)  # an interruption must not leave a new key beside an old certificate
    write_secret(key, _key_pem(private))
    write_secret(certificate, _pem(made))
    return Certificate(certificate, key, True, _names_in(certificate), left_out)


def make(names: Iterable[str]) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey, tuple[str, ...]]:
    """Make a certificate with as many of `names`, in order, as fit. Returns it, its key, and the names left out."""
    key = ec.generate_private_key(ec.SECP256R1())
    builder = _builder(key.public_key())
    certificate, used, left_out = None, list[x509.GeneralName](), list[str]()
    for name in dict.fromkeys(names):
        try:
            candidate = _general_name(name)
        except BadName:  # a machine's host name can be any text
            left_out.append(name)
            continue
        if candidate in used:
            continue
        attempt = _sign(builder, [*used, candidate], key)
        if len(_pem(attempt)) > MAX_PEM:
            left_out.append(name)
            continue
        certificate, used = attempt, [*used, candidate]
    if certificate is None:
        raise BadName("a certificate needs at least one host name or IP address")
    return certificate, key, tuple(left_out)


def ensure_api_key(path: Path) -> str:
    """Return the API key in `path`; without that file, write a random UUID there (mode 0600).

    Raises ValueError for an empty file, OSError.
    """
    try:
        key = path.read_text().strip()
    except FileNotFoundError:
        key = str(uuid.uuid4())
        _directory(path.parent)
        write_secret(path, f"{key}\n".encode())
    if not key:
        raise ValueError(f"{path} is empty: write an API key into it, or remove the file to have one made")
    return key


def _general_name(text: str) -> x509.DNSName | x509.IPAddress:
    """Parse a subject alternative name. Raises BadName."""
    try:
        return x509.IPAddress(ip_address(text))
    except ValueError:
        pass
    try:
        ascii_name = text.encode("idna").decode().lower()
    except UnicodeError:
        ascii_name = ""
    labels = ascii_name.removeprefix("*.").split(".")
    if len(ascii_name) > 253 or not all(_LABEL.fullmatch(label) for label in labels):
        raise BadName(f"{text!r} is neither a host name nor an IP address (no port, no scheme, no brackets)")
    return x509.DNSName(ascii_name)


def _names_in(certificate: Path) -> tuple[str, ...]:
    """Return the names in a file. Raises `ValueError` if it has no name."""
    try:
        if names := names_of(x509.load_pem_x509_certificate(certificate.read_bytes())):
            return names
        fault = "it has none"
    except (ValueError, x509.InvalidVersion) as error:
        fault = str(error)
    raise ValueError(
        f"{certificate} is not a certificate with subject alternative names ({fault}): remove it to have one made"
    )


def names_of(certificate: x509.Certificate) -> tuple[str, ...]:
    """Return the host names and addresses for which a certificate is valid."""
    try:
        found = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return ()
    return tuple(str(name.value) for name in found if isinstance(name, x509.DNSName | x509.IPAddress))


def names_the_product(certificate: x509.Certificate) -> bool:
    """Return whether an earlier version made it: its subject tells strangers which program the node is."""
    return certificate.subject.rfc4514_string().startswith(_PRODUCT)


def _builder(public: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
    # Each certificate gets a unique name: clients look issuers up by name, and may hold the certificates of many nodes.
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, uuid.uuid4().hex[:12])])
    begin = datetime.now(UTC) - _BACKDATED
    usage = x509.KeyUsage(
        digital_signature=True,
        key_cert_sign=True,  # required of a root
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        crl_sign=False,
        encipher_only=False,
        decipher_only=False,
    )
    return (
        x509.CertificateBuilder(subject_name=name, issuer_name=name, public_key=public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(begin)
        .not_valid_after(begin + _BACKDATED + _VALID)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
    )


def _sign(
    builder: x509.CertificateBuilder, names: list[x509.GeneralName], key: ec.EllipticCurvePrivateKey
) -> x509.Certificate:
    return builder.add_extension(x509.SubjectAlternativeName(names), critical=False).sign(key, hashes.SHA256())


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _directory(path: Path) -> None:
    path.mkdir(mode=0o700, parents=True, exist_ok=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command: make what is missing, and print the files and names."""
    parser = argparse.ArgumentParser(prog="python -m node.certificate", description=_DESCRIPTION)
    parser.add_argument("directory", type=Path, metavar="DIR", help="where certificate.pem and key.pem are, or will be")
    parser.add_argument("--san", action="append", default=[], help="a further host name or address; may be repeated")
    options = parser.parse_args(arguments)
    try:
        configured = given({}, Path.cwd()).get("SSL_SANS", "")
        names = [name.strip() for name in configured.split(",") if name.strip()]
        result = ensure(options.directory, [*options.san, *names])
    except (OSError, ValueError, BadSettings) as error:
        parser.exit(1, f"{parser.prog}: {error}\n")
    say = sys.stdout.write
    say(f"{'made' if result.made else 'exists'}: {result.certificate} and {result.key}\n")
    say(f"names: {', '.join(result.names)}\n")
    if result.left_out:
        full, old = f"no room in a PEM of {MAX_PEM} characters", "remove both files to have them made with these names"
        hint = full if result.made else old
        say(f"left out ({hint}): {', '.join(result.left_out)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
