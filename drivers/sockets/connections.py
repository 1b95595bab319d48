"""List the peers of a child process's TCP connections, and close some of them. Linux only, blocking.

A duplicate of the child's descriptor refers to the same socket.
"""

from __future__ import annotations

import ctypes
import os
import socket
import struct
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress

from drivers.sockets import reuseport
from drivers.sockets.pidfd import getfd, numbers, opened
from drivers.sockets.udp_hide import disconnect

# Address (4 or 16 bytes) and port (2 bytes) in network order; an IPv4-mapped IPv6 address as its IPv4 address.
Endpoint = bytes
# Ports of the child's own end.
Ports = Sequence[range]

_MAPPED = bytes(10) + b"\xff\xff"
_LIBC = ctypes.CDLL(None, use_errno=True)
# The fields of tcp_info: the state, and how many milliseconds ago data was sent and received.
_ESTABLISHED = 1
_TCP_INFO = struct.Struct("=B43xI4xI48x")
# Seconds without a byte after which a connection counts as abandoned: an established one, and a half-closed one. Xray
# keeps both kinds for minutes (Shadowsocks-2022, XHTTP).
SILENT, HALF_SILENT = 300.0, 5.0


def endpoint(address: str, port: int) -> Endpoint:
    """Pack an endpoint. Raises `OSError` for an invalid address, `OverflowError` for an invalid port."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return plain(socket.inet_pton(family, address)) + port.to_bytes(2)


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


def plain(address: bytes) -> bytes:
    """Reduce an IPv4-mapped IPv6 address to the IPv4 address."""
    return address.removeprefix(_MAPPED) if len(address) == 16 else address


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


def at(port: int, ports: Ports) -> bool:
    """Whether a port is in one of these ranges."""
    for some in ports:  # noqa: SIM110 - for thousands of connections at a time; `any` takes three times as long
        if port in some:
            return True
    return False
