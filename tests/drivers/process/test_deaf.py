"""Whether a core takes connections, as the kernel tells it."""

from __future__ import annotations

import socket

from drivers.process.deaf import CLOSED, WAITING, Ears
from drivers.sockets.sock_diag import listening
from scripts.staging.wait import until


def test_a_port_that_never_listened_is_one_over_udp() -> None:
    ears = Ears()
    assert [ears.look({80: 0}) for _ in range(3)] == [[], [], []]


def test_a_listener_that_is_gone() -> None:
    """For longer than a moment: an inbound that is swapped comes back at once."""
    ears = Ears()
    ears.look({80: 0, 443: 0})
    for _ in range(CLOSED - 1):
        assert ears.look({80: 0}) == []
    assert ears.look({80: 0}) == ["nobody listens on port 443 any more"]
    assert ears.look({80: 0, 443: 0}) == []


def test_connections_that_wait() -> None:
    """Those of a burst are accepted by the next look."""
    ears = Ears()
    for _ in range(WAITING - 1):
        assert ears.look({80: 3}) == []
    assert ears.look({80: 4}) == ["4 connections to port 80 wait to be accepted"]
    assert ears.look({80: 0}) == []


def test_the_kernel_tells_both() -> None:
    """Of each port that is asked for: whether somebody listens, and how many wait, on both families."""
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
