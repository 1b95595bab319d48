"""A node with pretended cores on loopback, in this process, for the tests of controllers: `nodectl sandbox` runs it."""

from __future__ import annotations

from node.tap import make_node  # first: see there

# isort: split
import os
import stat
import sys
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, cast

from twisted.internet.abstract import FileDescriptor
from twisted.internet.fdesc import readFromFD
from twisted.internet.interfaces import IReactorFDSet
from twisted.python.failure import Failure

from drivers.registry import DRIVER_SETTINGS, pretended
from node.base.reactor import Reactor
from node.base.secret_file import write_secret
from node.certificate import CERTIFICATE, KEY, ensure
from node.service import use_monotonic_clock
from node.settings import load

HOST = "127.0.0.1"


class Place(NamedTuple):
    """How a controller calls the node."""

    address: str
    rest_port: int
    grpc_port: int
    key: str
    certificate: str


class Orders(FileDescriptor):
    """Passes on each line of a file descriptor. Calls `over` at the end of a pipe, and of nothing else."""

    def __init__(self, reactor: Reactor, number: int, take: Callable[[str], None], over: Callable[[], None]) -> None:
        super().__init__(cast(IReactorFDSet, reactor))
        self._number = number
        self._take = take
        self._over = over
        self._rest = b""

    def fileno(self) -> int:
        return self._number

    def doRead(self) -> object:
        return readFromFD(self._number, self._read)

    def connectionLost(self, reason: Failure) -> None:
        super().connectionLost(reason)
        mode = os.fstat(self._number).st_mode
        if stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode):
            self._over()

    def _read(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if text := line.decode(errors="replace").strip():
                self._take(text)


def run(
    directory: Path, ports: tuple[int, int], quiet: bool, ready: Callable[[Place], None], answer: Callable[[str], None]
) -> None:
    """Run a node until a signal comes, or its standard input, if that is a pipe, ends.

    Its files are in `directory`, its REST and gRPC ports are `ports`. `ready` is called when the ports
    accept. Each line of standard input is an order to the cores, and `answer` gets `ok` or `error: ...` for it. Raises
    `BadSettings`, and `SystemExit` if the node cannot start.
    """
    from twisted.internet import reactor

    node_reactor = cast(Reactor, reactor)
    use_monotonic_clock(node_reactor)
    place = Place(HOST, *ports, str(uuid.uuid4()), str(directory / CERTIFICATE))
    ensure(directory, [HOST, "localhost"])
    write_secret(directory / "api_key", place.key.encode())
    values = {
        "API_KEY": place.key,
        "NODE_HOST": HOST,
        "REST_PORT": str(place.rest_port),
        "GRPC_PORT": str(place.grpc_port),
        "SSL_CERT_FILE": place.certificate,
        "SSL_KEY_FILE": str(directory / KEY),
        "STATE_DIR": str(directory),
        "GEO_UPDATES": "off",
    }
    cores, order = pretended(quiet)
    node = make_node(node_reactor, load(values, directory, {}, drivers=DRIVER_SETTINGS), {}, cores)

    def take(line: str) -> None:
        try:
            order(line)
        except ValueError as error:
            answer(f"error: {error}")
        else:
            answer("ok")

    def over() -> None:
        # Also called while the reactor stops.
        if node.running:
            node_reactor.stop()

    def begun() -> None:
        if sys.stdin is not None:
            Orders(node_reactor, sys.stdin.fileno(), take, over).startReading()
        ready(place)

    node.startService()
    node_reactor.addSystemEventTrigger("before", "shutdown", node.stopService)
    node_reactor.callWhenRunning(begun)
    node_reactor.run()
