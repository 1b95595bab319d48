"""Checks of the certificate and of files with keys. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_private_key

from node.doctor.findings import Check, Finding, by, fail, ok, warn

SOON = timedelta(days=30)


@dataclass(frozen=True)
class Pair:
    """The two files; a text in their place says why they cannot be read."""

    certificate: bytes | str
    key: bytes | str
    # What controllers may call the node; `host` is what the operator set.
    host: str = ""
    own: Collection[str] = ()


def check(pair: Pair, now: datetime) -> Iterator[Finding]:
    """Of the certificate: can it be used, until when, and for which names?"""
    unread = [fault for fault in (pair.certificate, pair.key) if isinstance(fault, str)]
    if isinstance(pair.certificate, str) or isinstance(pair.key, str):
        yield fail(Check.CERTIFICATE, "; ".join(unread))
        return
    try:
        certificate = x509.load_pem_x509_certificate(pair.certificate)
        key = load_pem_private_key(pair.key, None)
    except (ValueError, TypeError) as error:
        yield fail(Check.CERTIFICATE, f"it cannot be used: {error}")
        return
    spki = Encoding.DER, PublicFormat.SubjectPublicKeyInfo
    alike = certificate.public_key().public_bytes(*spki) == key.public_key().public_bytes(*spki)
    yield (ok if alike else fail)(Check.CERTIFICATE, "they belong together" if alike else "the key is of another one")
    yield _expiry(certificate, now)
    yield _names(certificate, pair)


def _expiry(certificate: x509.Certificate, now: datetime) -> Finding:
    begin, end = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if now < begin:
        return fail(Check.EXPIRY, f"it is not valid before {begin:%Y-%m-%d %H:%M}: is this machine's clock right?")
    found = f"it ended on {end:%Y-%m-%d}" if now >= end else f"valid until {end:%Y-%m-%d}"
    return by(Check.EXPIRY, found, failing=now >= end, warning=end - now < SOON)


def _names(certificate: x509.Certificate, pair: Pair) -> Finding:
    try:
        sans = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return fail(Check.NAMES, "it has no names: clients refuse it")
    names = [str(name.value) for name in sans]
    wanted = {pair.host} if pair.host else set(pair.own)
    # A public name that leads here is not known here.
    fits = not wanted or bool(wanted & set(names)) or any("*" in name or _public(name) for name in names)
    found = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    return (ok if fits else warn)(Check.NAMES, f"it is for {found}")


def _public(name: str) -> bool:
    """A host name with a dot, which only the DNS knows."""
    return "." in name and not name.replace(".", "").isdigit() and ":" not in name


def key_files(exposed: Sequence[Path]) -> Finding:
    """Files with keys that everybody on the machine may read or write."""
    if not exposed:
        return ok(Check.KEY_FILES, "theirs alone")
    return fail(Check.KEY_FILES, f"everybody may read or write {', '.join(map(str, exposed))}")
