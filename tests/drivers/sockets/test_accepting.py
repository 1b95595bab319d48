"""Whether a core accepts connections, from the kernel's data."""

from __future__ import annotations

import socket

from drivers.sockets.listeners import CLOSED, WAITING, ListenerWatch
from drivers.sockets.sock_diag import listening
from scripts.staging.wait import until


def test_a_port_without_tcp_listener_is_udp() -> None:
    watch = ListenerWatch()
    assert [watch.look({80: 0}) for _ in range(3)] == [[], [], []]


def test_a_listener_that_is_gone() -> None:
    """For longer than a moment: an inbound that is replaced comes back at once."""
    watch = ListenerWatch()
    watch.look({80: 0, 443: 0})
    for _ in range(CLOSED - 1):
        assert watch.look({80: 0}) == []
    assert watch.look({80: 0}) == ["the core no longer listens on port 443"]
    assert watch.look({80: 0, 443: 0}) == []


def test_connections_that_wait() -> None:
    """Those of a burst are accepted by the next check."""
    watch = ListenerWatch()
    for _ in range(WAITING - 1):
        assert watch.look({80: 3}) == []
    assert watch.look({80: 4}) == ["4 connections to port 80 wait for the core to accept them"]
    assert watch.look({80: 0}) == []


def test_listeners_and_backlogs() -> None:
    """For each port: whether a socket listens, and how many connections wait, for both families."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        ports = {port}
        assert listening(ports) == {port: 0}
        assert port not in listening({port - 1, port + 1})
        with socket.create_connection(("127.0.0.1", port)):
            until(lambda: listening(ports) == {port: 1})
            server.accept()[0].close()
            assert listening(ports) == {port: 0}
    assert listening(ports) == {}
