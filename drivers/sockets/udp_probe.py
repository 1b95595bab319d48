"""Probe the order of the UDP sockets that share an address, with datagrams that no process receives. Linux only.

The probes come from a port of our own. The kernel drops them after it has chosen a socket (SO_ATTACH_FILTER), and
counts the drops of each socket (SO_MEMINFO).
"""

from __future__ import annotations

import errno
import socket
import struct
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from drivers.sockets.reuseport import SO_ATTACH_FILTER, SO_DETACH_FILTER, Instruction, attach, by_source, pick, way

# From include/uapi/asm-generic/socket.h, and the index SK_MEMINFO_DROPS from sock_diag.h.
_SO_MEMINFO = 55
_MEMORY, _DROPS = struct.Struct("=9I"), 8
# Probes per socket: a busy socket drops some datagrams of clients meanwhile.
_MANY = 16
# A filter sees a datagram from its UDP header on, which begins with the source port, and returns how many bytes pass.
_LOAD_HALF, _GO_IF_EQUAL, _RETURN, _ALL = 0x28, 0x15, 0x06, 0xFFFFFFFF


class UdpProbe:
    """Probes these sockets; between `open` and `close` they drop the probes. Raises `OSError`."""

    def __init__(self, sockets: Sequence[socket.socket]) -> None:
        self._sockets = sockets
        source, self._target = way(sockets[0])
        self._probe = socket.socket(sockets[0].family, socket.SOCK_DGRAM)
        self._probe.bind(source)

    def open(self) -> None:
        program = _dropping(self._port)
        for one in self._sockets:
            attach(one, program, SO_ATTACH_FILTER)

    def close(self) -> None:
        for one in self._sockets:
            with suppress(OSError):  # it has no filter yet
                one.setsockopt(socket.SOL_SOCKET, SO_DETACH_FILTER, 0)
        self._probe.close()

    def goes_to(self, one: socket.socket, index: int, others: int) -> bool:
        """Probe whether a socket has this index; datagrams of clients go to the index `others`."""
        if self._drops(one, self._probe.getsockname()) >= _MANY:
            raise OSError(errno.EBUSY, "the socket drops so many datagrams that probes cannot be counted")
        try:
            attach(one, by_source(self._port, index, others))
            return self._drops(one, self._target) >= _MANY
        finally:
            pick(one, others)

    def _drops(self, one: socket.socket, target: tuple[Any, ...]) -> int:
        """Send probes and count the socket's drops. Over the loopback probes arrive at once."""
        before = _dropped(one)
        for _ in range(_MANY):
            self._probe.sendto(b"", target)
        return _dropped(one) - before

    @property
    def _port(self) -> int:
        return int(self._probe.getsockname()[1])


def _dropping(port: int) -> Sequence[Instruction]:
    return [(_LOAD_HALF, 0, 0, 0), (_GO_IF_EQUAL, 0, 1, port), (_RETURN, 0, 0, 0), (_RETURN, 0, 0, _ALL)]


def _dropped(one: socket.socket) -> int:
    memory = one.getsockopt(socket.SOL_SOCKET, _SO_MEMINFO, _MEMORY.size)
    return int(_MEMORY.unpack(memory)[_DROPS])
