"""Checks of the certificate and of files with keys. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_private_key

from node.certificate import names_of, names_the_product
from node.doctor.findings import Check, Finding, by, fail

SOON = timedelta(days=30)


@dataclass(frozen=True)
class Pair:
    """The contents of the two files, or texts that say why they cannot be read."""

    certificate: bytes | str
    key: bytes | str
    # NODE_HOST, and the machine's own names and addresses, by which controllers may call the node.
    host: str = ""
    own: Collection[str] = ()


def check(pair: Pair, now: datetime) -> Iterator[Finding]:
    """Check that the certificate can be used, until when, for which names, and what it tells strangers."""
    if isinstance(pair.certificate, str) or isinstance(pair.key, str):
        unread = [fault for fault in (pair.certificate, pair.key) if isinstance(fault, str)]
        yield fail(Check.CERTIFICATE, "; ".join(unread))
        return
    try:
        certificate = x509.load_pem_x509_certificate(pair.certificate)
        key = load_pem_private_key(pair.key, None)
    except (ValueError, TypeError) as error:
        yield fail(Check.CERTIFICATE, f"the certificate or its key cannot be used: {error}")
        return
    spki = Encoding.DER, PublicFormat.SubjectPublicKeyInfo
    alike = certificate.public_key().public_bytes(*spki) == key.public_key().public_bytes(*spki)
    found = "certificate and key match" if alike else "the key belongs to another certificate"
    yield by(Check.CERTIFICATE, found, failing=not alike)
    yield _expiry(certificate, now)
    yield _names(certificate, pair)
    named = names_the_product(certificate)
    found = "its subject names this program to strangers" if named else "its subject does not name the program"
    yield by(Check.SUBJECT, found, warning=named)


def _expiry(certificate: x509.Certificate, now: datetime) -> Finding:
    begin, end = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if now < begin:
        return fail(Check.EXPIRY, f"not valid before {begin:%Y-%m-%d %H:%M}: is this machine's clock right?")
    found = f"expired on {end:%Y-%m-%d}" if now >= end else f"valid until {end:%Y-%m-%d}"
    return by(Check.EXPIRY, found, failing=now >= end, warning=end - now < SOON)


def _names(certificate: x509.Certificate, pair: Pair) -> Finding:
    names = names_of(certificate)
    if not names:
        return fail(Check.NAMES, "the certificate has no names: clients refuse it")
    wanted = {pair.host} if pair.host else set(pair.own)
    # Whether a public name leads to this machine cannot be checked here.
    fits = not wanted or bool(wanted & set(names)) or any("*" in name or _public(name) for name in names)
    found = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    return by(Check.NAMES, f"valid for {found}", warning=not fits)


def _public(name: str) -> bool:
    """Whether this is a host name with a dot, as in the DNS."""
    return "." in name and not name.replace(".", "").isdigit() and ":" not in name


def key_files(exposed: Sequence[Path]) -> Finding:
    """Check that no file with keys may be read or written by all users of the machine."""
    faulty = f"all users of the machine may read or write {', '.join(map(str, exposed))}"
    return by(Check.KEY_FILES, faulty if exposed else "only their owner may read them", failing=bool(exposed))
