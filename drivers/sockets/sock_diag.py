"""List the TCP connections and listeners of this machine with one request to the kernel (sock_diag(7)).

It needs no capability, and sees only its own network namespace. If the kernel does not list them, each function raises
`OSError`.
"""

from __future__ import annotations

import functools
import os
import socket
import struct
import sys
from collections.abc import Collection, Container, Iterator, Sequence
from typing import IO, NamedTuple

# Address (4 or 16 bytes) and port (2 bytes) in network order; an IPv4-mapped IPv6 address as its IPv4 address.
Endpoint = bytes
# Ports of the process's own end.
Ports = Sequence[range]

_MAPPED = bytes(10) + b"\xff\xff"

# include/uapi/linux/{netlink,inet_diag}.h. The kernel scans its whole table of connections for each request; this older
# kind of request covers both address families at once.
_NETLINK_SOCK_DIAG = 4
_TCP_CONNECTIONS = 18
_DONE, _ERROR = 3, 2
_REQUEST_DUMP = 0x301
# ESTABLISHED, FIN_WAIT1, FIN_WAIT2 and CLOSE_WAIT.
_STATES = 1 << 1 | 1 << 4 | 1 << 5 | 1 << 8
# SYN_RECV.
_COMING = 1 << 3
_LISTENING = 1 << 10
_HEADER = struct.Struct("=IHHII")
# The request: which attributes to add (a bit each), no socket id to match, the states.
_ASK = struct.Struct("=3xB48xI4x")
_INFO, _ASK_INFO = 2, 1 << 1
# The size and kind of an attribute.
_ATTRIBUTE = struct.Struct("=HH")
_BYTECODE = 1
# A message's size and kind. Offsets in it: the family at 16, the local port at 20, the peer's port at 22, the peer's
# address at 40, at 60 the cookie, a number that the kernel gives to one socket only.
_KIND = struct.Struct("=IH")
_SIZE_OF = struct.Struct("=I")
_COOKIE = struct.Struct("=Q")
# At 84 the inode of the socket, 0 if no process has it; from 88 on attributes, such as tcp_info (linux/tcp.h). In that,
# at 44: how many milliseconds ago data was sent; at 52 and 56: data and an acknowledgement received; at 120: the bytes
# that the peer has acknowledged; at 128: those received; at 144: those not sent yet; at 148: the shortest round trip in
# microseconds.
_UNKNOWN = 0xFFFFFFFF
_INODE, _ATTRIBUTES = struct.Struct("=I"), 88
_MOVED = struct.Struct("=44xI4xII60xQQ8xII")
# At 72 the bytes that the process has not read; of a listener, the connections that wait to be accepted.
_WAITING = struct.Struct("=I")
_SIZE = 256 * 1024
# More than /proc/net/snmp has. A read of `_SIZE` bytes gets new memory from the kernel, which takes as long again.
_PAGE = 16 * 1024

# The kernel's filter is a program of steps: a test, and how far to jump if it holds, and if not. A socket passes if the
# program ends at its exact end, and fails if it jumps beyond (inet_diag_bc_run in net/ipv4/inet_diag.c).
_STEP = struct.Struct("=BBH")
_GO, _OWN_PORT_FROM, _OWN_PORT_UP_TO, _PEER_PORT_FROM, _PEER_PORT_UP_TO = 1, 2, 3, 4, 5
_OWN, _PEER = (_OWN_PORT_FROM, _OWN_PORT_UP_TO), (_PEER_PORT_FROM, _PEER_PORT_UP_TO)
# Bytes of the program for one range, and from its second test on.
_RANGE, _REST = 20, 12
# The most ranges in a program, and the most peers that the kernel filters by port.
MOST = 3000
PICKED = 200
_ANY = range(1, 65536)
# Words of the row of counters, of which one of the first is needed.
_EARLY = 8


def endpoint(address: str, port: int) -> Endpoint:
    """Pack an endpoint. Raises `OSError` for an invalid address, `OverflowError` for an invalid port."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return plain(socket.inet_pton(family, address)) + port.to_bytes(2)


def plain(address: bytes) -> bytes:
    """Reduce an IPv4-mapped IPv6 address to the IPv4 address."""
    return address.removeprefix(_MAPPED) if len(address) == 16 else address


def at(port: int, ports: Ports) -> bool:
    """Whether a port is in one of these ranges."""
    for some in ports:  # noqa: SIM110 - for thousands of connections at a time; `any` takes three times as long
        if port in some:
            return True
    return False


class Connection(NamedTuple):
    """A TCP connection: its peer, the local port, the socket's cookie."""

    peer: Endpoint
    port: int
    cookie: int


class Flow(NamedTuple):
    """A TCP connection with its traffic, in bytes. `inode`: of its socket. `silent` and `round_trip` are seconds.

    A connection is silent while its peer sends no data and acknowledges none. So one that only downloads is not silent;
    one whose peer is gone is, despite retransmissions, and so is one that answers only keep-alive probes.
    """

    peer: Endpoint
    port: int
    inode: int
    silent: float
    sent: int
    received: int
    waiting: int
    round_trip: float
    cookie: int = 0


def arrivals() -> int:
    """Count the TCP connections that have come to this network namespace. Raises `OSError`.

    The kernel counts each before it lists it: see tcp_create_openreq_child in net/ipv4/tcp_minisocks.c.
    """
    _, names, counts = os.pread(_counters().fileno(), _PAGE, 0).split(b"\nTcp: ", 2)
    return int(counts.split(None, _EARLY)[names.split(None, _EARLY).index(b"PassiveOpens")])


@functools.cache
def _counters() -> IO[bytes]:
    """The file of counters, open: opening it costs more than reading it."""
    return open("/proc/net/snmp", "rb", buffering=0)  # noqa: PTH123 - open for good


def connected(ports: Ports) -> set[Endpoint]:
    """The peers of all TCP connections to these local ports; for more than `MOST` ranges as `connections`.

    With those that are being made: by TCP Fast Open they may carry data already.
    """
    return {_peer(data, position) for data, position in _connected(ports, _STATES | _COMING)}


def cookies(ports: Ports) -> dict[Endpoint, int]:
    """The peers as in `connected`, each with the cookie of its socket; 0 for a peer with several."""
    found: dict[Endpoint, int] = {}
    for data, position in _connected(ports, _STATES | _COMING):
        peer, (cookie,) = _peer(data, position), _COOKIE.unpack_from(data, position + 60)
        found[peer] = 0 if peer in found else cookie
    return found


def connections(ports: Ports) -> list[Connection]:
    """All TCP connections to these local ports; for more than `MOST` ranges, also to the ports between them."""
    return [
        Connection(_peer(data, position), _port(data, position), _COOKIE.unpack_from(data, position + 60)[0])
        for data, position in _connected(ports)
    ]


def flows(ports: Ports, peers: Collection[Endpoint]) -> list[Flow]:
    """The connections of these peers to these local ports.

    Without those that their process has closed, which the kernel keeps for minutes if the peer does not answer.
    """
    if len(peers) <= PICKED:
        picked = {int.from_bytes(peer[-2:]) for peer in peers}
        program = _program([range(port, port + 1) for port in picked], _PEER)
    else:
        program = _program(ports)
    return [flow for flow in _flows(program, peers) if at(flow.port, ports)] if peers else []


def unread(ports: Ports, inodes: Container[int]) -> int:
    """Count the bytes at these sockets, with these local ports, that their process has not read."""
    found = 0
    for data, position in _messages(_program(ports), _STATES):
        if _INODE.unpack_from(data, position + 84)[0] in inodes:
            found += _WAITING.unpack_from(data, position + 72)[0]
    return found


def listening(ports: Container[int]) -> dict[int, int]:
    """Select the ports with a TCP listener; return how many connections wait to be accepted at each."""
    found: dict[int, int] = {}
    for data, position in _messages(_program([_ANY]), _LISTENING):
        if (port := _port(data, position)) in ports:
            found[port] = found.get(port, 0) + _WAITING.unpack_from(data, position + 72)[0]
    return found


def listeners(ports: Ports) -> dict[int, list[int]]:
    """By port: the inodes of its TCP listeners, of any process."""
    found: dict[int, list[int]] = {}
    for data, position in _messages(_program(ports), _LISTENING):
        if at(port := _port(data, position), ports):
            found.setdefault(port, []).append(_INODE.unpack_from(data, position + 84)[0])
    return found


def _program(ports: Ports, of: tuple[int, int] = _OWN) -> bytes:
    """A filter that passes sockets by local port, or by the peer's (`of`); for more than `MOST` ranges any port."""
    begin, end = of
    ports = ports if len(ports) <= MOST else [_ANY]
    left, program = _RANGE * len(ports) + _STEP.size, b""
    for some in ports:
        program += _STEP.pack(begin, 8, _RANGE) + _STEP.pack(0, 0, some.start)
        program += _STEP.pack(end, 8, _REST) + _STEP.pack(0, 0, some.stop - 1)
        program += _STEP.pack(_GO, 4, left - 16)
        left -= _RANGE
    return program + _STEP.pack(_GO, 4, 8)


def _connected(ports: Ports, states: int = _STATES) -> Iterator[tuple[bytes, int]]:
    if len(ports) > MOST:
        ports = [range(min(some.start for some in ports), max(some.stop for some in ports))]
    return _messages(_program(ports), states)


def _peer(data: bytes, position: int) -> Endpoint:
    end = 44 if data[position + 16] == socket.AF_INET else 56
    return plain(data[position + 40 : position + end]) + data[position + 22 : position + 24]


def _port(data: bytes, position: int) -> int:
    return int.from_bytes(data[position + 20 : position + 22])


def _flows(program: bytes, peers: Collection[Endpoint]) -> Iterator[Flow]:
    for data, position in _messages(program, _STATES, _ASK_INFO):
        peer = _peer(data, position)
        (inode,) = _INODE.unpack_from(data, position + 84)
        info = _info(data, position) if inode and peer in peers else None
        if info is None:
            continue
        sent_ago, data_ago, heard_ago, acked, received, waiting, trip = _MOVED.unpack_from(data, info)
        yield Flow(
            peer,
            _port(data, position),
            inode,
            min(data_ago, max(sent_ago, heard_ago)) / 1e3,
            acked,
            received,
            waiting,
            trip / 1e6 if trip < _UNKNOWN else 0.0,
            _COOKIE.unpack_from(data, position + 60)[0],
        )


def _info(data: bytes, position: int) -> int | None:
    """The offset of the tcp_info in a message; None if it is missing or too short."""
    (size,) = _SIZE_OF.unpack_from(data, position)
    at, end = position + _ATTRIBUTES, position + size
    while at < end:
        length, kind = _ATTRIBUTE.unpack_from(data, at)
        if kind == _INFO:
            return at + _ATTRIBUTE.size if length >= _ATTRIBUTE.size + _MOVED.size else None
        at += (length + 3) & ~3
    return None


def _messages(program: bytes, states: int, besides: int = 0) -> Iterator[tuple[bytes, int]]:
    """Request sockets in these states that pass the program. Yields for each the data, and its message's offset."""
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_SOCK_DIAG) as kernel:
        body = _ASK.pack(besides, states) + _ATTRIBUTE.pack(_ATTRIBUTE.size + len(program), _BYTECODE) + program
        kernel.send(_HEADER.pack(_HEADER.size + len(body), _TCP_CONNECTIONS, _REQUEST_DUMP, 1, 0) + body)
        while True:
            data = kernel.recv(_SIZE)
            position = 0
            while position < len(data):
                size, kind = _KIND.unpack_from(data, position)
                if kind == _DONE:
                    return
                if kind == _ERROR:
                    fault = int.from_bytes(data[position + 16 : position + 20], sys.byteorder, signed=True)
                    raise OSError(-fault, "sock_diag")
                yield data, position
                position += (size + 3) & ~3
