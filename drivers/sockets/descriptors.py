"""Find sockets of a child process by inode, with a cache of their numbers, and reset them. Linux only, blocking.

A search through some thousand sockets takes some 50 ms; the kernel's list of connections and a socket of known number
less than 1 ms. A duplicate refers to the same socket. None is ever kept: while one exists, the child's close does not
reach its peer.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress

from drivers.sockets.connections import Endpoint, Ports, at, cut
from drivers.sockets.pidfd import getfd, numbers, opened
from drivers.sockets.sock_diag import flows
from drivers.sockets.udp_hide import disconnect


class Descriptors:
    """The socket descriptors of one process, by the inodes that the kernel's lists of connections have."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        # Descriptor numbers by inode; a number may have another socket by now.
        self._numbers: dict[int, int] = {}

    def taken(self, inodes: Collection[int]) -> Iterator[tuple[int, int]]:
        """Each of these sockets with a duplicate of it, which is open until the next one.

        Closed sockets are left out. Raises `Unreachable`.
        """
        with opened(self._pid) as process:
            if not inodes or process is None:
                return
            fresh = not self._numbers.keys() >= {*inodes}
            if fresh:
                self._look()
            missed: list[int] = []
            yield from self._each(process, inodes, missed)
            if missed and not fresh:
                self._look()
                yield from self._each(process, missed, [])

    def reset(self, inodes: Collection[int]) -> set[int]:
        """Reset these TCP connections. Returns those that existed. Raises `Unreachable`."""
        ended = set()
        for inode, duplicate in self.taken(inodes):
            with suppress(OSError):  # closed meanwhile
                disconnect(duplicate)
            ended.add(inode)
        return ended

    def end(self, wanted: Mapping[Endpoint, Ports]) -> set[Endpoint]:
        """Reset the process's TCP connections to these peers, at the local ports given for each.

        Returns the peers. Those that are connected but not found by number are searched for. Raises `Unreachable`.
        """
        try:
            found = flows([some for ports in wanted.values() for some in ports], wanted.keys())
        except OSError:
            return cut(self._pid, wanted)
        inodes = {flow.inode: flow.peer for flow in found if at(flow.port, wanted[flow.peer])}
        ended = {inodes[inode] for inode in self.reset(inodes)}
        missed = {peer: wanted[peer] for peer in inodes.values() if peer not in ended}
        return ended | cut(self._pid, missed) if missed else ended

    def _each(self, process: int, inodes: Collection[int], missed: list[int]) -> Iterator[tuple[int, int]]:
        """As `taken`; inodes whose number has another socket by now go to `missed`."""
        for inode in inodes:
            number = self._numbers.get(inode)
            duplicate = None if number is None else getfd(process, number)
            try:
                if duplicate is not None and os.fstat(duplicate).st_ino == inode:
                    yield inode, duplicate
                elif number is not None:
                    missed.append(inode)
            finally:
                if duplicate is not None:
                    os.close(duplicate)

    def _look(self) -> None:
        """Read all numbers again: those of closed sockets are reused."""
        # In one assignment, since several threads may read it.
        self._numbers = dict(numbers(self._pid))
