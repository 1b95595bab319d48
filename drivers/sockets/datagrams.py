"""Steer UDP to one of the processes that share an address, for stateless datagrams. Linux only, blocking.

A socket's index in its group cannot be probed by a connection. It follows from the order in which sockets were bound,
as long as the kernel lists no other socket at the address.
"""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from pathlib import Path

from drivers.sockets.group import Group, Member, Unsteerable
from drivers.sockets.reuseport import pick
from drivers.sockets.steering import Steering

_TABLES = {socket.AF_INET: Path("/proc/net/udp"), socket.AF_INET6: Path("/proc/net/udp6")}
# Where no program answers (the port `discard`).
_NOBODY = {socket.AF_INET: ("127.0.0.1", 9), socket.AF_INET6: ("::1", 9)}
# The columns of a table with a socket's address and its inode.
_LOCAL, _INODE = 1, 9


class _Group(Group):
    def begin(self) -> None:
        self._expect_no_other()
        pick(self.listener, 0)

    def admit(self, member: Member) -> None:
        self.members.append(member)
        self._expect_no_other()
        self.tidy()

    def _expect_no_other(self) -> None:
        if crowd(self.listener) != len(self.members):
            raise Unsteerable(f"another process also receives UDP on port {self.address.port}")


class Datagrams(Steering):
    """Processes that receive datagrams at the same addresses, and which of them gets new ones."""

    kind, group = socket.SOCK_DGRAM, _Group

    def silence(self, pid: int) -> None:
        """Have the kernel refuse datagrams at this process's addresses, where all processes are about to exit.

        A connected socket takes only datagrams from its peer, and leaves its group.
        """
        for group, _ in list(self._of(pid)):
            for member in group.members:
                with member.listener as one, suppress(OSError):  # no route from this address
                    one.connect(_NOBODY[one.family])
            del self._groups[group.address]


def crowd(one: socket.socket) -> int:
    """Count the sockets of all processes at this socket's address.

    The kernel's table is read in pieces, and lists a socket twice if others are bound meanwhile.
    """
    inode = str(os.fstat(one.fileno()).st_ino)
    rows = [row.split() for row in _TABLES[socket.AddressFamily(one.family)].read_text().splitlines()[1:]]
    local = next((row[_LOCAL] for row in rows if row[_INODE] == inode), "")
    return len({row[_INODE] for row in rows if row[_LOCAL] == local})
