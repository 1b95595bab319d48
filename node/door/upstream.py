"""gRPC's server behind the door: its unix socket, and which client each connection to it belongs to."""

from __future__ import annotations

import secrets
import stat
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

from twisted.internet.defer import Deferred

from node.base.sockets import dial
from node.base.waiting import fire

# Prefix of the server's socket files. Each has a new name: gRPC removes the file of a closed socket some time later.
_NAME = "grpc."


class Client:
    """The connection of one client, for the server's side. This one is gone."""

    # Their IP address.
    address = ""

    @property
    def takes_bundles(self) -> bool:
        """Whether the relay takes bundles of messages apart for them: see `node.door.bundles`."""
        return True

    def show_key(self) -> None:
        """A request had a valid key."""

    def refused(self) -> None:
        """A request had a wrong key or none."""

    def watch(self, delivered: Deferred[bool]) -> None:
        """The server has written a reply: fire `delivered` when it is known whether it was delivered."""
        fire(delivered, False)


_GONE = Client()


class Upstream:
    """The path of the server's current socket, and the clients by the peer name that the server sees."""

    def __init__(self, reactor: Any, directory: Path) -> None:
        self._reactor = reactor
        self._directory = directory
        self._sockets = count(1)
        self._path: Path | None = None
        # Abstract names are shared by all processes: the random part keeps them from guessing ours.
        self._prefix = f"txnode-{secrets.token_hex(8)}-"
        self._numbers = count(1)
        self._clients: dict[str, Client] = {}

    def sweep(self) -> None:
        """Remove the sockets of a killed node. To be called when this node has claimed the directory."""
        for left in self._directory.glob(f"{_NAME}*"):
            with suppress(OSError):  # on a read-only disk they stay
                if stat.S_ISSOCK(left.lstat().st_mode):
                    left.unlink(missing_ok=True)

    def next_path(self) -> Path:
        """Return the path for the server's next socket."""
        return self._directory / f"{_NAME}{next(self._sockets)}"

    def listens(self, path: Path) -> None:
        """The server listens on this path from now on."""
        self._path = path

    def connect(self, client: Client, protocol: Any) -> str:
        """Connect a protocol to the server for this client. Returns the client's peer name there. Raises `OSError`."""
        if self._path is None:
            raise ConnectionRefusedError("the gRPC server does not listen yet")
        name = f"{self._prefix}{next(self._numbers)}"
        dial(self._reactor, str(self._path), protocol, name).at_once = True
        peer = f"unix-abstract:{name}"
        self._clients[peer] = client
        return peer

    def left(self, peer: str) -> None:
        """The client is gone."""
        self._clients.pop(peer, None)

    def client(self, peer: str) -> Client:
        """Return the client that the server knows by this peer name."""
        return self._clients.get(peer, _GONE)
