"""The node of this machine: its settings say where it listens, and which files have its certificate and its key."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from cryptography import x509

from node.nodectl.exits import Unusable
from node.nodectl.here import here
from node.nodectl.profiles import LOCAL, Profile
from node.settings import BadSettings, Settings, load

_ANY = ("", "0.0.0.0", "::")  # noqa: S104 - what a node may be told to listen on
_REMEDY = "go to the node's directory, be its user or root, or name a node: --node NAME"


def local(directory: Path, environ: Mapping[str, str]) -> Profile:
    """The node whose settings are in this directory, else the service of this machine. Raises `Unusable`."""
    try:
        settings = _settings(directory, environ)
        return _profile(settings)
    except BadSettings as bad:
        raise Unusable(f"there is no node that can be asked here: {'; '.join(bad.faults)}. {_REMEDY}")
    except (OSError, ValueError) as error:
        raise Unusable(f"the node of this machine cannot be asked: {error}. {_REMEDY}")


def _settings(directory: Path, environ: Mapping[str, str]) -> Settings:
    """As the node reads them; in a clone the certificate is the one in its STATE_DIR, as `scripts/run` has it."""
    place = here(directory, environ)
    if not place.service and (directory / environ.get("STATE_DIR", "var") / "certificate.pem").is_file():
        # To OpenSSL this is something else: where the authorities are.
        environ = {name: value for name, value in environ.items() if name not in ("SSL_CERT_FILE", "SSL_KEY_FILE")}
    return load({}, place.directory, place.environ if place.service else environ, drivers=())


def _profile(settings: Settings) -> Profile:
    transport: Literal["rest", "grpc"] = "rest" if settings.rest_port else "grpc"
    return Profile(
        LOCAL,
        address="localhost" if settings.host in _ANY else settings.host,
        transport=transport,
        port=settings.rest_port or settings.grpc_port or 0,
        certificate=settings.cert_file,
        certificate_name=name_of(settings.cert_file.read_bytes()),
        key=settings.api_key,
    )


def name_of(pem: bytes) -> str:
    """A name that this certificate is issued to: one of this machine's own, if it has one. Raises `ValueError`."""
    certificate = x509.load_pem_x509_certificate(pem)
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return ""
    found = [*names.get_values_for_type(x509.DNSName), *map(str, names.get_values_for_type(x509.IPAddress))]
    return "localhost" if "localhost" in found or not found else found[0].replace("*", "node", 1)
