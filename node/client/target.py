"""The address of a node, with the transport, the key and the trusted certificates for it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from cryptography.x509 import load_pem_x509_certificates

from node.api.auth import Dialect
from node.keys.keyfile import door_name


@dataclass(frozen=True)
class Target:
    """A node to call.

    `key` is its API key; `trust` is its own certificate, or that of the authority that signed it, as PEM. Either may be
    the `Path` of a file, which is read when the client is made. Without `trust`, the transport library's default
    authorities are trusted. The host name, or `certificate_name` if the certificate is issued to another one, is
    checked against the certificate in any case, and is the name by which the client asks for the node (SNI). A
    `certificate_name` of "auto" is the name made from the key, for nodes with DOOR_NAME=auto. `dialect` decides how the
    key is sent and, over REST, the format of errors and log lines: in the deployed one some kinds of errors cannot be
    distinguished, and a node that is gone without closing its connections is not noticed.
    """

    transport: Literal["rest", "grpc"]
    host: str
    port: int
    key: str | Path = field(repr=False)
    trust: str | Path | None = field(default=None, repr=False)
    dialect: Dialect = Dialect.DOCUMENT
    certificate_name: str = ""

    @property
    def name(self) -> str:
        """The host without the brackets of an IPv6 address."""
        return self.host.strip("[]")

    @property
    def address(self) -> str:
        return f"[{self.name}]:{self.port}" if ":" in self.name else f"{self.name}:{self.port}"

    @property
    def asked_name(self) -> str:
        """The name by which the client asks for the node, if it is not the host."""
        return door_name(_text(self.key).strip()) if self.certificate_name == "auto" else self.certificate_name

    def credentials(self) -> dict[str, str]:
        """Return the header, or the metadata, with the key; nothing for an empty key."""
        key = _text(self.key).strip()
        if not key:
            return {}
        return {"x-api-key": key} if self.dialect is Dialect.DEPLOYED else {"authorization": f"Bearer {key}"}

    def certificates(self) -> bytes | None:
        """Return the trusted certificates, PEM; None without any. Raises `ValueError` for other content."""
        if self.trust is None:
            return None
        pem = _text(self.trust).encode()
        load_pem_x509_certificates(pem)
        return pem


def _text(given: str | Path) -> str:
    return given.read_text() if isinstance(given, Path) else given
