"""Steer new TCP connections, and stateless datagrams, to one of the processes at an address. Linux only, blocking.

Existing connections stay, and the processes notice nothing. The kernel picks listeners by their order in a group
(drivers.sockets.reuseport), which changes when one is closed. So the node holds a duplicate of each listener: the order
changes only when the node closes one, which it does only where that does not move the listener that gets connections.

The index of a UDP socket cannot be probed by a connection. It follows from the order in which sockets were bound, as
long as the kernel lists no other socket at the address.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from drivers.sockets import held
from drivers.sockets.held import Shelf, Unsteerable
from drivers.sockets.reuseport import (
    NO_INDEX,
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
from drivers.sockets.sock_diag import Ports, at
from protos import handover_pb2

_TABLES = {socket.AF_INET: Path("/proc/net/udp"), socket.AF_INET6: Path("/proc/net/udp6")}
# Where no program answers (the port `discard`).
_NOBODY = {socket.AF_INET: ("127.0.0.1", 9), socket.AF_INET6: ("::1", 9)}
# The columns of a table with a socket's address and its inode.
_LOCAL, _INODE = 1, 9
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

    def renew(self, member: Member, listener: socket.socket) -> None:
        """Put a process's new listener, the last to be opened, in place of its old one. Raises `Unsteerable`.

        The process has closed the old one; connections that reached it since are reset, also those that are not
        established yet. So it is closed here, too, at once: also if that moves the one that gets connections.
        """
        leads, fresh = self.members[self.current] is member, Member(member.pid, listener, member.order)
        try:
            self.admit(fresh)
        except Unsteerable:
            fresh.alive = False  # it keeps its place, and another may be renewed
            raise
        if leads:
            self.steer(self.members.index(fresh))
        index, last = self.members.index(member), len(self.members) - 1
        if self.current == last:
            # First, or connections would go to any. Those that come in between are reset, too.
            pick(listener, index)
            self.current = index
        self._close(index)

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


@dataclass
class Steering:
    """Processes that listen on the same addresses, and which of them gets new connections. One call at a time.

    From its `join` to its `leave` a process must not open or close a listener itself, but to `renew` it.
    """

    # The kind of the sockets, and of their groups.
    kind: ClassVar[socket.SocketKind] = socket.SOCK_STREAM
    group: ClassVar[type[Group]] = Group

    _shelf: Shelf
    _groups: dict[Address, Group] = field(default_factory=dict)
    _joined: int = 0

    def join(self, pid: int, ports: Ports) -> None:
        """Add a process with its listeners at these ports, once all are open.

        The first process gets all connections, later ones none until `steer`. So the running process must join before
        the next one is started. Raises `Unsteerable`: for the first process nothing has changed then; a later one must
        be ended, and has to `leave`.
        """
        first = not self._groups
        listeners = self._shelf.hold_of(pid, ports, self.kind)
        self._joined += 1
        try:
            while listeners:
                self._take(Member(pid, listeners.pop(), self._joined))
        except Unsteerable:
            if first:
                self.detach()
            raise
        finally:
            for listener in listeners:
                listener.close()

    def renew(self, pid: int, ports: Ports) -> None:
        """Take over the listeners that a process has opened at these ports in place of those that it had.

        No other process may have opened one there meanwhile. Raises `Unsteerable`.
        """
        # Elsewhere the process may have sockets that cannot be shared, such as those of its own datagrams.
        ours = [port for port in self.ports if at(port.start, ports)]
        opened = self._shelf.hold_of(pid, ours, self.kind) if ours else []
        try:
            while opened:
                listener = opened.pop()
                group = self._groups.get(address_of(listener))
                index = group.find(pid) if group else None
                if group is None:
                    listener.close()
                elif index is None:
                    # The node before was killed when it had closed the old one.
                    group.admit(Member(pid, listener, self._joined))
                elif os.path.sameopenfile(listener.fileno(), group.members[index].listener.fileno()):
                    listener.close()
                else:
                    group.renew(group.members[index], listener)
        finally:
            for listener in opened:
                listener.close()

    def steer(self, pid: int) -> None:
        """Steer all new connections of the addresses on which this process listens to it. Raises `Unsteerable`."""
        for group, index in self._of(pid):
            try:
                group.steer(index)
            except OSError as error:
                raise Unsteerable(f"{group.address}: {error.strerror}") from error

    def knock(self, pid: int) -> None:
        """Connect once to each of the process's listeners; steering stays as it is. Raises `Unsteerable`.

        The process has accepted the connections when none is `waiting`. It may log a line about each.
        """
        for group, index in self._of(pid):
            group.expect(group.members[index], index, group.current, knock)

    def waiting(self, pid: int) -> Mapping[Address, int]:
        """By address: how many established connections the process has not accepted."""
        return {group.address: waiting(group.members[index].listener) for group, index in self._of(pid)}

    @property
    def ports(self) -> Ports:
        """The ports of all addresses."""
        return [range(address.port, address.port + 1) for address in self._groups]

    def missing(self, pid: int) -> frozenset[Address]:
        """The addresses on which others listen and this process does not."""
        return frozenset(self._groups) - {group.address for group, _ in self._of(pid)}

    def deafen(self, addresses: Collection[Address], deaf: bool = True) -> None:
        """Drop new connections at these addresses, or stop that. Existing connections continue."""
        for member in (member for address in addresses for member in self._groups[address].members):
            if member.alive:
                deafen(member.listener, deaf)

    def leave(self, pid: int) -> int:
        """Remove a process that has exited; new connections go to the newest of the others.

        Returns how many connections it had not accepted; they are reset.
        """
        lost = 0
        for group, index in list(self._of(pid)):
            lost += group.leave(index)
            if not group.members:
                del self._groups[group.address]
        return lost

    def close(self) -> None:
        """Close all duplicates. A single process gets all connections; among several the kernel picks."""
        for group in self._groups.values():
            group.release()
        self._groups.clear()

    def detach(self) -> None:
        """Stop steering, so that new connections are spread over all listeners, and close all duplicates."""
        for group in self._groups.values():
            group.release(by_hash=True)
        self._groups.clear()

    def packed(self) -> list[handover_pb2.Group]:
        """Pack everything for the next node process, which inherits the descriptors."""
        return [
            handover_pb2.Group(
                address=held.packed(group.address),
                members=[
                    held.member(member.pid, member.listener, member.order, not member.alive) for member in group.members
                ],
                current=group.current,
            )
            for group in self._groups.values()
        ]

    def unpack(self, groups: Iterable[handover_pb2.Group], sockets: Mapping[int, socket.socket]) -> None:
        """Restore what an earlier node process packed. It may have closed some of the sockets since."""
        for each in groups:
            order = list(each.members)
            for index in reversed(range(len(order))):
                if order[index].number not in sockets:
                    # As in the kernel the last one has moved into the gap.
                    last = order.pop()
                    if index < len(order):
                        order[index] = last
            if order:
                members = [Member(one.pid, sockets[one.number], one.order, not one.ended) for one in order]
                address = held.unpacked(each.address)
                group = self._groups[address] = self.group(address, members)
                group.current = min(each.current, len(members) - 1)
                self._joined = max(self._joined, *(member.order for member in members))

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
            self._groups[address] = self.group(address, [member])
            self._groups[address].begin()


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
