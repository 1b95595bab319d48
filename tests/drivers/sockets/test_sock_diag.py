"""The kernel's list of connections: exactly the peers of the given ports."""

from __future__ import annotations

import socket
import struct
from contextlib import ExitStack, suppress

import pytest

from drivers.sockets.sock_diag import connected, connections, endpoint, flows
from scripts.staging.ports import free_port, own_address

# From include/uapi/asm-generic/socket.h.
SO_COOKIE = 57


@pytest.mark.parametrize(
    ("listening", "reached"),
    [("127.0.0.1", "127.0.0.1"), ("::1", "::1"), ("::", "127.0.0.1")],
    ids=["IPv4", "IPv6", "IPv4 on a socket for both"],
)
def test_all_peers_of_a_port_and_no_others(listening: str, reached: str) -> None:
    """All connections to the ports are listed by address and port; those to other ports are not."""
    with ExitStack() as stack:
        ours, other = (stack.enter_context(serve(listening)) for _ in range(2))
        links = [stack.enter_context(socket.create_connection((reached, port_of(ours)))) for _ in range(300)]
        stack.enter_context(socket.create_connection((reached, port_of(other))))
        port = port_of(ours)
        expected = {endpoint(reached, link.getsockname()[1]) for link in links}
        assert connected([range(port, port + 1)]) == expected


def test_each_socket_has_its_cookie() -> None:
    """A cookie distinguishes two connections with the same two ports, and stays the same."""
    with serve("127.0.0.1") as server:
        port, numbers, where = port_of(server), [], (own_address(), free_port())
        for _ in range(2):
            link = socket.create_connection(("127.0.0.1", port), source_address=where)
            accepted, where = server.accept()
            found = [connections([range(port, port + 1)]) for _ in range(2)]
            assert found[0] == found[1]
            [connection] = found[0]
            assert (connection.peer, connection.port) == (endpoint(*where), port)
            assert connection.cookie == struct.unpack("Q", accepted.getsockopt(socket.SOL_SOCKET, SO_COOKIE, 8))[0]
            numbers.append(connection.cookie)
            for end in (link, accepted):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                end.close()
        assert numbers[0] != numbers[1]


def test_ranges_of_ports() -> None:
    """Peers of several ranges are listed, those of the ports just beside them are not."""
    with ExitStack() as stack:
        servers = [stack.enter_context(serve("127.0.0.1")) for _ in range(5)]
        links = [stack.enter_context(socket.create_connection(("127.0.0.1", port_of(server)))) for server in servers]
        ports = [port_of(server) for server in servers]
        far = range(1, 2)
        own = [range(ports[0], ports[0] + 1), far, range(max(1, ports[1] - 100), ports[1] + 1)]
        beside = [range(max(1, port - 100), port) for port in ports] + [range(port + 1, port + 100) for port in ports]
        found, others = connected([*own, far]), connected(beside)
        for link, port in zip(links, ports, strict=True):
            peer = endpoint("127.0.0.1", link.getsockname()[1])
            assert (peer in found) == any(port in some for some in own)
            assert (peer in others) == any(port in some for some in beside)


def test_thousands_of_ranges() -> None:
    """More ranges than the kernel's filter takes are requested as one."""
    with serve("127.0.0.1") as server, socket.create_connection(("127.0.0.1", port_of(server))) as link:
        odd = [range(port, port + 1) for port in range(1, 65536, 2)]
        assert endpoint("127.0.0.1", link.getsockname()[1]) in connected(odd)


def test_a_connection_that_its_process_has_closed() -> None:
    """A closed connection with unsent data is no flow any more, but still a connection."""
    with serve("127.0.0.1") as server, socket.create_connection(("127.0.0.1", port_of(server))) as link:
        ports, peers = [range(port_of(server), port_of(server) + 1)], {endpoint(*link.getsockname())}
        accepted, _ = server.accept()
        accepted.setblocking(False)
        with suppress(BlockingIOError):
            while True:
                accepted.send(bytes(2**20))
        assert [flow.peer for flow in flows(ports, peers)] == [*peers]
        accepted.close()
        assert flows(ports, peers) == [] and connected(ports) == peers


def test_no_ports() -> None:
    """Without ports there are no connections."""
    with serve("127.0.0.1") as server, socket.create_connection(("127.0.0.1", port_of(server))):
        assert connected([]) == set()


def test_a_port_without_connections() -> None:
    """A port with only a listener has no peers."""
    with serve("127.0.0.1") as server:
        assert connected([range(port_of(server), port_of(server) + 1)]) == set()


def serve(address: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    # Not a port that another program's connection may have as its own.
    return socket.create_server((address, free_port()), family=family, backlog=512, dualstack_ipv6=address == "::")


def port_of(server: socket.socket) -> int:
    port: int = server.getsockname()[1]
    return port
