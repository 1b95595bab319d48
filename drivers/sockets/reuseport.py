"""Which of the sockets that share an address the kernel gives a new TCP connection to: set it, and find it out.

Sockets that listen on one address with SO_REUSEPORT are a group, to the kernel an array: listen(2) appends, close(2)
moves the last one into the gap (net/core/sock_reuseport.c). A program of classic BPF, attached by any of them, picks by
index for all; an index out of range means by hash, as without a program. The kernel tells nobody an index, but one can
be tried: by a connection of our own, which the program knows by its source port, while all others go where they went.
Linux only, blocking.
"""

from __future__ import annotations

import ctypes
import re
import socket
import struct
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

# Of include/uapi/asm-generic/socket.h.
_SO_ATTACH_REUSEPORT_CBPF, _SO_DETACH_REUSEPORT_BPF = 51, 68
SO_BINDTOIFINDEX = 62
# What Python does not name: Linux' own options of sockets, and where a listener's tcp_info has its accept queue.
_IPV6_V6ONLY, _IPV6_MINHOPCOUNT, _IP_MINTTL = 26, 73, 21
_QUEUE, _QUEUE_AT, _TCP_INFO_SIZE = struct.Struct("=I"), 24, 104

# Where our own connections come from, so that they can be told apart in what a core writes.
KNOCKER = "127.84.88.78"
# … as a core names them: `from` there, or as the far end of a socket.
_KNOCK = re.compile(rf"(?: from:? (?:tcp:)?|->)\[?(?:::ffff:)?{re.escape(KNOCKER)}\]?:\d+")
# Closed with it, a connection is reset (SO_LINGER).
RESET = struct.pack("ii", 1, 0)
# More hops than any packet has left that came by a router, and than nearly all of this machine's own have.
_TOO_MANY_HOPS = 255
# The index that no socket of a group has.
NOBODY = 0xFFFFFFFF
# Seconds for an answer over the loopback, which takes some microseconds on a machine that is not overloaded.
_PATIENCE = 3.0
# The largest segment that a listener we look for says it takes (TCP_MAXSEG), and no other does: a client that meets it
# meanwhile loses 1 % of an Ethernet frame. And what is read where nobody has set one, which zero restores.
_MARK, _UNSET = 1439, 536
# What of each segment the time that is written into it takes.
_TIMESTAMPS = 12
# Packets of the loopback come from the interface that is the first in every network namespace.
_LOOPBACK = 1

# bpf(4), linux/filter.h: instructions, and where the IP header and what belongs to a packet begin.
Instruction = tuple[int, int, int, int]
_LOAD_WORD, _LOAD_HALF, _LOAD_BYTE, _GO, _GO_IF_EQUAL, _RETURN = 0x20, 0x28, 0x30, 0x05, 0x15, 0x06
_IP_HEADER, _INTERFACE = 0xFFF00000, 0xFFFFF000 + 8


class Address(NamedTuple):
    """What sockets of a group have in common."""

    family: int
    host: str
    port: int
    # Only IPv6, where IPv4 would come by the same socket; the interface, if it is bound to one.
    only: bool
    interface: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def is_of_knock(line: str) -> bool:
    """Whether a core's line tells of a connection of our own."""
    return KNOCKER in line and _KNOCK.search(line) is not None


def address_of(one: socket.socket) -> Address:
    host, port = one.getsockname()[:2]
    only = one.family == socket.AF_INET6 and bool(one.getsockopt(socket.IPPROTO_IPV6, _IPV6_V6ONLY))
    return Address(one.family, host, port, only, one.getsockopt(socket.SOL_SOCKET, SO_BINDTOIFINDEX))


def pick(member: socket.socket, index: int) -> None:
    """Have all new connections of the group given to one of it. Raises `OSError`."""
    attach(member, [(_RETURN, 0, 0, index)])


def pick_by_hash(member: socket.socket) -> None:
    """Have new connections spread over the group, as they are where nobody picks. Raises `OSError`."""
    with suppress(FileNotFoundError):  # nobody did
        member.setsockopt(socket.SOL_SOCKET, _SO_DETACH_REUSEPORT_BPF, 0)


def waiting(listener: socket.socket) -> int:
    """Connections that are established and that its process has not accepted yet."""
    info = listener.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_SIZE)
    (queue,) = _QUEUE.unpack_from(info, _QUEUE_AT)
    return int(queue)


def deafen(listener: socket.socket, deaf: bool = True) -> None:
    """Have the kernel drop who knocks, or no more: whoever does knocks again a second later. It takes no capability."""
    least = _TOO_MANY_HOPS if deaf else 0
    listener.setsockopt(socket.IPPROTO_IP, _IP_MINTTL, least)
    if listener.family == socket.AF_INET6:
        listener.setsockopt(socket.IPPROTO_IPV6, _IPV6_MINHOPCOUNT, least)


def is_at(listener: socket.socket, index: int, others: int) -> bool:
    """Whether this one of a group has this index; new connections go to `others` meanwhile, and later.

    It is asked by a connection of our own. If it has, its process does not hear of that; who else has the index, gets a
    connection that is over at once. Any may be found at an index out of range.
    Raises `OSError`, `TimeoutError` among them if nobody answers.
    """
    # A connection that nothing is said on is not handed to the process; reset, it is forgotten. Clients speak first.
    was = listener.getsockopt(socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT, 1)
    try:
        return knock(listener, index, others)
    finally:
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT, was)


def knock(listener: socket.socket, index: int, others: int) -> bool:
    """The same, but its process gets the connection, which comes from `KNOCKER`, unless it is for IPv6 alone."""
    was = listener.getsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG)
    source, target = way(listener)
    with socket.socket(listener.family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        probe.settimeout(_PATIENCE)
        _be_heard(probe)
        probe.bind(source)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, _MARK)
        try:
            attach(listener, by_source(probe.getsockname()[1], index, others))
            # Who hangs up before we look has accepted. What it said of segments stays known.
            with suppress(ConnectionResetError):
                probe.connect(target)
            return probe.getsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG) in (_MARK, _MARK - _TIMESTAMPS)
        finally:
            pick(listener, others)
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, 0 if was == _UNSET else was)


def _be_heard(probe: socket.socket) -> None:
    """By a listener that is deaf, too."""
    probe.setsockopt(socket.IPPROTO_IP, socket.IP_TTL, _TOO_MANY_HOPS)
    if probe.family == socket.AF_INET6:
        probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_UNICAST_HOPS, _TOO_MANY_HOPS)


def way(listener: socket.socket) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """From where a connection of ours reaches this listener, and by which address."""
    name: tuple[Any, ...] = listener.getsockname()
    host, rest = name[0], name[1:]
    if listener.family == socket.AF_INET:
        return (KNOCKER, 0), ("127.0.0.1" if host == "0.0.0.0" else host, *rest)  # noqa: S104 - compared
    if host != "::":
        return ("::", 0), name
    if listener.getsockopt(socket.IPPROTO_IPV6, _IPV6_V6ONLY):
        return ("::", 0), ("::1", *rest)
    return (f"::ffff:{KNOCKER}", 0), ("::ffff:127.0.0.1", *rest)


def by_source(port: int, index: int, others: int) -> list[Instruction]:
    """Picks one for what comes over the loopback from this port, another for all else."""
    return [
        (_LOAD_WORD, 0, 0, _INTERFACE),
        (_GO_IF_EQUAL, 0, 7, _LOOPBACK),
        # IPv4 has its ports behind a header of 20 bytes, IPv6 of 40.
        (_LOAD_BYTE, 0, 0, _IP_HEADER),
        (_GO_IF_EQUAL, 0, 2, 0x45),
        (_LOAD_HALF, 0, 0, _IP_HEADER + 20),
        (_GO, 0, 0, 1),
        (_LOAD_HALF, 0, 0, _IP_HEADER + 40),
        (_GO_IF_EQUAL, 0, 1, port),
        (_RETURN, 0, 0, index),
        (_RETURN, 0, 0, others),
    ]


def attach(member: socket.socket, program: Sequence[Instruction], option: int = _SO_ATTACH_REUSEPORT_CBPF) -> None:
    """Have the kernel run a program for this socket, by default to pick one of its group. Raises `OSError`."""
    code = ctypes.create_string_buffer(b"".join(struct.pack("@HBBI", *instruction) for instruction in program))
    value = struct.pack("@HP", len(program), ctypes.addressof(code))
    member.setsockopt(socket.SOL_SOCKET, option, value)
