"""Survey the listeners of a process, and watch whether it accepts. Linux only, blocking."""

from __future__ import annotations

import os
import socket
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass

from drivers.sockets.connections import duplicates, listens
from drivers.sockets.pidfd import Unreachable
from drivers.sockets.reuseport import Address, address_of
from drivers.sockets.sock_diag import Ports, at

_MPTCP = 262
# Checks in a row, about a second apart, with connections in the backlog until the core counts as not accepting; and
# checks without a listener until it counts as closed: an inbound that is replaced has none for a moment.
WAITING, CLOSED = 5, 2


@dataclass(frozen=True)
class Survey:
    """The sockets that a process has open at some ports, and the reasons why another could not take over."""

    tcp: frozenset[Address]
    udp: frozenset[Address]
    # All unix sockets that it listens on.
    paths: frozenset[str]
    obstacles: tuple[str, ...]


def survey(pid: int, ports: Ports) -> Survey:
    """Survey the process at these ports. One that is gone has nothing."""
    seen, listeners = look(pid, ports, socket.SOCK_STREAM, socket.SOCK_DGRAM)
    for listener in listeners:
        listener.close()
    return seen


def look(pid: int, ports: Ports, *kinds: socket.SocketKind) -> tuple[Survey, list[socket.socket]]:
    """As `survey`, for sockets of these kinds, with duplicates of them that the caller must close."""
    kept: list[socket.socket] = []
    tcp: list[Address] = []
    udp: list[Address] = []
    paths: set[str] = set()
    obstacles: list[str] = []
    try:
        for duplicate in duplicates(pid):
            one = socket.socket(fileno=os.dup(duplicate))
            if one.type in kinds and (listens(one) or takes_clients(one)) and at(one.getsockname()[1], ports):
                (tcp if one.type == socket.SOCK_STREAM else udp).append(address_of(one))
                obstacles += _obstacles(one)
                kept.append(one)
                continue
            with one:
                if one.family == socket.AF_UNIX and one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    name = os.fsdecode(one.getsockname())
                    # An abstract name is written with @.
                    paths.add("@" + name.strip("\0") if name.startswith("\0") else name)
    except Unreachable as error:
        obstacles.append(str(error))
    twice = {address for some in (tcp, udp) for address, times in Counter(some).items() if times > 1}
    obstacles += [f"the core listens on {address} more than once" for address in twice]
    return Survey(frozenset(tcp), frozenset(udp), frozenset(paths), tuple(sorted(set(obstacles)))), kept


def takes_clients(one: socket.socket) -> bool:
    """Whether it is a UDP socket of an inbound: cores share these, and not the sockets of users' own datagrams.

    The kernel may give one of those the number of an inbound's TCP port.
    """
    if one.family not in (socket.AF_INET, socket.AF_INET6) or one.type != socket.SOCK_DGRAM:
        return False
    if not one.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT):
        return False
    with suppress(OSError):
        one.getpeername()
        return False
    return True


def _obstacles(one: socket.socket) -> Iterator[str]:
    """The reasons why another process of ours could not join this socket's address."""
    if not one.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT):
        yield f"{address_of(one)} cannot be shared with a second process (its socket lacks SO_REUSEPORT)"
    if one.proto == _MPTCP:
        yield f"{address_of(one)} listens with Multipath TCP, which the kernel cannot steer"
    if os.fstat(one.fileno()).st_uid != os.geteuid():
        yield f"{address_of(one)} belongs to another user of the machine"


class ListenerWatch:
    """Remembers at which ports a TCP listener existed: an inbound over UDP has none."""

    def __init__(self) -> None:
        self._ports: set[int] = set()
        # Checks in a row with connections in the backlog, and without a listener, by port.
        self._waited: dict[int, int] = {}
        self._missed: dict[int, int] = {}

    def look(self, listening: Mapping[int, int]) -> list[str]:
        """Return what is wrong, each in a line. `listening` maps ports with a listener to the length of the backlog."""
        self._ports |= listening.keys()
        self._missed = _again(self._missed, self._ports - listening.keys())
        self._waited = _again(self._waited, (port for port, waiting in listening.items() if waiting))
        closed = [f"the core no longer listens on port {port}" for port in _since(self._missed, CLOSED)]
        silent = _since(self._waited, WAITING)
        return closed + [
            f"{listening[port]} connections to port {port} wait for the core to accept them" for port in silent
        ]


def _again(times: Mapping[int, int], ports: Iterable[int]) -> dict[int, int]:
    return {port: times.get(port, 0) + 1 for port in ports}


def _since(times: Mapping[int, int], looks: int) -> list[int]:
    return sorted(port for port, seen in times.items() if seen >= looks)
