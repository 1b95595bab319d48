"""A node with a build of sing-box, and clients of its users."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from protos import service_pb2
from scripts.staging import transfer
from scripts.staging.controller import RpcController
from scripts.staging.echo import EchoServer
from scripts.staging.node import ROOMY, NodeProcess
from scripts.staging.ports import free_port
from scripts.staging.sing_box import Door, SingBoxClient, find_sing_box
from scripts.staging.users import TestUser
from scripts.staging.wait import until


@dataclass
class Box:
    """A node with one build, and a controller of it."""

    build: str
    node: NodeProcess
    controller: RpcController

    def counted(self, kind: service_pb2.StatType, name: str) -> dict[str, int]:
        return {stat.type: stat.value for stat in self.controller.stats(kind, name).stats}

    def settles(self, kind: service_pb2.StatType, name: str, expected: Mapping[str, int]) -> dict[str, int]:
        """The counters as soon as they are as expected, or after two seconds."""
        with suppress(AssertionError):
            until(lambda: self.counted(kind, name) == expected, 2)
        return self.counted(kind, name)


@contextmanager
def box_of(build: str, directory: Path, **environment: str) -> Iterator[Box]:
    executable = find_sing_box(build)
    with NodeProcess(directory, SING_BOX_EXECUTABLE_PATH=str(executable), **ROOMY | environment) as node:
        node.core = executable.resolve()
        with closing(RpcController(node)) as controller:
            yield Box(build, node, controller)


@contextmanager
def client(*routes: tuple[Door, TestUser]) -> Iterator[list[int]]:
    """Run a client core for these users and inbounds. Yields its SOCKS ports, one for each route."""
    ports = {free_port(): door.outbounds(person) for door, person in routes}
    with SingBoxClient(ports) as core:
        try:
            yield list(ports)
        except OSError as error:
            raise AssertionError(f"{error}; output of the client:\n{core.output}") from error


def gets_in(port: int, echo: EchoServer, patience: float = 10.0) -> bool:
    """Whether a connection through the port can be opened and stays open for another echo."""
    try:
        with transfer.connect(port, echo, patience) as link:
            transfer.echo(link, b"still there")
            return True
    except OSError:
        return False


def stays_out(port: int, echo: EchoServer) -> bool:
    """Whether no connection can be opened. The timeout is short, as some protocols leave strangers waiting."""
    return not gets_in(port, echo, patience=1.0)


def stays_in(port: int, echo: EchoServer) -> bool:
    """Whether a new connection lives for half a second: the core reports the user only after it has let them in."""
    try:
        with transfer.connect(port, echo, timeout=1) as link:
            link.settimeout(0.5)
            return bool(link.recv(1))
    except TimeoutError:
        return True
    except OSError:
        return False
