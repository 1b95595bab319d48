"""The connection limits: who is admitted, and who is cut for a newcomer."""

from __future__ import annotations

from typing import Any

import pytest
from twisted.internet.address import IPv4Address, IPv6Address
from twisted.internet.task import Clock

from node.door.connections import Connection, Connections, Limits, network
from tests.harness.strangers import nobody


class Transport:
    """A transport that notes whether it was aborted."""

    aborted = False

    def __init__(self, host: str) -> None:
        kind: Any = IPv6Address if ":" in host else IPv4Address
        self._peer = kind("TCP", host, 1234)

    def getPeer(self) -> object:
        return self._peer

    def abortConnection(self) -> None:
        self.aborted = True


class Hall:
    """Connections with few places."""

    def __init__(self, **limits: Any) -> None:
        self.clock = Clock()
        self.connections = Connections(self.clock, Limits(**limits), nobody)

    def enter(self, host: str, secured: bool = False, known: bool = False) -> Connection:
        connection = self.connections.enter(Transport(host))
        connection.secured, connection.known = secured, known
        return connection

    def rest(self, connection: Connection) -> None:
        self.clock.advance(1)
        connection.rest(120.0, connection.cut)


def aborted(*connections: Connection) -> list[bool]:
    return [connection.transport.aborted for connection in connections]


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("192.0.2.1", "192.0.2.1", True),
        ("192.0.2.1", "192.0.2.2", False),
        ("::ffff:192.0.2.1", "192.0.2.1", True),
        ("2001:db8:0:1::1", "2001:db8:0:1:ffff::2", True),
        ("2001:db8:0:1::1", "2001:db8:0:2::1", False),
        ("fe80::1%eth0", "fe80::2%eth1", True),
        ("", "", True),
    ],
)
def test_what_counts_as_one_address(one: str, other: str, same: bool) -> None:
    assert (network(one) == network(other)) is same


def test_a_crowd_from_one_address_displaces_only_itself() -> None:
    """One address has a limit of connections without a key; others, and clients with a key, are not affected."""
    hall = Hall(max_connections=10, strangers=2)
    known, other = hall.enter("192.0.2.1", known=True), hall.enter("192.0.2.2")
    first, second, third = (hall.enter("192.0.2.1") for _ in range(3))
    assert aborted(known, other, first, second, third) == [False, False, True, False, False]
    assert len(hall.connections) == 4


def test_no_handshake_goes_first() -> None:
    """Of connections without a key, the oldest without a TLS handshake is cut, otherwise the oldest."""
    hall = Hall(max_connections=10, strangers=3)
    shaken = [hall.enter("192.0.2.1", secured=True) for _ in range(2)]
    silent = hall.enter("192.0.2.1")
    newer = hall.enter("192.0.2.1", secured=True)
    assert aborted(*shaken, silent, newer) == [False, False, True, False]
    hall.enter("192.0.2.1")
    assert aborted(*shaken, newer) == [True, False, False]


def test_all_places_are_taken() -> None:
    """A connection without a key is cut, else the one idle for longest; if all are busy, the newcomer is refused."""
    hall = Hall(max_connections=2)
    one, other = hall.enter("192.0.2.1", known=True), hall.enter("192.0.2.2", known=True)
    assert aborted(hall.enter("192.0.2.3"), one, other) == [True, False, False]
    hall.rest(other)
    hall.rest(one)
    stranger = hall.enter("192.0.2.3")
    assert aborted(one, other) == [False, True]
    hall.enter("192.0.2.4", known=True)
    assert aborted(stranger, one) == [True, False]


def test_the_deadline() -> None:
    """A silent client is cut at the deadline, and leaves nothing behind."""
    hall = Hall()
    connection = hall.enter("192.0.2.1")
    hall.clock.advance(9.9)
    assert aborted(connection) == [False]
    hall.clock.advance(0.1)
    assert aborted(connection) == [True]
    connection.leave()
    assert len(hall.connections) == 0
    assert hall.clock.getDelayedCalls() == []


def test_one_connection_is_entered_once() -> None:
    """Whichever layer asks, a transport has one connection until it has left."""
    hall = Hall()
    transport = Transport("192.0.2.1")
    connection = hall.connections.enter(transport)
    assert hall.connections.enter(transport) is connection
    connection.leave()
    assert hall.connections.enter(transport) is not connection
