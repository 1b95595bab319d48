"""Keep new clients from a process for a moment, while its connections continue. Linux only, blocking.

A filter (SO_ATTACH_FILTER) drops packets to its listeners, and its datagrams. A client whose first packet is dropped
sends it again after 1 s, or after 0.2 s if the handshake had begun. `reuseport.deafen` would not do: a connection
established meanwhile inherits its options and stays deaf. It takes no capability.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import suppress

from drivers.sockets.connections import Ports, at, duplicates, listens
from drivers.sockets.listeners import takes_datagrams
from drivers.sockets.reuseport import SO_ATTACH_FILTER, SO_DETACH_FILTER, attach, waiting

# A program that lets no byte of any packet pass.
_RETURN = 0x06
_DROP = [(_RETURN, 0, 0, 0)]


class Hush:
    """Between `begin` and `end` no new client reaches these ports of a process. One call at a time."""

    def __init__(self, pid: int, ports: Ports) -> None:
        self._pid, self._ports = pid, ports
        self._sockets: list[socket.socket] = []

    def begin(self) -> None:
        """Attach the filters. Raises `Unreachable` and `OSError`; some may be attached then, until `end`."""
        for one in _hearing(self._pid, self._ports):
            self._sockets.append(one)
            attach(one, _DROP, SO_ATTACH_FILTER)

    def waiting(self) -> int:
        """How many connections the process has not accepted yet; none are added."""
        return sum(waiting(one) for one in self._sockets if one.type == socket.SOCK_STREAM)

    @property
    def datagrams(self) -> bool:
        """Whether the ports include UDP sockets, where unread datagrams may be left."""
        return any(one.type == socket.SOCK_DGRAM for one in self._sockets)

    def end(self) -> None:
        """Let clients through again."""
        while self._sockets:
            with self._sockets.pop() as one:
                _open(one)


def unhush(pid: int, ports: Ports) -> None:
    """Remove the filters of a node that was killed between `begin` and `end`. Raises `Unreachable`."""
    for one in _hearing(pid, ports):
        with one:
            _open(one)


def _hearing(pid: int, ports: Ports) -> Iterator[socket.socket]:
    """Duplicates of the sockets that new clients reach, for the caller to close."""
    for duplicate in duplicates(pid):
        one = socket.socket(fileno=os.dup(duplicate))
        if (listens(one) or takes_datagrams(one)) and at(one.getsockname()[1], ports):
            yield one
        else:
            one.close()


def _open(one: socket.socket) -> None:
    with suppress(OSError):  # it has no filter
        one.setsockopt(socket.SOL_SOCKET, SO_DETACH_FILTER, 0)
