"""Inbounds that lead to another one (ShadowTLS): the core takes their connections for that one's, and so their users.

By which of them a connection came the kernel tells: it is connected to that one's port.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set

from drivers.sing_box.accounts import unlabelled
from drivers.sockets.connections import Endpoint, endpoint
from drivers.sockets.sock_diag import connected
from node.contract.accounts import key_of
from node.logs import Logger
from protos.sing_box_pb2 import Connection

# The tag of an inbound, and the key of a user.
Pair = tuple[str, str]


def pair_of(connection: Connection) -> Pair:
    return connection.inbound, key_of(unlabelled(connection.user))


class Fronts:
    """`ports` are theirs, by the tag of the inbound that they lead to and by their own."""

    log = Logger()

    def __init__(self, ports: Mapping[str, Mapping[str, int]]) -> None:
        self._ports = ports

    def by_barred(self, connections: Iterable[Connection], barred: Set[Pair]) -> list[Connection]:
        """The connections whose users may not come in by the way that they came."""
        suspects: dict[int, list[Connection]] = {}
        for connection in connections if self._ports else ():
            behind, key = pair_of(connection)
            for tag, port in self._ports.get(behind, {}).items():
                if (tag, key) in barred:
                    suspects.setdefault(port, []).append(connection)
        return [connection for port, some in suspects.items() for connection in self._by(port, some)]

    def _by(self, port: int, suspects: list[Connection]) -> list[Connection]:
        """Those of these who came by this port; all of them where the kernel does not say."""
        try:
            peers = connected([range(port, port + 1)])
        except OSError as error:
            self.log.warn("by which port users came is not known, all their connections end: {error}", error=error)
            return suspects
        return [connection for connection in suspects if source_of(connection) in peers]


def source_of(connection: Connection) -> Endpoint | None:
    """From where it comes; of an address with a zone, without that. None for what is no address."""
    address, _, port = connection.source.rpartition(":")
    try:
        return endpoint(address.strip("[]").partition("%")[0], int(port))
    except (OSError, OverflowError, ValueError):
        return None
