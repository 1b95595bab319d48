"""The kernel's list of connections: every peer of a port, and nobody else's."""

from __future__ import annotations

import socket
from contextlib import ExitStack

import pytest

from drivers.diag import connected
from drivers.sockets import endpoint


@pytest.mark.parametrize(
    ("listening", "reached"),
    [("127.0.0.1", "127.0.0.1"), ("::1", "::1"), ("::", "127.0.0.1")],
    ids=["IPv4", "IPv6", "IPv4 on a socket for both"],
)
def test_every_peer_of_a_port_and_nobody_else(listening: str, reached: str) -> None:
    """All who are connected to the ports are found by address and port; those of other ports are not."""
    with ExitStack() as stack:
        ours, other = (stack.enter_context(serve(listening)) for _ in range(2))
        links = [stack.enter_context(socket.create_connection((reached, port_of(ours)))) for _ in range(300)]
        stack.enter_context(socket.create_connection((reached, port_of(other))))
        port = port_of(ours)
        expected = {endpoint(reached, link.getsockname()[1]) for link in links}
        assert connected([range(port, port + 1)]) == expected


def test_many_ports() -> None:
    """The same for a range that is too wide to be asked for port by port."""
    with serve("127.0.0.1") as server, socket.create_connection(("127.0.0.1", port_of(server))) as link:
        port = port_of(server)
        assert endpoint("127.0.0.1", link.getsockname()[1]) in connected([range(max(1, port - 100), port + 1)])


def test_a_port_that_nobody_is_connected_to() -> None:
    """A port that only listens has no peers."""
    with serve("127.0.0.1") as server:
        assert connected([range(port_of(server), port_of(server) + 1)]) == set()


def serve(address: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, 0), family=family, backlog=512, dualstack_ipv6=address == "::")


def port_of(server: socket.socket) -> int:
    port: int = server.getsockname()[1]
    return port
