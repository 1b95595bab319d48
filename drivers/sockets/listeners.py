"""Survey the listeners of a process, watch whether it accepts, and keep new clients off. Linux only, blocking."""

from __future__ import annotations

import os
import socket
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass

from drivers.sockets.connections import duplicates, listens
from drivers.sockets.pidfd import Unreachable
from drivers.sockets.reuseport import SO_ATTACH_FILTER, SO_DETACH_FILTER, Address, address_of, attach, waiting
from drivers.sockets.sock_diag import Ports, at

_MPTCP = 262
# Checks in a row, about a second apart, with connections in the backlog until the core counts as not accepting; and
# checks without a listener until it counts as closed: an inbound that is replaced has none for a moment.
WAITING, CLOSED = 5, 2
# A filter that lets no byte of any packet pass.
_DROP = [(0x06, 0, 0, 0)]


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
            if one.type in kinds and (listens(one) or takes_datagrams(one)) and at(one.getsockname()[1], ports):
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


def takes_datagrams(one: socket.socket) -> bool:
    """Whether it is a UDP socket without a peer."""
    if one.family not in (socket.AF_INET, socket.AF_INET6) or one.type != socket.SOCK_DGRAM:
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


class Hush:
    """Between `begin` and `end` no new client reaches these ports of a process. One call at a time.

    A filter (SO_ATTACH_FILTER) drops packets to its listeners, and its datagrams; its connections continue. A client
    whose first packet is dropped sends it again after 1 s, or after 0.2 s if the handshake had begun.
    `reuseport.deafen` would not do: a connection established meanwhile inherits its options and stays deaf. It takes no
    capability.
    """

    def __init__(self, pid: int, ports: Ports) -> None:
        self._pid, self._ports = pid, ports
        self._sockets: list[socket.socket] = []

    def begin(self) -> None:
        """Attach the filters. Raises `Unreachable` and `OSError`; some may be attached then, until `end`."""
        for one in _hearing(self._pid, self._ports):
            self._sockets.append(one)
            attach(one, _DROP, SO_ATTACH_FILTER)

    def waiting(self) -> int:
        """How many connections the process has not accepted yet; none are added."""
        return sum(waiting(one) for one in self._sockets if one.type == socket.SOCK_STREAM)

    @property
    def datagrams(self) -> bool:
        """Whether the ports include UDP sockets, where unread datagrams may be left."""
        return any(one.type == socket.SOCK_DGRAM for one in self._sockets)

    def end(self) -> None:
        """Let clients through again."""
        while self._sockets:
            with self._sockets.pop() as one:
                _open(one)


def unhush(pid: int, ports: Ports) -> None:
    """Remove the filters of a node that was killed between `begin` and `end`. Raises `Unreachable`."""
    for one in _hearing(pid, ports):
        with one:
            _open(one)


def _hearing(pid: int, ports: Ports) -> Iterator[socket.socket]:
    """Duplicates of the sockets that new clients reach, for the caller to close."""
    for duplicate in duplicates(pid):
        one = socket.socket(fileno=os.dup(duplicate))
        if (listens(one) or takes_datagrams(one)) and at(one.getsockname()[1], ports):
            yield one
        else:
            one.close()


def _open(one: socket.socket) -> None:
    with suppress(OSError):  # it has no filter
        one.setsockopt(socket.SOL_SOCKET, SO_DETACH_FILTER, 0)
