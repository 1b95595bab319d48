"""Speed limits of a process's sockets, set and removed by inode without a duplicate that stays open."""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from drivers.sockets.connections import Descriptors
from drivers.sockets.pacing import AHEAD, narrow, pace, set_all
from drivers.sockets.sock_diag import listeners
from tests.harness.open_files import open_files

RATE, LOWAT = 47, 25
ANY = 2 ** (8 * struct.calcsize("@L")) - 1
MBYTE = 1_000_000


def rate_of(one: socket.socket) -> int:
    (rate,) = struct.unpack("@L", one.getsockopt(socket.SOL_SOCKET, RATE, struct.calcsize("@L")))
    return int(rate)


def inode(one: socket.socket) -> int:
    return os.fstat(one.fileno()).st_ino


class Pair:
    """A connection: the core's side, which is in this process, and the client's."""

    def __init__(self, stack: ExitStack, host: str = "127.0.0.1") -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.listener = stack.enter_context(socket.create_server((host, 0), family=family))
        self.ports = [range(self.port, self.port + 1)]
        self.client, self.core = self.another(stack)

    @property
    def port(self) -> int:
        return int(self.listener.getsockname()[1])

    def another(self, stack: ExitStack) -> tuple[socket.socket, socket.socket]:
        client = stack.enter_context(socket.socket(self.listener.family))
        # As on a network: segments of the loopback are large for a slow connection.
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, 1400)
        client.connect(self.listener.getsockname())
        core, _ = self.listener.accept()
        return client, stack.enter_context(core)


@pytest.fixture(params=["127.0.0.1", "::1"])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    with ExitStack() as stack:
        yield Pair(stack, request.param)


@pytest.fixture
def own() -> Descriptors:
    return Descriptors(os.getpid())


def seconds(pair: Pair, size: int) -> float:
    """How long it takes to receive so many bytes."""
    pair.core.setblocking(False)
    began, left, data = time.monotonic(), size, bytes(MBYTE)
    while left > 0:
        with suppress(BlockingIOError):
            pair.core.send(data)
        left -= len(pair.client.recv(MBYTE))
    return time.monotonic() - began


def test_a_limit_is_set_and_removed(pair: Pair, own: Descriptors) -> None:
    where = inode(pair.core)
    assert set_all(own, {where: MBYTE}, pace) == {where}
    assert rate_of(pair.core) == MBYTE
    assert pair.core.getsockopt(socket.IPPROTO_TCP, LOWAT) == AHEAD
    assert 0.4 < seconds(pair, MBYTE // 2) < 2
    assert set_all(own, {where: None}, pace) == {where}
    assert rate_of(pair.core) == ANY
    assert seconds(pair, 20 * MBYTE) < 5


def test_accepted_connections_inherit_the_limit(pair: Pair, own: Descriptors) -> None:
    [where] = listeners(pair.ports)[pair.port]
    assert where == inode(pair.listener)
    with ExitStack() as stack:
        set_all(own, {where: MBYTE}, pace)
        _, core = pair.another(stack)
        assert rate_of(core) == MBYTE
        set_all(own, {inode(core): 2 * MBYTE}, pace)
        assert rate_of(core) == 2 * MBYTE
        set_all(own, {where: None}, pace)
        assert rate_of(pair.another(stack)[1]) == ANY
    assert rate_of(pair.core) == ANY


def test_a_window_is_narrowed_and_restored(pair: Pair, own: Descriptors) -> None:
    wide = pair.core.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF)
    set_all(own, {inode(pair.core): 10_000}, narrow)
    assert pair.core.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF) == 20_000
    set_all(own, {inode(pair.core): None}, narrow)
    assert pair.core.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF) >= wide


def test_a_close_reaches_the_client(pair: Pair, own: Descriptors) -> None:
    """A close reaches the client at once, since no duplicate is left."""
    before = open_files()
    set_all(own, {inode(pair.core): MBYTE, inode(pair.listener): MBYTE}, pace)
    assert open_files().items() <= before.items()
    pair.core.close()
    pair.client.settimeout(5)
    assert pair.client.recv(1) == b""


def test_a_reused_number_is_left_alone(pair: Pair, own: Descriptors) -> None:
    with ExitStack() as stack:
        where, number = inode(pair.core), pair.core.fileno()
        set_all(own, {where: MBYTE}, pace)
        _, core = pair.another(stack)
        os.dup2(core.fileno(), number)
        assert set_all(own, {where: 2 * MBYTE}, pace) == set()
        assert rate_of(core) == ANY
        assert set_all(own, {where: 2 * MBYTE, inode(core): MBYTE}, pace) == {inode(core)}
        with Path(os.devnull).open("rb") as file:
            here = inode(core)
            for one in (number, core.fileno()):
                os.dup2(file.fileno(), one)
            assert set_all(own, {here: 2 * MBYTE}, pace) == set()
