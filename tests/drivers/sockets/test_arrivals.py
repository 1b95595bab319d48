"""Whether a look at all connections still names those that exist, by the kernel's count of new ones."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from unittest import mock

import pytest
from twisted.internet.task import Clock

from drivers.sockets import sock_diag
from drivers.sockets.core_connections import LISTED, STALE, Arrivals


@pytest.fixture
def clock() -> Clock:
    clock = Clock()
    clock.advance(100)
    return clock


@pytest.fixture
def count() -> Iterator[mock.Mock]:
    """The kernel's count."""
    with mock.patch.object(sock_diag, "arrivals", return_value=7) as count:
        yield count


def test_a_look_stands_until_a_connection_comes(clock: Clock, count: mock.Mock) -> None:
    """A look is complete while the count stays, and may miss a connection once it has moved."""
    arrivals = Arrivals(clock)
    assert arrivals.may_miss(float("-inf"))
    clock.advance(LISTED)
    look = clock.seconds()
    assert not arrivals.may_miss(look)
    clock.advance(STALE / 2)
    assert not arrivals.may_miss(look)
    count.return_value += 1
    assert arrivals.may_miss(look)


def test_a_look_just_after_a_connection_came(clock: Clock, count: mock.Mock) -> None:
    """A look that began too soon after the count has moved may have missed the connection."""
    arrivals = Arrivals(clock)
    arrivals.may_miss(0)
    clock.advance(LISTED * 0.9)
    look = clock.seconds()
    clock.advance(LISTED * 2)
    assert arrivals.may_miss(look)
    assert not arrivals.may_miss(clock.seconds())


def test_an_old_look(clock: Clock, count: mock.Mock) -> None:
    """A look does not stand for others for ever."""
    arrivals = Arrivals(clock)
    arrivals.may_miss(0)
    clock.advance(LISTED)
    look = clock.seconds()
    clock.advance(STALE + 0.01)
    assert arrivals.may_miss(look)


@pytest.mark.parametrize("error", [FileNotFoundError("no such file"), ValueError("no such counter")])
def test_without_the_count(error: Exception, clock: Clock, count: mock.Mock) -> None:
    """Where the count cannot be read, any look may have missed a connection."""
    arrivals = Arrivals(clock)
    arrivals.may_miss(0)
    clock.advance(1)
    look = clock.seconds()
    assert not arrivals.may_miss(look)
    count.side_effect = error
    assert arrivals.may_miss(look)


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_the_kernel_counts(address: str) -> None:
    """The kernel has counted a connection when its client is connected, even if no process has accepted it yet."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server((address, 0), family=family) as server:
        before = sock_diag.arrivals()
        with socket.create_connection(server.getsockname()[:2]):
            assert sock_diag.arrivals() > before
