"""gRPC's server behind the door: its unix socket, and which client each connection to it belongs to."""

from __future__ import annotations

import array
import fcntl
import secrets
import stat
import termios
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IPushProducer, IReactorTime
from twisted.internet.protocol import Protocol, connectionDone
from twisted.python.failure import Failure
from zope.interface import implementer

from node.base.alarm import Alarm
from node.base.sockets import dial
from node.base.waiting import fire

# Prefix of the server's socket files. Each has a new name: gRPC removes the file of a closed socket some time later.
_NAME = "grpc."
# Small pieces in a row after which they are batched, the bytes of a piece that is not small, and seconds of a batch;
# pieces that come further apart are not in a row.
FEW = 8
LARGE = 16 * 1024
GATHER = 0.005


class Client:
    """The connection of one client, for the server's side. This one is gone."""

    # Their IP address.
    address = ""

    @property
    def takes_bundles(self) -> bool:
        """Whether the relay takes bundles of messages apart for them: see `node.door.bundles`."""
        return True

    def reply(self, data: bytes) -> None:
        """Pass the server's bytes on to the client."""

    def server_lost(self) -> None:
        """The server has closed the connection, after its own GOAWAY."""

    def show_key(self) -> None:
        """gRPC's server has begun a request with a key; its message is complete."""

    def refused(self) -> None:
        """A request had a wrong key or none."""

    def expect(self, delivered: Deferred[bool]) -> None:
        """The server is about to write a reply that will be watched, unless `delivered` fires before."""

    def watch(self, delivered: Deferred[bool]) -> None:
        """The server has written a reply: fire `delivered` when it is known whether it was delivered."""
        fire(delivered, False)


_GONE = Client()


@implementer(IPushProducer)
class Server(Protocol):
    """The connection to gRPC's server for one client.

    gRPC's server writes each message of a stream alone, and a reactor turn for each costs more than the rest of the
    work. So when small pieces keep coming and the client has made no new call, they are batched for a moment.
    """

    transport: Any

    def __init__(self, client: Client, reactor: IReactorTime, left: Callable[[], object]) -> None:
        """`left` is called when the client is gone."""
        self._client = client
        self._left = left
        self._now = reactor.seconds
        self._pieces, self._last = 0, 0.0
        self._client_is_full = False
        self._gathering = Alarm(reactor, self._gathered)

    def waiting(self) -> int:
        """Return the number of the server's bytes that were not read yet."""
        if not self.transport.connected:
            return 0
        waiting = array.array("i", [0])
        fcntl.ioctl(self.transport.getHandle(), termios.FIONREAD, waiting)
        return waiting[0]

    def dataReceived(self, data: bytes) -> None:
        if self._client is _GONE:
            return
        self._client.reply(data)
        before, self._last = self._last, self._now()
        self._pieces = self._pieces + 1 if len(data) < LARGE and self._last - before < GATHER else 0
        if self._pieces > FEW and not (self._gathering.pending or self._client_is_full):
            self.transport.pauseProducing()
            self._gathering.set(GATHER)

    def hurry(self) -> None:
        """The client has made a call: end the batch."""
        self._pieces = 0
        if self._gathering.pending:
            self._gathering.cancel()
            self._gathered()

    def pauseProducing(self) -> None:
        self._client_is_full = True
        self.transport.pauseProducing()

    def resumeProducing(self) -> None:
        self._client_is_full = False
        if not self._gathering.pending:
            self.transport.resumeProducing()

    def stopProducing(self) -> None:
        """The client is gone; its `connectionLost` handles it."""

    def _gathered(self) -> None:
        self._last = self._now()
        if not self._client_is_full:
            self.transport.resumeProducing()

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        client = self._client
        self._gone()
        client.server_lost()

    def leave(self) -> None:
        """The client is gone, or is being closed; what it has sent still reaches the server."""
        self._gone()
        self.transport.unregisterProducer()
        self.transport.loseConnection()

    def _gone(self) -> None:
        self._left()
        self._client = _GONE
        self._gathering.cancel()


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

    def connect(self, client: Client) -> Server:
        """Connect to the server for this client. Raises `OSError`."""
        if self._path is None:
            raise ConnectionRefusedError("the gRPC server does not listen yet")
        name = f"{self._prefix}{next(self._numbers)}"
        # The client's peer name there.
        peer = f"unix-abstract:{name}"
        server = Server(client, self._reactor, lambda: self._clients.pop(peer, None))
        dial(self._reactor, str(self._path), server, name).at_once = True
        self._clients[peer] = client
        return server

    def client(self, peer: str) -> Client:
        """Return the client that the server knows by this peer name."""
        return self._clients.get(peer, _GONE)
