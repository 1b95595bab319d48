"""Inbounds that detour to another one (ShadowTLS, VMess): which connections came through them.

The core reports such connections, and their users, for the inbound behind. The kernel shows through which one a
connection came: the client's socket is connected to its port.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set

from drivers.sing_box.accounts import unlabelled
from drivers.sockets.connections import Endpoint, endpoint
from drivers.sockets.sock_diag import connected
from node.base.logs import Logger
from node.contract.accounts import key_of
from protos.sing_box_pb2 import Connection

# The tag of an inbound, and the key of a user.
Pair = tuple[str, str]


def pair_of(connection: Connection) -> Pair:
    return connection.inbound, key_of(unlabelled(connection.user))


class Detours:
    """The detouring inbounds. `ports` has their ports, by the tag of the inbound behind and by their own tag."""

    log = Logger()

    def __init__(self, ports: Mapping[str, Mapping[str, int]]) -> None:
        self._ports = ports

    def by_barred(self, connections: Iterable[Connection], barred: Set[Pair]) -> list[Connection]:
        """Return the connections whose users are barred from the inbound through which they came."""
        suspects: dict[int, list[Connection]] = {}
        for connection in connections if self._ports else ():
            behind, key = pair_of(connection)
            for tag, port in self._ports.get(behind, {}).items():
                if (tag, key) in barred:
                    suspects.setdefault(port, []).append(connection)
        return [connection for port, some in suspects.items() for connection in self._by(port, some)]

    def _by(self, port: int, suspects: list[Connection]) -> list[Connection]:
        """Return those that came through this port; all of them if the kernel does not list connections."""
        try:
            peers = connected([range(port, port + 1)])
        except OSError as error:
            self.log.warn(
                "the kernel does not list connections: users removed from an inbound with a detour lose all their "
                "connections to the inbound behind it: {error}",
                error=error,
            )
            return suspects
        return [connection for connection in suspects if source_of(connection) in peers]


def source_of(connection: Connection) -> Endpoint | None:
    """Return the client's address and port, without a zone; None if `source` is not an address."""
    address, _, port = connection.source.rpartition(":")
    try:
        return endpoint(address.strip("[]").partition("%")[0], int(port))
    except (OSError, OverflowError, ValueError):
        return None
