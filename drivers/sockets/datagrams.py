"""Leads UDP to one of the processes that share an address, where each datagram stands for itself. Linux only, blocking.

Who has an index cannot be tried by a connection: it follows from the order in which sockets were bound, as long as the
kernel lists no other one at the address.
"""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from pathlib import Path

from drivers.sockets.connections import Ports
from drivers.sockets.group import Group, Member, Unsteerable
from drivers.sockets.listeners import Survey, look
from drivers.sockets.reuseport import Address, pick
from drivers.sockets.steering import Steering
from drivers.sockets.unheard import Unheard

_TABLES = {socket.AF_INET: Path("/proc/net/udp"), socket.AF_INET6: Path("/proc/net/udp6")}
# Where nobody is (the port `discard`).
_NOBODY = {socket.AF_INET: ("127.0.0.1", 9), socket.AF_INET6: ("::1", 9)}
# Where a table has the address of a socket, and its inode.
_LOCAL, _INODE = 1, 9


class Datagrams(Steering):
    """Processes that take datagrams at the same addresses, and which of them is given new ones."""

    def silence(self, pid: int) -> None:
        """Have the kernel refuse whatever comes to where this process is, as all there are about to end.

        A socket that is connected takes only what comes from the other end. It is in no group any more.
        """
        for group, _ in list(self._of(pid)):
            for member in group.members:
                with member.listener as one, suppress(OSError):  # an address from where there is no way to this one
                    one.connect(_NOBODY[one.family])
            del self._groups[group.address]

    def _look(self, pid: int, ports: Ports) -> tuple[Survey, list[socket.socket]]:
        return look(pid, ports, socket.SOCK_DGRAM)

    def _new_group(self, address: Address, members: list[Member]) -> Group:
        return _Group(address, members)


class _Group(Group):
    def begin(self) -> None:
        self._expect_no_other()
        pick(self.listener, 0)

    def admit(self, member: Member) -> None:
        self.members.append(member)
        self._expect_no_other()
        self.tidy()

    def find_order(self, led: int) -> None:
        self._expect_no_other()
        unheard = Unheard([member.listener for member in self.members])
        try:
            unheard.open()
            self._find_order(led, unheard.goes_to, unheard.goes_to)
        except OSError as error:
            raise Unsteerable(f"{self.address}: {error.strerror}") from error
        finally:
            unheard.close()

    def _expect_no_other(self) -> None:
        if crowd(self.listener) != len(self.members):
            raise Unsteerable(f"another process, too, takes datagrams on port {self.address.port}")


def crowd(one: socket.socket) -> int:
    """How many sockets there are at its address, whoever has them.

    The kernel's table is read in pieces, and tells of one twice when others come meanwhile.
    """
    inode = str(os.fstat(one.fileno()).st_ino)
    rows = [row.split() for row in _TABLES[socket.AddressFamily(one.family)].read_text().splitlines()[1:]]
    local = next((row[_LOCAL] for row in rows if row[_INODE] == inode), "")
    return len({row[_INODE] for row in rows if row[_LOCAL] == local})
