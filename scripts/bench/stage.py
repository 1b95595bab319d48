"""Common parts of the benches: a node with many users, live connections through its core, and costs."""

from __future__ import annotations

import os
import platform
import socket
import statistics
import subprocess
import tempfile
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

import psutil

from node.doctor.interpreter import is_optimised
from protos.service_pb2 import Backend, Proxy, User, Vless
from scripts.staging import socks
from scripts.staging.backend import backend_config, user
from scripts.staging.controller import RpcController
from scripts.staging.core import XrayClient, find_xray
from scripts.staging.echo import EchoServer
from scripts.staging.inbounds import Kind
from scripts.staging.node import NodeProcess
from scripts.staging.ports import free_port
from scripts.staging.protocols import vless
from scripts.staging.transports import raw
from scripts.staging.users import TestUser

KIND = Kind("vless-raw", vless(), raw())
# Live connections through the core while its users change.
LIVE = 200
# Attempts to open one of them.
TRIES = 5
_CALL_SECONDS = 300.0


class Crowd:
    """`size` VLESS users, each on all of `tags`.

    The first `steady` users (the very first is `live`) never change; the others are changed in turn.
    """

    def __init__(self, size: int, tags: Sequence[str], steady: int = 1) -> None:
        self.tags = tags
        self.steady = steady
        self.live = TestUser.new("live")
        self.users = [user(self.live, dict.fromkeys(tags, KIND)), *(self.make(f"{n}.user") for n in range(1, size))]
        self._next = 0

    def make(self, email: str) -> User:
        """A user with a new id."""
        return User(email=email, proxies=Proxy(vless=Vless(id=str(uuid.uuid4()))), inbounds=self.tags)

    def change(self, count: int) -> list[User]:
        """Give the next `count` users in turn a new id. Returns these users."""
        places = self._turn(count)
        for place in places:
            self.users[place] = self.make(self.users[place].email)
        return [self.users[place] for place in places]

    def exchange(self, email: str) -> tuple[User, User]:
        """Replace the next user in turn by a new one. Returns the new user and the removal of the old one."""
        (place,) = self._turn(1)
        gone, self.users[place] = self.users[place], self.make(email)
        return self.users[place], User(email=gone.email)

    def _turn(self, count: int) -> list[int]:
        places = [self.steady + (self._next + step) % (len(self.users) - self.steady) for step in range(count)]
        self._next += count
        return places


class Backing(NamedTuple):
    """A configuration, its ports, and the users on all its inbounds."""

    crowd: Crowd
    ports: Sequence[int]
    config: str

    def request(self) -> Backend:
        return Backend(config=self.config, users=self.crowd.users)

    def elsewhere(self) -> str:
        """The same configuration on other ports: two cores on the same ports would share the connections."""
        return configuration(self.crowd.tags, [free_port() for _ in self.ports])


def backing(size: int, inbounds: int = 1) -> Backing:
    tags, ports = [f"in-{number}" for number in range(inbounds)], [free_port() for _ in range(inbounds)]
    return Backing(Crowd(size, tags), ports, configuration(tags, ports))


def configuration(tags: Iterable[str], ports: Iterable[int]) -> str:
    return backend_config([KIND.inbound(port, tag) for port, tag in zip(ports, tags, strict=True)])


class Cost(NamedTuple):
    """Elapsed seconds, and processor seconds of the node and of its core."""

    wall: float
    node: float
    core: float


@dataclass(frozen=True)
class Stage:
    """A running node, a controller of it, and the echo server that its users connect to."""

    directory: Path
    node: NodeProcess
    controller: RpcController
    echo: EchoServer

    @property
    def core(self) -> int:
        return self.node.newest_core()

    @property
    def api(self) -> Path:
        """The socket of the running core's API."""
        return next((self.node.state / "run").glob("*.sock"))

    def rss(self) -> float:
        """Resident memory of the node in MiB."""
        return float(psutil.Process(self.node.node_pid).memory_info().rss) / 2**20

    @contextmanager
    def client(self, target: Backing) -> Iterator[int]:
        """Run a client core of the user `live`. Yields the port of its proxy, which leads to the first inbound."""
        proxy = free_port()
        with XrayClient({proxy: KIND.outbound(target.ports[0], target.crowd.live)}):
            yield proxy

    def measure(self, work: Callable[[], object]) -> Cost:
        """The cost of `work`, which must not replace the core."""
        core = self.core
        before = processor(self.node.node_pid), processor(core)
        wall = timed(work)
        after = processor(self.node.node_pid), processor(core)
        return Cost(wall, after[0] - before[0], after[1] - before[1])


@contextmanager
def stage(*, through: Sequence[str] = (), **environment: str) -> Iterator[Stage]:
    """Run a node with these additional settings; `through` is a command prefix."""
    with tempfile.TemporaryDirectory() as work:
        directory = Path(work)
        with (
            NodeProcess(directory, through=through, **environment) as node,
            closing(RpcController(node, deadline=_CALL_SECONDS)) as controller,
            EchoServer() as echo,
        ):
            yield Stage(directory, node, controller, echo)


class Links:
    """Live connections through a proxy, each checked with an echo; `drops` counts those that have ended since."""

    def __init__(self, proxy: int, echo: EchoServer, count: int = LIVE) -> None:
        self._links = [opened(proxy, echo) for _ in range(count)]

    def drops(self) -> int:
        return sum(not answers(link) for link in self._links)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for link in self._links:
            link.close()


def opened(proxy: int, echo: EchoServer) -> socket.socket:
    """A connection that echoes. With Shadowsocks and many users some connections of a burst are reset at once."""
    for _ in range(TRIES):
        link = socks.connect(proxy, echo.host, echo.port)
        if answers(link):
            return link
        link.close()
    raise SystemExit(f"no connection through port {proxy} after {TRIES} attempts")


def answers(link: socket.socket) -> bool:
    """Whether the connection echoes a byte."""
    try:
        link.sendall(b"echo 1\nx")
        return bool(link.recv(1))
    except OSError:
        return False


def first_byte(port: int, proxy: int, echo: EchoServer) -> None:
    """Wait until the proxy echoes a byte. The inbound's port is probed first, as a client core would wait and retry."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0 and _through(proxy, echo):
                return
        time.sleep(0.002)
    raise SystemExit(f"no byte came back through port {proxy} within 30 s")


def _through(proxy: int, echo: EchoServer) -> bool:
    try:
        with socks.connect(proxy, echo.host, echo.port, timeout=2) as link:
            return answers(link)
    except OSError:
        return False


def processor(pid: int) -> float:
    """Processor seconds of a process, in steps of 10 ms."""
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


def timed(work: Callable[[], object]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def median(costs: Sequence[Cost]) -> Cost:
    return Cost(*(statistics.median(column) for column in zip(*costs, strict=True)))


def percentile(values: Iterable[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def machine() -> str:
    """A line about the machine and its load, to print with the figures."""
    version = subprocess.run([find_xray(), "version"], capture_output=True, text=True, check=True).stdout.split()[1]
    load = ", ".join(f"{figure:.1f}" for figure in os.getloadavg())
    python = f"{platform.python_version()} ({'optimised' if is_optimised() else 'plain'} build)"
    return f"{psutil.cpu_count()} processors, kernel {os.uname().release}, Xray {version}, Python {python}, load {load}"
