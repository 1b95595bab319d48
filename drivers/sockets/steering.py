"""Leads the new TCP connections of the addresses that several processes listen on to one of them. Linux only, blocking.

Connections that a process has stay with it, and no process is told. The kernel knows who listens by their order
(drivers.sockets.reuseport), which changes as they come and go. So a duplicate of each listener is held here: nothing
changes but by us, and a process that ends leaves a gap only where that moves nobody who is given connections.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from drivers.sockets import left
from drivers.sockets.connections import Ports
from drivers.sockets.listeners import Survey, look
from drivers.sockets.reuseport import (
    NOBODY,
    RESET,
    Address,
    address_of,
    deafen,
    is_at,
    knock,
    pick,
    pick_by_hash,
    waiting,
)
from protos import handover_pb2


class Unsteerable(Exception):
    """New connections cannot be led from one process to another. The text says why."""


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

    def expect(self, member: Member, index: int, others: int, way: Callable[[socket.socket, int, int], bool]) -> None:
        """Make sure that it has this index."""
        try:
            found = way(member.listener, index, others)
        except OSError as error:
            reason = error.strerror or str(error)
            raise Unsteerable(f"{self.address} cannot be reached by the node itself: {reason}") from error
        if not found:
            raise Unsteerable(f"another process, too, listens on port {self.address.port}")

    def begin(self) -> None:
        """Make sure that the first one is alone, and keep those who come from being given connections."""
        # Alone it is found at whichever index: at zero really, at the next one by hash.
        for index in range(2):
            self.expect(self.members[0], index, NOBODY, is_at)
        pick(self.listener, 0)

    def admit(self, member: Member) -> None:
        self.members.append(member)
        self.expect(member, len(self.members) - 1, self.current, is_at)
        self.tidy()

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


@dataclass
class Steering:
    """Processes that listen on the same addresses, and which of them is given new connections.

    From its `join` to its `leave` a process must not open or close a listener itself. One call at a time.
    """

    _groups: dict[Address, Group] = field(default_factory=dict)
    _joined: int = 0

    def join(self, pid: int, ports: Ports) -> Survey:
        """Take up a process with its listeners at these ports, when all of them are open.

        The first one is given all connections, who joins later none until `steer`, and none of them hears of this.
        So have the one join that runs before the next one is started. Raises `Unsteerable`: if it is the first one,
        nothing has happened; another one is to be ended, and then it has to `leave`.
        """
        first = not self._groups
        seen, listeners = self._look(pid, ports)
        self._joined += 1
        try:
            if seen.obstacles:
                raise Unsteerable("; ".join(seen.obstacles))
            while listeners:
                self._take(Member(pid, listeners.pop(), self._joined))
        except Unsteerable:
            if first:
                self.detach()
            raise
        finally:
            for listener in listeners:
                listener.close()
        return seen

    def steer(self, pid: int) -> None:
        """Have this process given all new connections of the addresses on which it listens."""
        for group, index in self._of(pid):
            try:
                group.steer(index)
            except OSError as error:
                raise Unsteerable(f"{group.address}: {error.strerror}") from error

    def knock(self, pid: int) -> None:
        """Connect to each of the process's listeners once, whoever is given the others. Raises `Unsteerable`.

        It has accepted the connections when nothing is `waiting` for it. It may write a line about each.
        """
        for group, index in self._of(pid):
            group.expect(group.members[index], index, group.current, knock)

    def waiting(self, pid: int) -> Mapping[Address, int]:
        """How many connections are established that the process has not accepted, on each address."""
        return {group.address: waiting(group.members[index].listener) for group, index in self._of(pid)}

    def missing(self, pid: int) -> frozenset[Address]:
        """Addresses on which others listen and this process does not: what goes there cannot be led to it."""
        return frozenset(self._groups) - {group.address for group, _ in self._of(pid)}

    def deafen(self, addresses: Collection[Address], deaf: bool = True) -> None:
        """Have the kernel drop who knocks at these addresses, or no more. Connections that are there go on."""
        for address in addresses:
            for member in self._groups[address].members:
                if member.alive:
                    deafen(member.listener, deaf)

    def leave(self, pid: int) -> int:
        """A process has ended: what it was given goes to the newest of the others.

        Returns how many connections it left that it had not accepted; they are reset.
        """
        lost = 0
        for group, index in list(self._of(pid)):
            lost += group.leave(index)
            if not group.members:
                del self._groups[group.address]
        return lost

    def close(self) -> None:
        """Let go of everything. One process that is left gets all connections, of more of them the kernel picks."""
        for group in self._groups.values():
            group.release()
        self._groups.clear()

    def detach(self) -> None:
        """Have new connections spread over all who listen, as if nobody had steered, and let go of everything."""
        for group in self._groups.values():
            group.release(by_hash=True)
        self._groups.clear()

    def packed(self) -> list[handover_pb2.Group]:
        """All of it, for the next program of the node, which has the same descriptors."""
        return [
            handover_pb2.Group(
                address=left.packed(group.address),
                members=[
                    left.member(member.pid, member.listener, member.order, not member.alive) for member in group.members
                ],
                current=group.current,
            )
            for group in self._groups.values()
        ]

    def unpack(self, groups: Iterable[handover_pb2.Group], sockets: Mapping[int, socket.socket]) -> None:
        """Go on where an earlier program ended."""
        for each in groups:
            members = [
                Member(member.pid, sockets[member.descriptor], member.order, not member.ended)
                for member in each.members
            ]
            address = left.unpacked(each.address)
            group = self._groups[address] = self._new_group(address, members)
            group.current = each.current
            self._joined = max(self._joined, *(member.order for member in members))

    def _look(self, pid: int, ports: Ports) -> tuple[Survey, list[socket.socket]]:
        return look(pid, ports, socket.SOCK_STREAM)

    def _new_group(self, address: Address, members: list[Member]) -> Group:
        return Group(address, members)

    def _of(self, pid: int) -> Iterator[tuple[Group, int]]:
        for group in self._groups.values():
            index = group.find(pid)
            if index is not None:
                yield group, index

    def _take(self, member: Member) -> None:
        address = address_of(member.listener)
        if address in self._groups:
            self._groups[address].admit(member)
        else:
            group = self._groups[address] = self._new_group(address, [member])
            group.begin()


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
