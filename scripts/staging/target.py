"""A node to call: its address, certificate and key, and the two ways to present the key."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

Dialect = Literal["bearer", "x-api-key"]


class Target(Protocol):
    """A node to call: `NodeProcess`, or any object with the address, certificate and key of one."""

    host: str
    rest_port: int
    grpc_port: int
    key: str

    @property
    def pem(self) -> str: ...


@dataclass
class Address:
    """The plain data of a target: for a node of another process, or for another process that calls it."""

    host: str
    rest_port: int
    grpc_port: int
    key: str
    pem: str


def credentials(key: str, dialect: Dialect) -> dict[str, str]:
    """The HTTP header or gRPC metadata that carries the key in this dialect; empty for an empty key."""
    if not key:
        return {}
    return {"authorization": f"Bearer {key}"} if dialect == "bearer" else {"x-api-key": key}
