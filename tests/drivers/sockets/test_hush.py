"""For a moment a process gets no new clients, and keeps all that it has."""

from __future__ import annotations

import os
import select
import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing

import pytest

from drivers.sockets.listeners import Hush, unhush
from scripts.staging.wait import until
from tests.drivers.sockets.test_connections import Server, echoes, server

__all__ = ["server"]

# Seconds of a pause; a client whose first packet was dropped tries again after one.
SILENCE, AGAIN = 0.3, 3.0


def knock(server: Server, stack: ExitStack) -> socket.socket:
    """Start a connection."""
    link = stack.enter_context(closing(socket.socket(server.family, socket.SOCK_STREAM)))
    link.setblocking(False)
    link.connect_ex(("127.0.0.1" if server.family is socket.AF_INET else "::1", server.port))
    return link


def is_through(link: socket.socket, seconds: float) -> bool:
    """Whether it is established in time."""
    return bool(select.select([], [link], [], seconds)[1])


@pytest.fixture
def hush(server: Server) -> Iterator[Hush]:
    made = Hush(server.pid, server.ports)
    yield made
    made.end()


def test_new_connections_wait(server: Server, hush: Hush) -> None:
    """Existing connections continue; a new one waits, and is served afterwards."""
    with ExitStack() as stack:
        there = server.connect(stack)
        hush.begin()
        comes = [knock(server, stack) for _ in range(20)]
        assert not select.select([], comes, [], SILENCE)[1]
        assert echoes(there)
        assert hush.waiting() == 0
        hush.end()
        for link in comes:
            assert is_through(link, AGAIN)
            link.settimeout(5)
            assert echoes(link)
        assert echoes(server.connect(stack))
        hush.end()


def test_other_ports_accept(server: Server) -> None:
    """Only the given ports are affected."""
    other = Hush(server.pid, [range(1, server.port), range(server.port + 1, 65536)])
    other.begin()
    with ExitStack() as stack:
        assert echoes(server.connect(stack))
    other.end()


def test_filters_of_a_killed_node(server: Server, hush: Hush) -> None:
    """The node process after a killed one removes its filters, and harms no listener without one."""
    with ExitStack() as stack:
        hush.begin()
        link = knock(server, stack)
        assert not is_through(link, SILENCE)
        unhush(server.pid, server.ports)
        assert is_through(link, AGAIN)
        unhush(server.pid, server.ports)
        assert echoes(server.connect(stack))


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_datagrams(host: str) -> None:
    """Datagrams are dropped meanwhile; earlier ones stay."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as one, socket.socket(family, socket.SOCK_DGRAM) as client:
        one.bind((host, 0))
        one.setblocking(False)
        client.connect(one.getsockname()[:2])
        port = one.getsockname()[1]
        hush = Hush(os.getpid(), [range(port, port + 1)])
        client.send(b"before")
        hush.begin()
        client.send(b"meanwhile")
        hush.end()
        client.send(b"after")
        said = []
        for _ in range(2):
            until(lambda: bool(select.select([one], [], [], 0)[0]), 5, "it hears")
            said.append(one.recv(100))
        assert said == [b"before", b"after"]


def test_waiting_connections() -> None:
    """Waiting connections are counted, and none are added."""
    with socket.create_server(("127.0.0.1", 0)) as listener, ExitStack() as stack:
        port = listener.getsockname()[1]
        for _ in range(3):
            stack.enter_context(socket.create_connection(("127.0.0.1", port)))
        hush = Hush(os.getpid(), [range(port, port + 1)])
        hush.begin()
        assert hush.waiting() == 3
        listener.accept()[0].close()
        assert hush.waiting() == 2
        hush.end()


def test_a_process_that_has_exited(server: Server) -> None:
    """A process that has exited has no clients to keep out."""
    hush = Hush(2**22 - 1, server.ports)
    hush.begin()
    assert hush.waiting() == 0
    hush.end()
    unhush(2**22 - 1, server.ports)
