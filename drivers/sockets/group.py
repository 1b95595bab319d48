"""A SO_REUSEPORT group: the listeners of one address in the kernel's order, and which gets new connections. Linux only.

The node holds a duplicate of each listener (see `held`): so the order changes only when the node closes one, and it
does so only where that does not move the listener that gets connections.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from drivers.sockets.connections import Ports
from drivers.sockets.held import Shelf
from drivers.sockets.listeners import look
from drivers.sockets.reuseport import NO_INDEX, RESET, Address, deafen, is_at, pick, pick_by_hash


class Unsteerable(Exception):
    """New connections cannot be steered from one process to another. The text says why."""


def held_sockets(shelf: Shelf, pid: int, ports: Ports, kind: socket.SocketKind) -> list[socket.socket]:
    """Duplicates of a process's sockets at these ports, held by the keeper, too. Raises `Unsteerable` and `OSError`."""
    seen, found = look(pid, ports, kind)
    if seen.obstacles:
        for one in found:
            one.close()
        raise Unsteerable("; ".join(seen.obstacles))
    return shelf.hold_all(found)


# Probes whether a listener has an index (the first number); all other connections go to the second index meanwhile.
Way = Callable[[socket.socket, int, int], bool]


@dataclass
class Member:
    pid: int
    listener: socket.socket
    # Higher for a process that joined later.
    order: int
    alive: bool = True


@dataclass
class Group:
    """The listeners on one address, in the kernel's order."""

    address: Address
    members: list[Member]
    current: int = 0

    @property
    def listener(self) -> socket.socket:
        """Any listener: programs set by one apply to the group."""
        return self.members[0].listener

    def find(self, pid: int) -> int | None:
        mine = [index for index, member in enumerate(self.members) if member.alive and member.pid == pid]
        return mine[0] if mine else None

    def expect(self, member: Member, index: int, others: int, way: Way = is_at) -> None:
        """Check that a member has this index. Raises `Unsteerable` if not."""
        if not self.has(member, index, others, way):
            raise Unsteerable(f"another process also listens on port {self.address.port}")

    def has(self, member: Member, index: int, others: int, way: Way = is_at) -> bool:
        try:
            return way(member.listener, index, others)
        except OSError as error:
            reason = error.strerror or str(error)
            raise Unsteerable(f"{self.address} cannot be reached by the node itself: {reason}") from error

    def begin(self) -> None:
        """Check that the first listener is alone, and have it get all connections from now on."""
        # A lone listener is found at any index: at 0 by the program, at 1 by hash.
        for index in range(2):
            self.expect(self.members[0], index, NO_INDEX)
        pick(self.listener, 0)

    def admit(self, member: Member) -> None:
        self.members.append(member)
        self.expect(member, len(self.members) - 1, self.current)
        self.tidy()

    def steer(self, index: int) -> None:
        pick(self.listener, index)
        self.current = index

    def leave(self, index: int) -> int:
        """Mark a listener's process as gone and reset the connections that it had not accepted. Returns how many.

        Its place is kept until the next process has joined: that may listen already, and would be moved there.
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
        """Close the listeners of gone processes, unless that would move the one that gets connections."""
        while dead := [index for index, member in enumerate(self.members) if not member.alive]:
            last = len(self.members) - 1
            # With just one other left, that gets all connections at any index.
            if self.current == last and self.members[last].alive and last > 1:
                return
            self._close(dead[-1])

    def release(self, *, by_hash: bool = False) -> None:
        """Close all duplicates. A single live listener gets index 0 picked, and keeps it when another one joins."""
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
        """Close a member; as in the kernel the last one moves into the gap."""
        last = self.members.pop()
        if index < len(self.members):
            last, self.members[index] = self.members[index], last
        last.listener.close()
        if len(self.members) == 1:
            self.current = 0
            pick(self.listener, 0)


def _empty(listener: socket.socket) -> int:
    """Accept and reset all waiting connections. Returns how many."""
    count = 0
    listener.setblocking(False)
    with suppress(OSError):  # none is left
        while True:
            connection, _ = listener.accept()
            with connection:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            count += 1
    return count
