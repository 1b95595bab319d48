"""Where a node is, how it is spoken to, and with which key and which trust."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from cryptography.x509 import load_pem_x509_certificates

from node.api.auth import Dialect


@dataclass(frozen=True)
class Target:
    """A node to call.

    `key` is its API key, `trust` its own certificate, or that of the authority that signed it, as PEM. A `Path` is a
    file that has it, read when the client is made. Without `trust` the authorities count that the transport's library
    knows. The host's name, or `certificate_name` where it is issued to another one, is checked against the certificate
    in any case. `dialect` says how the key is sent, and over
    REST how errors and log lines come: in the deployed one some kinds of errors cannot be told apart, and a node that
    is gone without a word is not noticed.
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

    def credentials(self) -> dict[str, str]:
        """The header, or the metadata, that carries the key; nothing for an empty one."""
        key = _text(self.key).strip()
        if not key:
            return {}
        return {"x-api-key": key} if self.dialect is Dialect.DEPLOYED else {"authorization": f"Bearer {key}"}

    def certificates(self) -> bytes | None:
        """The PEM of what is trusted. Raises `ValueError` for something else."""
        if self.trust is None:
            return None
        pem = _text(self.trust).encode()
        load_pem_x509_certificates(pem)
        return pem


def _text(given: str | Path) -> str:
    return given.read_text() if isinstance(given, Path) else given
