"""Find the TCP connections of a child process, and close some of them. Linux only, blocking.

A duplicate of the child's descriptor refers to the same socket. None is ever kept: while one exists, the child's close
does not reach its peer.
"""

from __future__ import annotations

import ctypes
import os
import socket
import struct
import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress

from drivers.sockets import reuseport
from drivers.sockets.pidfd import getfd, numbers, opened
from drivers.sockets.sock_diag import Endpoint, Ports, at, flows, plain

# A socket address of no family.
_NO_ADDRESS = bytes(16)
_LIBC = ctypes.CDLL(None, use_errno=True)
# The fields of tcp_info: the state, and how many milliseconds ago data was sent and received.
_ESTABLISHED = 1
_TCP_INFO = struct.Struct("=B43xI4xI48x")
# Seconds without a byte after which a connection counts as abandoned: an established one, and a half-closed one. Xray
# keeps both kinds for minutes (Shadowsocks-2022, XHTTP).
SILENT, HALF_SILENT = 300.0, 5.0


def peers(pid: int) -> set[Endpoint]:
    """All peers of the process's connections. Raises `Unreachable`."""
    return {peer for _, peer in _connections(pid)}


def cut(pid: int, wanted: Mapping[Endpoint, Ports]) -> set[Endpoint]:
    """Reset the process's TCP connections to these peers, at the local ports given for each. Returns their peers.

    A process that is gone has no connections. Raises `Unreachable`.
    """
    return {peer for each, peer in _connections(pid) if peer in wanted and _end(each, wanted[peer])}


def hang_up(pid: int, ports: Ports) -> set[int]:
    """Shut down the process's TCP connections at these local ports. Returns their inodes. Raises `Unreachable`.

    The kernel still sends what the process has written, even after its end, so users get all that was counted. The
    process can still read what has arrived.
    """
    ended = set()
    for one, port in _tcp(pid):
        if at(port, ports):
            ended.add(os.fstat(one.fileno()).st_ino)
            _shut(one, socket.SHUT_RDWR)
    return ended


def alive(pid: int, ports: Ports) -> int:
    """Count the process's TCP connections at these local ports that are not abandoned. Raises `Unreachable`."""
    return sum(at(port, ports) and _is_alive(one) for one, port in _tcp(pid))


def deafen(pid: int, ports: Ports, deaf: bool = True) -> None:
    """Have the kernel drop new connections to these local TCP ports, or accept them again (`deaf=False`).

    Clients try again a second later, when another process may have the port; a closed listener would refuse them.
    Raises `Unreachable`.
    """
    for duplicate in duplicates(pid):
        with socket.socket(fileno=os.dup(duplicate)) as one:
            if listens(one) and at(one.getsockname()[1], ports):
                reuseport.deafen(one, deaf)


def run_dry(pid: int, spared: Ports) -> None:
    """Have the process read an end of file on its TCP connections, except those at the local ports `spared`.

    It still forwards and counts what it has read, and can still write. Raises `Unreachable`.
    """
    for one, port in _tcp(pid):
        if not at(port, spared):
            _shut(one, socket.SHUT_RD)


def listens(one: socket.socket) -> bool:
    """Whether a socket listens for TCP over IP."""
    internet = one.family in (socket.AF_INET, socket.AF_INET6) and one.type == socket.SOCK_STREAM
    return internet and bool(one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def duplicates(pid: int) -> Iterator[int]:
    """A duplicate of each socket of a process, open until the next one. Raises `Unreachable`."""
    with opened(pid) as process:
        if process is None:
            return
        for _, number in numbers(pid):
            if (duplicate := getfd(process, number)) is not None:
                try:
                    yield duplicate
                finally:
                    os.close(duplicate)


def _connections(pid: int) -> Iterator[tuple[int, Endpoint]]:
    """A duplicate of each connected socket, open until the next one, and its peer."""
    for duplicate in duplicates(pid):
        if (peer := _peer(duplicate)) is not None:
            yield duplicate, peer


def _tcp(pid: int) -> Iterator[tuple[socket.socket, int]]:
    """Each TCP connection of a process, open until the next one, and its local port."""
    for duplicate, _ in _connections(pid):
        with socket.socket(fileno=os.dup(duplicate)) as one:
            if one.type == socket.SOCK_STREAM:
                yield one, one.getsockname()[1]


def _is_alive(one: socket.socket) -> bool:
    info = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
    state, *moved = _TCP_INFO.unpack(info)
    return bool(min(moved) < 1000 * (SILENT if state == _ESTABLISHED else HALF_SILENT))


def _shut(one: socket.socket, how: int) -> None:
    with suppress(OSError):  # closed meanwhile
        one.shutdown(how)


def _peer(descriptor: int) -> Endpoint | None:
    """The IP peer of a socket, if connected. Calls getpeername directly: the socket module would format it as text."""
    address = ctypes.create_string_buffer(128)
    size = ctypes.c_uint(128)
    if _LIBC.getpeername(descriptor, address, ctypes.byref(size)):
        return None
    raw = address.raw
    family = int.from_bytes(raw[:2], sys.byteorder)
    if family == socket.AF_INET:
        return raw[4:8] + raw[2:4]
    if family == socket.AF_INET6:
        return plain(raw[8:24]) + raw[2:4]
    return None


def _end(descriptor: int, ports: Ports) -> bool:
    """Reset a connection of another process, if it is TCP and at one of these local ports. Returns whether it is.

    A shutdown would not do: a process that awaits the end of each direction separately, as Xray does for
    Shadowsocks-2022, would keep half of the connection.
    """
    with socket.socket(fileno=os.dup(descriptor)) as connection:
        if connection.type != socket.SOCK_STREAM or not at(connection.getsockname()[1], ports):
            return False
        try:
            disconnect(descriptor)
        except OSError:
            _shut(connection, socket.SHUT_RDWR)
        return True


def disconnect(descriptor: int) -> None:
    """Connect to AF_UNSPEC: this resets a TCP connection, and unbinds a UDP socket from its interface.

    See tcp_disconnect in net/ipv4/tcp.c and __udp_disconnect in net/ipv4/udp.c of the kernel. Raises `OSError`.
    """
    if _LIBC.connect(descriptor, _NO_ADDRESS, len(_NO_ADDRESS)):
        fault = ctypes.get_errno()
        raise OSError(fault, os.strerror(fault))


class Descriptors:
    """The socket descriptors of one process, by the inodes that the kernel's lists of connections have.

    A search through some thousand sockets takes some 50 ms; the kernel's list of connections and a socket of known
    number less than 1 ms.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        # Descriptor numbers by inode; a number may have another socket by now.
        self._numbers: dict[int, int] = {}

    def taken(self, inodes: Collection[int]) -> Iterator[tuple[int, int]]:
        """Each of these sockets with a duplicate of it, which is open until the next one.

        Closed sockets are left out. Raises `Unreachable`.
        """
        with opened(self._pid) as process:
            if not inodes or process is None:
                return
            fresh = not self._numbers.keys() >= {*inodes}
            if fresh:
                self._look()
            missed: list[int] = []
            yield from self._each(process, inodes, missed)
            if missed and not fresh:
                self._look()
                yield from self._each(process, missed, [])

    def reset(self, inodes: Collection[int]) -> set[int]:
        """Reset these TCP connections. Returns those that existed. Raises `Unreachable`."""
        ended = set()
        for inode, duplicate in self.taken(inodes):
            with suppress(OSError):  # closed meanwhile
                disconnect(duplicate)
            ended.add(inode)
        return ended

    def end(self, wanted: Mapping[Endpoint, Ports], sockets: Mapping[Endpoint, int]) -> set[Endpoint]:
        """Reset the process's TCP connections to these peers, at the local ports given for each.

        `sockets`: of some peers, the cookie that the connection must have. Returns the peers. Those that are connected
        but not found by number are searched for. Raises `Unreachable`.
        """
        try:
            found = flows([some for ports in wanted.values() for some in ports], wanted.keys())
        except OSError:
            return cut(self._pid, wanted)
        inodes = {
            flow.inode: flow.peer
            for flow in found
            if at(flow.port, wanted[flow.peer]) and sockets.get(flow.peer, flow.cookie) == flow.cookie
        }
        ended = {inodes[inode] for inode in self.reset(inodes)}
        missed = {peer: wanted[peer] for peer in inodes.values() if peer not in ended}
        return ended | cut(self._pid, missed) if missed else ended

    def _each(self, process: int, inodes: Collection[int], missed: list[int]) -> Iterator[tuple[int, int]]:
        """As `taken`; inodes whose number has another socket by now go to `missed`."""
        for inode in inodes:
            number = self._numbers.get(inode)
            duplicate = None if number is None else getfd(process, number)
            try:
                if duplicate is not None and os.fstat(duplicate).st_ino == inode:
                    yield inode, duplicate
                elif number is not None:
                    missed.append(inode)
            finally:
                if duplicate is not None:
                    os.close(duplicate)

    def _look(self) -> None:
        """Read all numbers again: those of closed sockets are reused."""
        # In one assignment, since several threads may read it.
        self._numbers = dict(numbers(self._pid))
