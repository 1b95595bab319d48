"""What leads to a node: its address, certificate and key, and the two ways to present the key."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

Dialect = Literal["bearer", "x-api-key"]


class Target(Protocol):
    """A node to call: `NodeProcess`, or anything that has its address, certificate and key."""

    host: str
    rest_port: int
    grpc_port: int
    key: str

    @property
    def pem(self) -> str: ...


@dataclass
class Address:
    """A target that is no more than that: for a node that somebody else runs, or another process that calls it."""

    host: str
    rest_port: int
    grpc_port: int
    key: str
    pem: str


def credentials(key: str, dialect: Dialect) -> dict[str, str]:
    """The header or metadata that carries the key in this dialect; nothing for an empty key."""
    if not key:
        return {}
    return {"authorization": f"Bearer {key}"} if dialect == "bearer" else {"x-api-key": key}
