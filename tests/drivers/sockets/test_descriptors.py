"""Sockets of a process by descriptor number: each is found, even when numbers are reused, and none is kept."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager

import pytest

from drivers.sockets.connections import Descriptors
from drivers.sockets.sock_diag import endpoint, flows
from tests.harness.open_files import open_files

# Accepts connections, prints how many there are, closes those whose number it reads.
_CHILD = """
import socket, sys
server = socket.create_server(("127.0.0.1", 0))
print(server.getsockname()[1], flush=True)
links = []
for line in sys.stdin:
    word, number = line.split()
    if word == "accept":
        links += [server.accept()[0] for _ in range(int(number))]
    else:
        links[int(number)].close()
    print("done", flush=True)
"""


class Child:
    """A process with connections."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.pid = process.pid
        self.port = int(self._line())

    @property
    def ports(self) -> list[range]:
        return [range(self.port, self.port + 1)]

    def connect(self, count: int) -> list[socket.socket]:
        links = []
        for _ in range(count):
            links.append(socket.create_connection(("127.0.0.1", self.port), 5))
            self.say("accept 1")
        return links

    def say(self, words: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{words}\n")
        self._process.stdin.flush()
        self._line()

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline()


@contextmanager
def _running() -> Iterator[Child]:
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", _CHILD], stdin=pipe, stdout=pipe, text=True) as process:
        try:
            yield Child(process)
        finally:
            process.kill()


@pytest.fixture
def child() -> Iterator[Child]:
    with _running() as found:
        yield found


def inodes(child: Child, *links: socket.socket) -> dict[int, bytes]:
    found = flows(child.ports, {peer(link) for link in links})
    return {flow.inode: flow.peer for flow in found}


def peer(link: socket.socket) -> bytes:
    return endpoint(*link.getsockname()[:2])


def test_bytes_and_silence(child: Child) -> None:
    """The kernel's list has bytes and silence of the requested connections, however many they are."""
    links = child.connect(300)
    with ExitStack() as stack:
        for link in links:
            stack.enter_context(closing(link))
        links[0].sendall(bytes(1000))
        (one,) = flows(child.ports, {peer(links[0])})
        assert (one.peer, one.port, one.received) == (peer(links[0]), child.port, 1000)
        assert 0 <= one.silent < 60 and 0 < one.round_trip < 10
        found = flows(child.ports, {peer(link) for link in links})
        assert {flow.peer for flow in found} == {peer(link) for link in links}
        assert not flows([range(1, 2)], {peer(links[0])})
        assert not flows(child.ports, set())


def test_reused_numbers(child: Child) -> None:
    descriptors, before = Descriptors(child.pid), open_files()
    links = child.connect(3)
    mine = inodes(child, *links)
    assert {inode for inode, _ in descriptors.taken(mine)} == mine.keys()
    child.say("close 1")
    links.append(*child.connect(1))
    after = inodes(child, links[0], links[2], links[3])
    assert len(after) == 3
    assert {inode for inode, _ in descriptors.taken([*mine, *after])} == after.keys()
    for link in links:
        link.close()
    assert open_files().items() <= before.items()


def test_reset_of_the_given_connections_only(child: Child) -> None:
    descriptors, links = Descriptors(child.pid), child.connect(5)
    with ExitStack() as stack:
        for link in links:
            stack.enter_context(closing(link))
        assert descriptors.end({peer(links[1]): child.ports, peer(links[2]): [range(1, 2)]}, {}) == {peer(links[1])}
        (last,) = inodes(child, links[4])
        assert descriptors.reset([last]) == {last}
        for link in (links[1], links[4]):
            with pytest.raises(ConnectionResetError):
                link.recv(1)
        assert len(inodes(child, *links)) == 3


def test_a_process_that_has_exited_has_none() -> None:
    with _running() as child:
        pass
    assert not [*Descriptors(child.pid).taken([1, 2])]
