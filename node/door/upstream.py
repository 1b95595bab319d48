"""gRPC's server behind the door: its unix socket, and whose connection to it is whose."""

from __future__ import annotations

import secrets
import stat
from itertools import count
from pathlib import Path
from typing import Any, Protocol

from twisted.internet.defer import Deferred

from node.sockets import dial
from node.waiting import fire

# A socket of the server; each has a name of its own, for gRPC removes the file of one that it closes some time later.
_NAME = "grpc."


class Client(Protocol):
    """The connection of one client, as the server's side speaks of it."""

    @property
    def address(self) -> str:
        """Where they are."""

    def show_key(self) -> None:
        """A request of theirs carries the key."""

    def refused(self) -> None:
        """A request of theirs carries a wrong key, or none."""

    def watch(self, delivered: Deferred[bool]) -> None:
        """The server has written a reply: fire this when it is known whether it arrived."""


class Upstream:
    """Where the server listens at the moment, and the clients by the name that it calls them."""

    def __init__(self, reactor: Any, directory: Path) -> None:
        self._reactor = reactor
        self._directory = directory
        self._sockets = count(1)
        self._path: Path | None = None
        # Abstract names are everybody's: nobody else hits on ours.
        self._prefix = f"txnode-{secrets.token_hex(8)}-"
        self._numbers = count(1)
        self._clients: dict[str, Client] = {}

    def sweep(self) -> None:
        """Remove the sockets of a node that was killed; to be called when the directory is ours."""
        for left in self._directory.glob(f"{_NAME}*"):
            if stat.S_ISSOCK(left.lstat().st_mode):
                left.unlink(missing_ok=True)

    def next_path(self) -> Path:
        """For a new socket of the server."""
        return self._directory / f"{_NAME}{next(self._sockets)}"

    def listens(self, path: Path) -> None:
        """The server is here from now on."""
        self._path = path

    def connect(self, client: Client, protocol: Any) -> str:
        """Connect a protocol to the server, for this client; the client's name there. Raises `OSError`."""
        if self._path is None:
            raise ConnectionRefusedError("there is no server yet")
        name = f"{self._prefix}{next(self._numbers)}"
        dial(self._reactor, str(self._path), protocol, name).at_once = True
        peer = f"unix-abstract:{name}"
        self._clients[peer] = client
        return peer

    def left(self, peer: str) -> None:
        """The client is gone."""
        self._clients.pop(peer, None)

    def show_key(self, peer: str) -> None:
        """A request of this client carries the key."""
        if (client := self._clients.get(peer)) is not None:
            client.show_key()

    def address(self, peer: str) -> str:
        """Where this client is."""
        return "" if (client := self._clients.get(peer)) is None else client.address

    def refused(self, peer: str) -> None:
        """A request of this client carries a wrong key, or none."""
        if (client := self._clients.get(peer)) is not None:
            client.refused()

    def watch(self, peer: str, delivered: Deferred[bool]) -> None:
        """The server has written a reply to this client: fire this when it is known whether it arrived."""
        if (client := self._clients.get(peer)) is not None:
            client.watch(delivered)
        else:
            fire(delivered, False)
