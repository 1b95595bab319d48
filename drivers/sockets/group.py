"""The sockets that listen on one address, in the kernel's order, and to which of them new connections go. Linux only.

A duplicate of each listener is held here: nothing changes but by us, and a process that ends leaves a gap only where
that moves nobody who is given connections.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass

from drivers.sockets.reuseport import NOBODY, RESET, Address, deafen, is_at, knock, pick, pick_by_hash


class Unsteerable(Exception):
    """New connections cannot be led from one process to another. The text says why."""


# Finds out by a connection whether a listener has an index, where all others go to the second one.
Way = Callable[[socket.socket, int, int], bool]


@dataclass
class Member:
    pid: int
    listener: socket.socket
    # A process that joined later has more.
    order: int
    alive: bool = True


@dataclass
class Group:
    """Who listens on one address, in the kernel's order."""

    address: Address
    members: list[Member]
    current: int = 0

    @property
    def listener(self) -> socket.socket:
        """Any of them: what is set by one holds for all."""
        return self.members[0].listener

    def find(self, pid: int) -> int | None:
        mine = [index for index, member in enumerate(self.members) if member.alive and member.pid == pid]
        return mine[0] if mine else None

    def expect(self, member: Member, index: int, others: int, way: Way = is_at) -> None:
        """Make sure that it has this index."""
        if not self.has(member, index, others, way):
            raise Unsteerable(f"another process, too, listens on port {self.address.port}")

    def has(self, member: Member, index: int, others: int, way: Way = is_at) -> bool:
        try:
            return way(member.listener, index, others)
        except OSError as error:
            reason = error.strerror or str(error)
            raise Unsteerable(f"{self.address} cannot be reached by the node itself: {reason}") from error

    def begin(self) -> None:
        """Make sure that the first one is alone, and keep those who come from being given connections."""
        # Alone it is found at whichever index: at zero really, at the next one by hash.
        for index in range(2):
            self.expect(self.members[0], index, NOBODY)
        pick(self.listener, 0)

    def admit(self, member: Member) -> None:
        self.members.append(member)
        self.expect(member, len(self.members) - 1, self.current)
        self.tidy()

    def find_order(self, led: int) -> None:
        """Find out in which order the kernel has them, whom a node steered that is gone, and lead to this one.

        Or to the newest, if it is not there. Mostly the first guess is right, and new connections go on to whom they
        went; else some may go elsewhere for a moment.
        """
        # Who is connected to meanwhile is not to wait.
        self._find_order(led, knock, is_at)

    def _find_order(self, led: int, first: Way, way: Way) -> None:
        if len(self.members) == 1:
            self.begin()
            return
        found: dict[int, Member] = {}
        # The newest is most often the last, too.
        for member in sorted(self.members, key=lambda member: (member.pid != led, -member.order)):
            index = self._index_of(member, found, way if found else first)
            if not found:
                self.steer(index)
            found[index] = member
        self.members = [found[index] for index in sorted(found)]

    def _index_of(self, member: Member, found: Collection[int], way: Way) -> int:
        for index in reversed(range(len(self.members))):
            if index not in found and self.has(member, index, self.current if found else index, way):
                return index
        raise Unsteerable(f"another process, too, listens on port {self.address.port}")

    def steer(self, index: int) -> None:
        pick(self.listener, index)
        self.current = index

    def leave(self, index: int) -> int:
        """Tell clients that were connected to it and not accepted, by a reset. Returns how many.

        Its place is kept until the next one has joined: that may listen already, and the kernel would move it there.
        """
        member = self.members[index]
        member.alive = False
        deafen(member.listener)
        lost = _empty(member.listener)
        heirs = [place for place, other in enumerate(self.members) if other.alive]
        if index == self.current and heirs:
            self.steer(max(heirs, key=lambda place: self.members[place].order))
        if not heirs:
            self.tidy()
        return lost

    def tidy(self) -> None:
        """Close listeners of processes that are gone, as far as nobody who is given connections has to move for it."""
        while dead := [index for index, member in enumerate(self.members) if not member.alive]:
            last = len(self.members) - 1
            # With one other left, it is given all connections at whichever index.
            if self.current == last and self.members[last].alive and last > 1:
                return
            self._close(dead[-1])

    def release(self, *, by_hash: bool = False) -> None:
        """Let go of all of them. One who is alone then has index zero, and keeps it when another one comes."""
        alive = [member for member in self.members if member.alive]
        for member in self.members:
            if not member.alive:
                member.listener.close()
        if alive and by_hash:
            pick_by_hash(alive[0].listener)
        elif len(alive) == 1:
            pick(alive[0].listener, 0)
        for member in alive:
            member.listener.close()

    def _close(self, index: int) -> None:
        """As the kernel does it: the last one moves into the gap."""
        last = self.members.pop()
        if index < len(self.members):
            last, self.members[index] = self.members[index], last
        last.listener.close()
        if len(self.members) == 1:
            self.current = 0
            pick(self.listener, 0)


def _empty(listener: socket.socket) -> int:
    """Reset all connections that a process which is gone has not accepted."""
    count = 0
    listener.setblocking(False)
    with suppress(OSError):  # none is left
        while True:
            connection, _ = listener.accept()
            with connection:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            count += 1
    return count
