"""The profile of the node on this machine, from its settings: where it listens, its certificate and its key."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from cryptography import x509

from node.nodectl.exits import Unusable
from node.nodectl.local_node import find
from node.nodectl.profiles import LOCAL, Profile
from node.settings import BadSettings, Settings, load

_ANY = ("", "0.0.0.0", "::")  # noqa: S104 - compared with, not listened on
_REMEDY = "change to the node's directory, run this as the node's user or root, or name another node: --node NAME"


def local(directory: Path, environ: Mapping[str, str]) -> Profile:
    """The profile of the node with settings in this directory, else of the service. Raises `Unusable`."""
    try:
        place = find(directory, environ)
        return _profile(load({}, place.directory, place.environ, drivers=()))
    except BadSettings as bad:
        raise Unusable(f"no usable settings of a node found here: {'; '.join(bad.faults)}. {_REMEDY}")
    except (OSError, ValueError) as error:
        raise Unusable(f"cannot call the node on this machine: {error}. {_REMEDY}")


def _profile(settings: Settings) -> Profile:
    transport: Literal["rest", "grpc"] = "rest" if settings.door.rest_port else "grpc"
    return Profile(
        LOCAL,
        address="localhost" if settings.door.host in _ANY else settings.door.host,
        transport=transport,
        port=settings.door.rest_port or settings.door.grpc_port or 0,
        certificate=settings.door.cert_file,
        certificate_name=name_of(settings.door.cert_file.read_bytes()),
        key=settings.keys.key,
    )


def name_of(pem: bytes) -> str:
    """A name in this certificate: localhost if it is there, else the first one. Raises `ValueError`."""
    certificate = x509.load_pem_x509_certificate(pem)
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return ""
    found = [*names.get_values_for_type(x509.DNSName), *map(str, names.get_values_for_type(x509.IPAddress))]
    return "localhost" if "localhost" in found or not found else found[0].replace("*", "node", 1)
