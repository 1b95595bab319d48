"""Which of the sockets that share an address datagrams go to, found out by some that no process hears. Linux only.

They come from a port of our own, where the kernel drops them behind the choice of the socket (SO_ATTACH_FILTER), and it
counts what it drops at each (SO_MEMINFO).
"""

from __future__ import annotations

import errno
import socket
import struct
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from drivers.sockets.reuseport import Instruction, attach, by_source, pick, way

# Of include/uapi/asm-generic/socket.h, and where sock_diag.h has SK_MEMINFO_DROPS.
_SO_ATTACH_FILTER, _SO_DETACH_FILTER, _SO_MEMINFO = 26, 27, 55
_MEMORY, _DROPS = struct.Struct("=9I"), 8
# Datagrams to a socket: a busy one drops a few of others meanwhile.
_MANY = 16
# A filter sees a datagram from its UDP header on, which begins with the source port; it says how many bytes may pass.
_LOAD_HALF, _GO_IF_EQUAL, _RETURN, _ALL = 0x28, 0x15, 0x06, 0xFFFFFFFF


class Unheard:
    """Between `open` and `close` these sockets do not hear of what is sent to find out. Raises `OSError`."""

    def __init__(self, sockets: Sequence[socket.socket]) -> None:
        self._sockets = sockets
        source, self._target = way(sockets[0])
        self._probe = socket.socket(sockets[0].family, socket.SOCK_DGRAM)
        self._probe.bind(source)

    def open(self) -> None:
        program = _dropping(self._port)
        for one in self._sockets:
            attach(one, program, _SO_ATTACH_FILTER)

    def close(self) -> None:
        for one in self._sockets:
            with suppress(OSError):  # it had none yet
                one.setsockopt(socket.SOL_SOCKET, _SO_DETACH_FILTER, 0)
        self._probe.close()

    def goes_to(self, one: socket.socket, index: int, others: int) -> bool:
        """Whether this socket has this index; what others send goes to `others` meanwhile, and later."""
        if self._drops(one, self._probe.getsockname()) >= _MANY:
            raise OSError(errno.EBUSY, "it drops so many datagrams that it cannot be seen which")
        try:
            attach(one, by_source(self._port, index, others))
            return self._drops(one, self._target) >= _MANY
        finally:
            pick(one, others)

    def _drops(self, one: socket.socket, target: tuple[Any, ...]) -> int:
        """How many it drops while we send some there. On the loopback they have arrived at once."""
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
