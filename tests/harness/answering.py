"""Small processes that share a UDP port as runs of a core do, and clients that ask for their names."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress

from drivers.sockets.sessions import Sessions
from drivers.sockets.steering import Datagrams
from scripts.staging.ports import free_port
from scripts.staging.process import tied

PROGRAM = """
import socket, sys
name, host, port, interface = sys.argv[1:]
one = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM)
one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
if interface:
    one.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, interface.encode())
one.bind((host, int(port)))
print("bound", flush=True)
while True:
    _, peer = one.recvfrom(64)
    try:
        one.sendto(name.encode(), peer)
    except OSError:
        pass
"""
# The result of `answer` when no process has the port.
NOBODY = "nobody"


class Port:
    """A port, and the processes on it. `names` are the addresses that clients connect to."""

    def __init__(self, steering: Datagrams | Sessions, host: str, names: Iterable[str], interface: str = "") -> None:
        self.steering, self.host, self.names, self.interface = steering, host, list(names), interface
        self.number = free_port()
        self.ports = [range(self.number, self.number + 1)]
        self.stack = ExitStack()

    def start(self, name: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-I", "-S", "-c", PROGRAM, name, self.host, str(self.number), self.interface]
        one = self.stack.enter_context(tied(command, stdout=subprocess.PIPE))
        self.stack.callback(one.kill)
        assert one.stdout is not None and one.stdout.readline() == b"bound\n"
        return one

    def join(self, name: str) -> subprocess.Popen[bytes]:
        one = self.start(name)
        self.steering.join(one.pid, self.ports)
        return one

    def met(self) -> set[str]:
        """The names of the processes that answer many clients, each with its own source port."""
        return {self.ask(name) for name in self.names for _ in range(20)}

    def ask(self, name: str) -> str:
        """One client's answer. The kernel sends few refusals (ICMP) a second for all programs: up to three attempts."""
        for _ in range(3):
            with self.client(name) as client, suppress(TimeoutError):
                return answer(client)
        raise TimeoutError(f"neither an answer nor a refusal at {name}")

    @contextmanager
    def client(self, name: str) -> Iterator[socket.socket]:
        family = socket.AF_INET6 if ":" in name else socket.AF_INET
        with socket.socket(family, socket.SOCK_DGRAM) as client:
            client.settimeout(5)
            client.connect((name, self.number))
            yield client


def answer(client: socket.socket) -> str:
    try:
        client.send(b"who?")
        return client.recv(8).decode()
    except ConnectionRefusedError:
        return NOBODY


def end(one: subprocess.Popen[bytes]) -> None:
    one.kill()
    one.wait()
