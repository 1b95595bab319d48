"""Who is connected to ports of this machine, asked of the kernel in one go (sock_diag(7)).

No capability is needed for asking; a network namespace is its own machine.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator

from drivers.sockets import Endpoint, Ports, plain

# include/uapi/linux/{netlink,sock_diag,inet_diag}.h
_NETLINK_SOCK_DIAG = 4
_BY_FAMILY = 20
_DONE, _ERROR = 3, 2
_REQUEST_DUMP = 0x301
# Established, and those of which one side has said its last word.
_STATES = 1 << 1 | 1 << 4 | 1 << 5 | 1 << 8
_HEADER = struct.Struct("=IHHII")
# Family, protocol, states; then what must be equal: nothing.
_ASK = struct.Struct("=BBBxI48x")
# Size and kind of what follows.
_ATTRIBUTE = struct.Struct("=HH")
_BYTECODE = 1
# Family; then, 6 bytes in, their port as it travels, our address and theirs.
_FOUND = struct.Struct("=B5x2s16s16s")
_SIZE = 256 * 1024

# The kernel's filter is a program: what is asked, and how far to go on if it is so, and if it is not. What comes to
# the program's very end passes, what goes beyond it does not (inet_diag_bc_run in net/ipv4/inet_diag.c).
_STEP = struct.Struct("=BBH")
_GO, _OWN_PORT_FROM, _OWN_PORT_UP_TO = 1, 2, 3
# Bytes of the program for one range, and the same from its second question on.
_RANGE, _REST = 20, 12
# Ranges that a program has room for.
MOST = 3000


def connected(ports: Ports) -> set[Endpoint]:
    """The peers of all TCP connections to these ports of this machine; for thousands of ranges, to all between them.

    Raises `OSError` if the kernel does not say.
    """
    if len(ports) > MOST:
        ports = [range(min(some.start for some in ports), max(some.stop for some in ports))]
    program = _program(ports)
    return {peer for family in (socket.AF_INET, socket.AF_INET6) for peer in _dump(family, program)}


def _program(ports: Ports) -> bytes:
    """Lets those pass whose own port is one of these."""
    left, program = _RANGE * len(ports) + _STEP.size, b""
    for some in ports:
        program += _STEP.pack(_OWN_PORT_FROM, 8, _RANGE) + _STEP.pack(0, 0, some.start)
        program += _STEP.pack(_OWN_PORT_UP_TO, 8, _REST) + _STEP.pack(0, 0, some.stop - 1)
        program += _STEP.pack(_GO, 4, left - 16)
        left -= _RANGE
    return program + _STEP.pack(_GO, 4, 8)


def _dump(family: int, program: bytes) -> Iterator[Endpoint]:
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_SOCK_DIAG) as kernel:
        body = _ASK.pack(family, socket.IPPROTO_TCP, 0, _STATES)
        body += _ATTRIBUTE.pack(_ATTRIBUTE.size + len(program), _BYTECODE) + program
        kernel.send(_HEADER.pack(_HEADER.size + len(body), _BY_FAMILY, _REQUEST_DUMP, 1, 0) + body)
        while True:
            data = kernel.recv(_SIZE)
            for kind, payload in _messages(data):
                if kind == _DONE:
                    return
                if kind == _ERROR:
                    raise OSError(-int.from_bytes(payload[:4], "little", signed=True), "sock_diag")
                yield _peer(payload)


def _messages(data: bytes) -> Iterator[tuple[int, bytes]]:
    position = 0
    while position < len(data):
        size, kind, *_ = _HEADER.unpack_from(data, position)
        yield kind, data[position + _HEADER.size : position + size]
        position += (size + 3) & ~3


def _peer(payload: bytes) -> Endpoint:
    family: int
    port: bytes
    address: bytes
    family, port, _, address = _FOUND.unpack_from(payload)
    return (address[:4] if family == socket.AF_INET else plain(address)) + port
