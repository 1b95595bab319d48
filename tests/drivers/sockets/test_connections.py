"""The connections of another process: list the peers, and cut exactly the given connections."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drivers.sockets.connections import cut, deafen, peers
from drivers.sockets.sock_diag import endpoint
from scripts.staging.process import tied
from tests.harness.open_files import open_files

# Accepts on the listening socket at descriptor 0, and echoes each byte on all connections.
CHILD = """
import select, socket
listener = socket.socket(fileno=0)
links = []
while True:
    for ready in select.select([listener, *links], [], [])[0]:
        if ready is listener:
            links.append(listener.accept()[0])
            continue
        try:
            data = ready.recv(1)
        except ConnectionError:
            data = b""
        if data:
            ready.send(data)
        else:
            links.remove(ready)
            ready.close()
"""


@dataclass
class Server:
    """A process that holds connections."""

    pid: int
    family: socket.AddressFamily
    port: int

    def connect(self, stack: ExitStack) -> socket.socket:
        """A connection that the process has accepted."""
        host = "127.0.0.1" if self.family is socket.AF_INET else "::1"
        link = stack.enter_context(closing(socket.create_connection((host, self.port), timeout=5)))
        assert echoes(link)
        return link

    @property
    def ports(self) -> list[range]:
        return [range(self.port, self.port + 1)]


def echoes(link: socket.socket) -> bool:
    """Whether the connection is open: the process echoes a byte."""
    try:
        link.sendall(b"x")
        return link.recv(1) == b"x"
    except OSError:
        return False


def is_over(link: socket.socket) -> bool:
    """Wait for the other end to close it. Returns whether it did."""
    try:
        return link.recv(1) == b""
    except ConnectionResetError:
        return True


def name_of(link: socket.socket) -> bytes:
    """The endpoint as the server sees it."""
    return endpoint(*link.getsockname()[:2])


@pytest.fixture(params=[socket.AF_INET, socket.AF_INET6], ids=["IPv4", "IPv6"])
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    """A server whose IPv6 socket accepts IPv4, too, as a core's does."""
    family = request.param
    host = "127.0.0.1" if family is socket.AF_INET else "::"
    with (
        socket.create_server(
            (host, 0), family=family, backlog=512, dualstack_ipv6=family is socket.AF_INET6
        ) as listener,
        tied([sys.executable, "-c", CHILD], stdin=listener.fileno()) as child,
    ):
        yield Server(child.pid, family, listener.getsockname()[1])
        child.kill()


def test_cut_closes_the_given_connections_only(server: Server) -> None:
    """Of many connections to one port exactly the given ones are closed, and the process goes on."""
    with ExitStack() as stack:
        links = [server.connect(stack) for _ in range(100)]
        wanted = {name_of(link): server.ports for link in links[::2]}
        assert peers(server.pid) == {name_of(link) for link in links}
        assert cut(server.pid, wanted) == wanted.keys()
        assert all(map(is_over, links[::2]))
        assert all(map(echoes, links[1::2]))
        assert echoes(server.connect(stack))


def test_other_ports_are_left(server: Server) -> None:
    """A connection of the same peer to another port of the process stays open."""
    with ExitStack() as stack:
        link = server.connect(stack)
        assert not cut(server.pid, {name_of(link): [range(server.port)]})
        assert not cut(server.pid, {name_of(link): ()})
        assert echoes(link)


def test_peers_come_and_go(server: Server) -> None:
    """A peer is listed as long as its connection is open."""
    with ExitStack() as stack:
        link = server.connect(stack)
        assert peers(server.pid) == {name_of(link)}
    with ExitStack() as stack:
        other = server.connect(stack)
        assert peers(server.pid) == {name_of(other)}


def test_mapped_address(server: Server) -> None:
    """An IPv4 client of an IPv6 socket is listed by its IPv4 address."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=5) as link:
        assert echoes(link)
        assert name_of(link) in peers(server.pid)
        assert cut(server.pid, {name_of(link): server.ports}) == {name_of(link)}
        assert is_over(link)


def test_nothing_stays_open(server: Server) -> None:
    """A look leaves no descriptor open, and no duplicate keeps a cut connection open."""
    before = open_files()
    with ExitStack() as stack:
        links = [server.connect(stack) for _ in range(10)]
        cut(server.pid, {name_of(link): server.ports for link in links})
    assert open_files().items() <= before.items()
    assert not peers(server.pid)


def test_datagrams_are_left() -> None:
    """A UDP socket with the same peer is not touched."""
    with (
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as other,
    ):
        for end in (one, other):
            end.bind(("127.0.0.1", 0))
        one.connect(other.getsockname())
        other.connect(one.getsockname())
        own = one.getsockname()[1]
        assert not cut(os.getpid(), {endpoint(*other.getsockname()): [range(own, own + 1)]})
        one.send(b"x")
        assert other.recv(1) == b"x"


def test_a_process_that_has_exited() -> None:
    """A process that has exited has no connections, and that is no error."""
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        child.wait()
    assert not cut(child.pid, {endpoint("127.0.0.1", 1): [range(65536)]})
    assert not peers(child.pid)


@given(st.ip_addresses(v=4), st.integers(0, 65535))
def test_mapped_addresses_are_plain(address: object, port: int) -> None:
    """Both forms of an IPv4 address have the same key."""
    assert endpoint(str(address), port) == endpoint(f"::ffff:{address}", port)
    assert len(endpoint(str(address), port)) == 6


def test_a_deaf_listener(server: Server) -> None:
    """New connections are neither accepted nor refused, existing ones stay, and other ports accept."""
    with ExitStack() as stack:
        link = server.connect(stack)
        deafen(server.pid, [range(server.port + 1, server.port + 2)])
        server.connect(stack)
        deafen(server.pid, server.ports)
        with pytest.raises(TimeoutError):
            socket.create_connection(link.getpeername()[:2], timeout=0.3)
        assert echoes(link)


def test_a_deaf_listener_without_capabilities(server: Server) -> None:
    """It works without CAP_NET_ADMIN, which the unit does not grant and filters would need."""
    code = f"from drivers.sockets.connections import deafen; deafen({server.pid}, {server.ports!r})"
    node = [sys.executable, "-c", code]
    if os.getuid() == 0:
        node = ["setpriv", "--inh-caps", "-net_admin", "--bounding-set", "-net_admin,-sys_admin", "--", *node]
    subprocess.run(node, check=True, cwd=Path(__file__).parents[3])
    with pytest.raises(TimeoutError):
        socket.create_connection(("127.0.0.1", server.port), timeout=0.3)
