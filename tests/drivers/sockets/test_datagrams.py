"""Datagrams led from one process to another: each goes where the last word said, whoever comes and goes."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing

import pytest

from drivers.sockets.datagrams import Datagrams
from drivers.sockets.steering import Unsteerable
from scripts.staging.ports import free_port

PROGRAM = """
import socket, sys
name, host, port = sys.argv[1:]
one = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM)
one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
one.bind((host, int(port)))
print("bound", flush=True)
while True:
    _, peer = one.recvfrom(64)
    one.sendto(name.encode(), peer)
"""


class Port:
    """A port, and the processes on it."""

    def __init__(self, host: str) -> None:
        self.host, self.number = host, free_port()
        self.ports = [range(self.number, self.number + 1)]
        self.steering = Datagrams()
        self.stack = ExitStack()

    def start(self, name: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-I", "-S", "-c", PROGRAM, name, self.host, str(self.number)]
        one = self.stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE))
        self.stack.callback(one.kill)
        assert one.stdout is not None and one.stdout.readline() == b"bound\n"
        return one

    def join(self, name: str) -> subprocess.Popen[bytes]:
        one = self.start(name)
        self.steering.join(one.pid, self.ports)
        return one

    def met(self) -> set[str]:
        """Who answers clients, each with an address of its own."""
        found = set()
        for _ in range(20):
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
                client.settimeout(5)
                client.sendto(b"who?", ("127.0.0.1", self.number))
                found.add(client.recv(8).decode())
        return found


@pytest.fixture(params=["127.0.0.1", "0.0.0.0", "::"])
def port(request: pytest.FixtureRequest) -> Iterator[Port]:
    made = Port(request.param)
    with made.stack, closing(made.steering):
        yield made


def test_led_and_left(port: Port) -> None:
    """Who joins gets none until it is led to; the newest of the others has all after an end, and who is alone."""
    old = port.join("a")
    new = port.join("b")
    assert port.met() == {"a"}
    port.steering.steer(new.pid)
    assert port.met() == {"b"}
    newest = port.join("c")
    assert port.met() == {"b"}
    port.steering.steer(newest.pid)
    for one, left in ((newest, "b"), (new, "a")):
        one.kill()
        one.wait()
        port.steering.leave(one.pid)
        assert port.met() == {left}
    port.steering.close()
    port.start("d")
    assert port.met() == {"a"}
    assert old.poll() is None


def test_before_an_end(port: Port) -> None:
    """Clients are refused at once, and given to nobody; what is left of the processes is nobody's affair."""
    port.join("a")
    new = port.join("b")
    port.steering.steer(new.pid)
    port.steering.silence(new.pid)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
        client.settimeout(5)
        client.connect(("127.0.0.1", port.number))
        client.send(b"who?")
        with pytest.raises(ConnectionRefusedError):
            client.recv(8)
    new.kill()
    new.wait()
    port.steering.leave(new.pid)


def test_a_stranger(port: Port) -> None:
    """Another socket at the address, which nobody took up, is noticed at once and at every join."""
    port.start("x")
    with pytest.raises(Unsteerable, match="another process"):
        port.join("a")


def test_a_stranger_who_comes_later(port: Port) -> None:
    port.join("a")
    port.start("x")
    with pytest.raises(Unsteerable, match="another process"):
        port.join("b")
    assert port.met() == {"a"}
