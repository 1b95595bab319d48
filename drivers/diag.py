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
# Family, protocol, states; then what must be equal: our port, or 0 for any.
_ASK = struct.Struct("=BBBxIH46x")
# Family; then, 4 bytes in, our port and theirs as they travel, our address and theirs.
_FOUND = struct.Struct("=B3xH2s16s16s")
_SIZE = 256 * 1024
# Ports that are asked for one by one; for more the kernel lists everything.
FEW = 16


def connected(ports: Ports) -> set[Endpoint]:
    """The peers of all TCP connections to these ports of this machine. Raises `OSError` if the kernel does not say."""
    few = sum(map(len, ports)) <= FEW
    asked = sorted({port for some in ports for port in some}) if few else [0]
    return {
        peer
        for family in (socket.AF_INET, socket.AF_INET6)
        for one in asked
        for port, peer in _dump(family, one)
        if any(port in some for some in ports)
    }


def _dump(family: int, port: int) -> Iterator[tuple[int, Endpoint]]:
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_SOCK_DIAG) as kernel:
        body = _ASK.pack(family, socket.IPPROTO_TCP, 0, _STATES, socket.htons(port))
        kernel.send(_HEADER.pack(_HEADER.size + len(body), _BY_FAMILY, _REQUEST_DUMP, 1, 0) + body)
        while True:
            data = kernel.recv(_SIZE)
            for kind, payload in _messages(data):
                if kind == _DONE:
                    return
                if kind == _ERROR:
                    raise OSError(-int.from_bytes(payload[:4], "little", signed=True), "sock_diag")
                yield _connection(payload)


def _messages(data: bytes) -> Iterator[tuple[int, bytes]]:
    position = 0
    while position < len(data):
        size, kind, *_ = _HEADER.unpack_from(data, position)
        yield kind, data[position + _HEADER.size : position + size]
        position += (size + 3) & ~3


def _connection(payload: bytes) -> tuple[int, Endpoint]:
    family, port, peer_port, _, peer = _FOUND.unpack_from(payload)
    address = peer[:4] if family == socket.AF_INET else plain(peer)
    return socket.ntohs(port), address + peer_port
