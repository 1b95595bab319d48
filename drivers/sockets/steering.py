"""Leads the new TCP connections of the addresses that several processes listen on to one of them. Linux only, blocking.

Connections that a process has stay with it, and no process is told. The kernel knows who listens by their order
(drivers.sockets.reuseport), which changes as they come and go. So a duplicate of each listener is held here: nothing
changes but by us, and a process that ends leaves a gap only where that moves nobody who is given connections.
"""

from __future__ import annotations

import socket
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from drivers.sockets import left
from drivers.sockets.connections import Ports
from drivers.sockets.group import Group, Member, Unsteerable
from drivers.sockets.listeners import Survey, look
from drivers.sockets.reuseport import Address, address_of, deafen, knock, waiting
from protos import handover_pb2


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

    def regain(self, places: Mapping[int, Ports], led: int) -> None:
        """Take up processes, oldest first, that a node which is gone steered, and lead to this one of them.

        Raises `Unsteerable`; then all of it is to be closed.
        """
        for pid, ports in places.items():
            seen, listeners = self._look(pid, ports)
            self._joined += 1
            for listener in listeners:
                address = address_of(listener)
                group = self._groups.setdefault(address, self._new_group(address, []))
                group.members.append(Member(pid, listener, self._joined))
            if seen.obstacles:
                raise Unsteerable("; ".join(seen.obstacles))
        for group in self._groups.values():
            group.find_order(led)

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
