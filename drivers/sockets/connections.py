"""The TCP connections of a child process: who is at their other ends, and ending some of them. Linux only, blocking.

A duplicate of the child's descriptor is the very socket.
"""

from __future__ import annotations

import ctypes
import errno
import os
import socket
import struct
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from drivers.sockets import reuseport
from drivers.sockets.hiding import disconnect
from drivers.sockets.rights import Unreachable, ends, take

# Address (4 or 16 bytes) and port (2) as they travel; an IPv4-mapped IPv6 address is its IPv4 address.
Endpoint = bytes
# Ports of the child's own end.
Ports = Sequence[range]

# Where a process's descriptors are listed.
_FILES = "/proc/{}/fd"
_MAPPED = bytes(10) + b"\xff\xff"
_LIBC = ctypes.CDLL(None, use_errno=True)
# What Python does not name of tcp_info: its state at 0, and how many milliseconds ago data was sent, and received.
_ESTABLISHED = 1
_TCP_INFO = struct.Struct("=B43xI4xI48x")
# Seconds without a byte after which nobody is at the other end of a connection: of one that is whole, and of one of
# which one side has said its last word. Xray keeps both kinds for minutes (Shadowsocks-2022, XHTTP).
SILENT, HALF_SILENT = 300.0, 5.0


@dataclass
class Seen:
    """What one look at a process found: whose connections were ended, and all peers it was connected to."""

    ended: set[Endpoint] = field(default_factory=set)
    peers: set[Endpoint] = field(default_factory=set)


def endpoint(address: str, port: int) -> Endpoint:
    """Raises `OSError` for what is not an IP address, `OverflowError` for what is not a port."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return plain(socket.inet_pton(family, address)) + port.to_bytes(2)


def cut(pid: int, wanted: Mapping[Endpoint, Ports]) -> Seen:
    """End the process's TCP connections to these peers where its own port is one of those beside them.

    A process that is gone has no connections. Raises `Unreachable`.
    """
    seen = Seen()
    for duplicate, peer in _connections(pid):
        seen.peers.add(peer)
        if peer in wanted and _end(duplicate, wanted[peer]):
            seen.ended.add(peer)
    return seen


def hang_up(pid: int, ports: Ports) -> None:
    """End the process's TCP connections to these ports of its own, in good order. Raises `Unreachable`.

    What was written to them is still sent, after the process's end too: who was served has what was counted.
    """
    for duplicate, _ in _connections(pid):
        with socket.socket(fileno=os.dup(duplicate)) as connection:
            if connection.type == socket.SOCK_STREAM and at(connection.getsockname()[1], ports):
                with suppress(OSError):  # it ended by itself meanwhile
                    connection.shutdown(socket.SHUT_RDWR)


def alive(pid: int, ports: Ports) -> int:
    """How many TCP connections to these ports of its own the process has that somebody is at. Raises `Unreachable`."""
    count = 0
    for duplicate, _ in _connections(pid):
        with socket.socket(fileno=os.dup(duplicate)) as one:
            count += one.type == socket.SOCK_STREAM and at(one.getsockname()[1], ports) and _is_alive(one)
    return count


def _is_alive(one: socket.socket) -> bool:
    info = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
    state, *moved = _TCP_INFO.unpack(info)
    return bool(min(moved) < 1000 * (SILENT if state == _ESTABLISHED else HALF_SILENT))


def peers(pid: int) -> set[Endpoint]:
    """Whom the process is connected to. Raises `Unreachable`."""
    return cut(pid, {}).peers


def deafen(pid: int, ports: Ports, deaf: bool = True) -> None:
    """Have the kernel drop new connections to these TCP ports, or no more: clients try again a second later.

    With luck by then another process has the port. A closed listener would refuse them. Raises `Unreachable`.
    """
    for duplicate in duplicates(pid):
        with socket.socket(fileno=os.dup(duplicate)) as one:
            if listens(one) and at(one.getsockname()[1], ports):
                reuseport.deafen(one, deaf)


def run_dry(pid: int, spared: Ports) -> None:
    """Have the process read to the end on its TCP connections, but for those to these ports of its own.

    What it has read it still hands on, and counts; what it is writing is written. Raises `Unreachable`.
    """
    for duplicate, _ in _connections(pid):
        with socket.socket(fileno=os.dup(duplicate)) as one:
            if one.type == socket.SOCK_STREAM and not at(one.getsockname()[1], spared):
                with suppress(OSError):  # it ended by itself meanwhile
                    one.shutdown(socket.SHUT_RD)


def listens(one: socket.socket) -> bool:
    """Whether it takes TCP connections by IP."""
    internet = one.family in (socket.AF_INET, socket.AF_INET6) and one.type == socket.SOCK_STREAM
    return internet and bool(one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _connections(pid: int) -> Iterator[tuple[int, Endpoint]]:
    """A duplicate of each connected socket, open until the next is asked for, and its peer."""
    for duplicate in duplicates(pid):
        peer = _peer(duplicate)
        if peer is not None:
            yield duplicate, peer


def duplicates(pid: int) -> Iterator[int]:
    """A duplicate of each socket, open until the next is asked for. Raises `Unreachable`."""
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    except OSError as error:
        raise Unreachable(error) from error
    try:
        yield from _duplicates(process, _FILES.format(pid))
    except OSError as error:
        if not ends(process):
            raise Unreachable(error) from error
    finally:
        os.close(process)


def _duplicates(process: int, path: str) -> Iterator[int]:
    names = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for name in os.listdir(names):  # noqa: PTH208 - of a descriptor
            duplicate = _duplicate(process, names, name)
            if duplicate is None:
                continue
            try:
                yield duplicate
            finally:
                os.close(duplicate)
    finally:
        os.close(names)


def _duplicate(process: int, names: int, name: str) -> int | None:
    """Our descriptor for one of the process's; None if it is no socket, or closed by now."""
    try:
        if not os.readlink(name, dir_fd=names).startswith("socket:"):
            return None
        return take(process, int(name))
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno == errno.EBADF:
            return None
        raise


def _peer(descriptor: int) -> Endpoint | None:
    """Whom a socket is connected to by IP. Not by the socket module, which would make text of it."""
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
    """An address without the form that IPv4 has among IPv6's."""
    return address.removeprefix(_MAPPED) if len(address) == 16 else address


def _end(descriptor: int, ports: Ports) -> bool:
    """Reset a connection under whoever holds it, if it is TCP and at one of these ports.

    Not shut down: where its end is awaited in each direction by itself, as by Shadowsocks-2022 in Xray, half of it
    would live on.
    """
    with socket.socket(fileno=os.dup(descriptor)) as connection:
        if connection.type != socket.SOCK_STREAM or not at(connection.getsockname()[1], ports):
            return False
        try:
            disconnect(descriptor)
        except OSError:
            with suppress(OSError):  # it ended by itself meanwhile
                connection.shutdown(socket.SHUT_RDWR)
        return True


def at(port: int, ports: Ports) -> bool:
    for some in ports:  # noqa: SIM110 - for thousands of connections at a time; `any` takes three times as long
        if port in some:
            return True
    return False
