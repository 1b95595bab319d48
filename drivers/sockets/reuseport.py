"""Choose which socket of a SO_REUSEPORT group gets new TCP connections, and probe the order of a group.

Sockets that listen on one address with SO_REUSEPORT are a group, which the kernel keeps as an array: listen(2) appends,
close(2) moves the last one into the gap (net/core/sock_reuseport.c). A classic BPF program, attached by any of them,
picks by index for all; an index out of range means by hash, as without a program. The kernel does not report an index,
but one can be probed: by a connection of our own, which the program recognises by its source port, while all others go
where they went before. Linux only, blocking.
"""

from __future__ import annotations

import ctypes
import re
import socket
import struct
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

# From include/uapi/asm-generic/socket.h.
_SO_ATTACH_REUSEPORT_CBPF, _SO_DETACH_REUSEPORT_BPF = 51, 68
SO_BINDTOIFINDEX = 62
# Names that Python lacks: socket options of Linux, and the offset of the accept queue in a listener's tcp_info.
_IPV6_V6ONLY, _IPV6_MINHOPCOUNT, _IP_MINTTL = 26, 73, 21
_QUEUE, _QUEUE_AT, _TCP_INFO_SIZE = struct.Struct("=I"), 24, 104

# The source address of our own connections, so that they can be recognised in a core's log lines, …
KNOCKER = "127.84.88.78"
# … in which a core prints it after `from`, or as the remote end of a socket.
_KNOCK = re.compile(rf"(?: from:? (?:tcp:)?|->)\[?(?:::ffff:)?{re.escape(KNOCKER)}\]?:\d+")
# With this SO_LINGER, close(2) resets a connection.
RESET = struct.pack("ii", 1, 0)
# A higher TTL than any packet has that came through a router, and than nearly all local ones have.
_TOO_MANY_HOPS = 255
# An index that no socket of a group has.
NO_INDEX = 0xFFFFFFFF
# Seconds to wait for a connection over the loopback, which takes microseconds unless the machine is overloaded.
_PATIENCE = 3.0
# The TCP_MAXSEG that marks the listener we probe, where segments are not smaller anyhow; a client that connects
# meanwhile loses 1 % of an Ethernet frame. And the value that the kernel returns for an unset one, which 0 restores.
_MARK, _UNSET = 1439, 536
# The bytes of each segment that the timestamps option takes.
_TIMESTAMPS = 12
# The index of the loopback interface, the same in every network namespace.
_LOOPBACK = 1

# bpf(4), linux/filter.h: instructions, and the offsets of the IP header and of a packet's metadata.
Instruction = tuple[int, int, int, int]
_LOAD_WORD, _LOAD_HALF, _LOAD_BYTE, _GO, _GO_IF_EQUAL, _RETURN = 0x20, 0x28, 0x30, 0x05, 0x15, 0x06
_IP_HEADER, _INTERFACE = 0xFFF00000, 0xFFFFF000 + 8


class Address(NamedTuple):
    """The address of a group of sockets."""

    family: int
    host: str
    port: int
    # Whether an IPv6 socket takes no IPv4; the index of the interface that it is bound to, or 0.
    only: bool
    interface: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def is_of_knock(line: str) -> bool:
    """Whether a core's log line is about a connection of our own."""
    return KNOCKER in line and _KNOCK.search(line) is not None


def address_of(one: socket.socket) -> Address:
    host, port = one.getsockname()[:2]
    only = one.family == socket.AF_INET6 and bool(one.getsockopt(socket.IPPROTO_IPV6, _IPV6_V6ONLY))
    return Address(one.family, host, port, only, one.getsockopt(socket.SOL_SOCKET, SO_BINDTOIFINDEX))


def pick(member: socket.socket, index: int) -> None:
    """Steer all new connections of the group to the socket with this index. Raises `OSError`."""
    attach(member, [(_RETURN, 0, 0, index)])


def pick_by_hash(member: socket.socket) -> None:
    """Detach the program: new connections are spread over the group by hash. Raises `OSError`."""
    with suppress(FileNotFoundError):  # there is no program
        member.setsockopt(socket.SOL_SOCKET, _SO_DETACH_REUSEPORT_BPF, 0)


def waiting(listener: socket.socket) -> int:
    """Count the established connections that the process has not accepted yet."""
    info = listener.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_SIZE)
    (queue,) = _QUEUE.unpack_from(info, _QUEUE_AT)
    return int(queue)


def deafen(listener: socket.socket, deaf: bool = True) -> None:
    """Have the kernel drop packets of new clients, who try again after 1 s, or stop that. It takes no capability."""
    least = _TOO_MANY_HOPS if deaf else 0
    listener.setsockopt(socket.IPPROTO_IP, _IP_MINTTL, least)
    if listener.family == socket.AF_INET6:
        listener.setsockopt(socket.IPPROTO_IPV6, _IPV6_MINHOPCOUNT, least)


def is_at(listener: socket.socket, index: int, others: int) -> bool:
    """Probe whether a listener has this index in its group; other new connections go to the index `others`.

    The probe is a connection of our own. The listener's process does not see it; if another listener has the index, its
    process gets a connection that is reset at once. With an index out of range any listener may be found.
    Raises `OSError`, with `TimeoutError` if there is no answer.
    """
    # With TCP_DEFER_ACCEPT the process gets only connections with data, which clients of proxies send first; the probe
    # sends none, and the reset discards it.
    was = listener.getsockopt(socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT, 1)
    try:
        return knock(listener, index, others)
    finally:
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT, was)


def knock(listener: socket.socket, index: int, others: int) -> bool:
    """As `is_at`, but the process gets the connection. It comes from `KNOCKER`, except to IPv6-only listeners."""
    mark = _MARK
    seen = _segment(listener, index, others, mark)
    if seen < mark - _TIMESTAMPS:
        # MTU probing, a loopback with a small MTU or small buffers: another knock, with a smaller mark.
        mark = seen - 2 * _TIMESTAMPS
        seen = _segment(listener, index, others, mark)
    return seen in (mark, mark - _TIMESTAMPS)


def _segment(listener: socket.socket, index: int, others: int, mark: int) -> int:
    """The most bytes of a segment that a knock at the index may send, while the listener has this TCP_MAXSEG."""
    was = listener.getsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG)
    source, target = way(listener)
    with socket.socket(listener.family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        probe.settimeout(_PATIENCE)
        # So that a listener that `deafen` made deaf gets it, too.
        probe.setsockopt(socket.IPPROTO_IP, socket.IP_TTL, _TOO_MANY_HOPS)
        if probe.family == socket.AF_INET6:
            probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_UNICAST_HOPS, _TOO_MANY_HOPS)
        probe.bind(source)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, mark)
        try:
            attach(listener, by_source(probe.getsockname()[1], index, others))
            # A reset before we look means accepted; TCP_MAXSEG stays readable.
            with suppress(ConnectionResetError):
                probe.connect(target)
            return probe.getsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG)
        finally:
            pick(listener, others)
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, 0 if was == _UNSET else was)


def way(listener: socket.socket) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """The source and target addresses for a connection of ours to this listener."""
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
    """A program that picks `index` for packets over the loopback from this port, and `others` for all else."""
    return [
        (_LOAD_WORD, 0, 0, _INTERFACE),
        (_GO_IF_EQUAL, 0, 7, _LOOPBACK),
        # The ports follow an IPv4 header of 20 bytes or an IPv6 one of 40.
        (_LOAD_BYTE, 0, 0, _IP_HEADER),
        (_GO_IF_EQUAL, 0, 2, 0x45),
        (_LOAD_HALF, 0, 0, _IP_HEADER + 20),
        (_GO, 0, 0, 1),
        (_LOAD_HALF, 0, 0, _IP_HEADER + 40),
        (_GO_IF_EQUAL, 0, 1, port),
        (_RETURN, 0, 0, index),
        (_RETURN, 0, 0, others),
    ]


def attach(member: socket.socket, program: Sequence[Instruction]) -> None:
    """Attach a classic BPF program to this socket, to pick within its group. Raises `OSError`."""
    code = ctypes.create_string_buffer(b"".join(struct.pack("@HBBI", *instruction) for instruction in program))
    value = struct.pack("@HP", len(program), ctypes.addressof(code))
    member.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_REUSEPORT_CBPF, value)
