"""Move UDP clients with sessions from one process to the next. Linux only, blocking.

A session belongs to one process, and a datagram does not show to which. So sessions are ended, not handed over: for a
moment all sockets at the address are hidden, the kernel answers datagrams with ICMP port unreachable, and clients start
new sessions, with the next process.

A hidden socket is bound to an interface that does not exist, so it receives nothing; its process notices nothing. It
takes no capability. connect(2) would also hide it, but an IPv6 socket does not fully recover from that.
"""

from __future__ import annotations

import errno
import socket
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from drivers.sockets import held
from drivers.sockets.connections import disconnect
from drivers.sockets.held import Shelf, Unsteerable
from drivers.sockets.reuseport import SO_BINDTOIFINDEX, Address, address_of, pick
from drivers.sockets.sock_diag import Ports
from drivers.sockets.steering import crowd
from protos.handover_pb2 import Reach, Sharing, Spot

# Seconds without a socket at the address; an active client sends something in this time.
DARK = 0.3
# A hidden socket's interface is this number less its former one, from which the next node process restores it.
_NO_INTERFACE, _INTERFACES = 0x7FFFFFFF, 0x40000000


@dataclass
class Place:
    """One address: the process with the visible socket (`current`), and duplicates of the hidden ones of `others`.

    No duplicate of the visible socket is kept: when its process dies, clients get port unreachable at once.
    """

    address: Address
    current: int | None = None
    others: dict[int, socket.socket] = field(default_factory=dict)

    def __contains__(self, pid: int) -> bool:
        return pid == self.current or pid in self.others

    def admit(self, pid: int, one: socket.socket) -> None:
        self.others[pid] = one
        if crowd(one) > len(self.others) + (self.current is not None):
            raise Unsteerable(f"another process also receives UDP on port {self.address.port}")
        if self.current is None:
            self.hold(pid)
        else:
            hide(one)

    def hold(self, pid: int) -> None:
        """Keep this process's socket the visible one, even if others join the address."""
        try:
            _hold(self.others[pid], self.address)
        finally:
            self._settle(pid)

    def darken(self) -> None:
        self.current = None
        for one in self.others.values():
            hide(one)

    def lighten(self, pid: int) -> None:
        show(self.others[pid], self.address.interface)
        self._settle(pid)

    def leave(self, pid: int) -> None:
        if pid == self.current:
            self.current = None
        else:
            self.others.pop(pid).close()

    def close(self) -> None:
        for one in self.others.values():
            one.close()

    def _settle(self, pid: int) -> None:
        self.others.pop(pid).close()
        self.current = pid


class Sessions:
    """Processes at the same UDP addresses, and which of them clients reach. One call at a time."""

    def __init__(self, shelf: Shelf) -> None:
        self._shelf = shelf
        self._places: dict[Address, Place] = {}
        self._ports: dict[int, Ports] = {}

    def join(self, pid: int, ports: Ports) -> None:
        """Add a process with its sockets at these ports. Until `lead`, clients reach it only where no other is.

        Raises `Unsteerable`; then the process has to `leave`.
        """
        self._ports[pid] = ports
        found = self._shelf.hold_of(pid, ports, socket.SOCK_DGRAM)
        try:
            while found:
                one = found.pop()
                self._places.setdefault(address_of(one), Place(address_of(one))).admit(pid, one)
        finally:
            for one in found:
                one.close()

    def settle(self) -> None:
        """Find out which sockets are visible: the node that left them may have been killed while it moved clients.

        Raises `Unsteerable` and `OSError`.
        """
        for place in self._taken(self._places.values()):
            before, place.current = place.current, None
            for pid, one in list(place.others.items()):
                if pid != before:
                    hide(one)
                elif not is_hidden(one):
                    place.hold(pid)

    def hold(self, pid: int) -> None:
        """Keep clients with this process where they reach it, when the next one binds. Raises `Unsteerable`."""
        for place in self._taken(place for place in self._places.values() if place.current == pid):
            if pid in place.others:
                place.hold(pid)

    def lead(self, pid: int) -> None:
        """End all sessions, and have clients reach this process, or none at addresses that it does not have.

        Raises `Unsteerable` and `OSError`.
        """
        heirs = [(place, pid if pid in place else None) for place in self._places.values()]
        moving = self._taken(place for place, heir in heirs if place.current != heir)
        coming = [place for place in moving if pid in place.others]
        try:
            for place in moving:
                place.darken()
            if coming:
                time.sleep(DARK)
        finally:
            for place in coming:
                place.lighten(pid)

    def silence(self, pid: int) -> None:
        """Hide all sockets at this process's addresses, where all are about to exit. Raises as `lead`."""
        for place in self._taken(place for place in self._places.values() if pid in place):
            place.darken()

    def leave(self, pid: int) -> None:
        """Remove a process that has exited. Clients who reached it reach none, until `lead`."""
        for place in self._places.values():
            if pid in place:
                place.leave(pid)
        self._places = {address: place for address, place in self._places.items() if place.current or place.others}
        self._ports.pop(pid, None)

    def close(self) -> None:
        for place in self._places.values():
            place.close()
        self._places.clear()
        self._ports.clear()

    def pack(self, sharing: Sharing) -> None:
        """Pack everything for the next node process, which inherits the descriptors."""
        for place in self._places.values():
            others = [held.member(pid, one) for pid, one in place.others.items()]
            sharing.sessions.append(Spot(address=held.packed(place.address), current=place.current, others=others))
        for pid, ports in self._ports.items():
            first, end = [some.start for some in ports], [some.stop for some in ports]
            sharing.reaches.append(Reach(pid=pid, first=first, end=end))

    def unpack(self, sharing: Sharing, sockets: Mapping[int, socket.socket]) -> None:
        """Restore what an earlier node process packed."""
        for spot in sharing.sessions:
            others = {other.pid: sockets[other.number] for other in spot.others if other.number in sockets}
            address, current = held.unpacked(spot.address), spot.current if spot.HasField("current") else None
            self._places[address] = Place(address, current, others)
        for reach in sharing.reaches:
            self._ports[reach.pid] = list(map(range, reach.first, reach.end))

    def _taken(self, places: Iterable[Place]) -> list[Place]:
        """Add duplicates of the visible sockets at these places, if their process lives. Raises `Unsteerable`."""
        taken = {place.address: place for place in places}
        for pid in {place.current for place in taken.values() if place.current is not None}:
            for one in self._shelf.hold_of(pid, self._ports[pid], socket.SOCK_DGRAM):
                place = taken.get(address_of(one))
                if place is not None and place.current == pid:
                    place.others[pid] = one
                else:
                    one.close()
        return list(taken.values())


def _hold(one: socket.socket, address: Address) -> None:
    """Have this socket get all datagrams even if others join its address. Raises `Unsteerable`.

    A socket that was hidden is in no group, so no program can be attached. Another socket at its address makes a group
    of both: here one of our own, for some microseconds in which it may take a datagram or two.
    """
    try:
        try:
            pick(one, 0)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            with _twin(one, address):
                pick(one, 0)
    except OSError as error:
        raise Unsteerable(f"new clients at {address} cannot be kept with the current core: {error.strerror}") from error


def _twin(one: socket.socket, address: Address) -> socket.socket:
    twin = socket.socket(one.family, socket.SOCK_DGRAM)
    try:
        twin.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        twin.setsockopt(socket.SOL_SOCKET, SO_BINDTOIFINDEX, address.interface)
        if one.family == socket.AF_INET6:
            twin.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, address.only)
        twin.bind(one.getsockname())
    except OSError:
        twin.close()
        raise
    return twin


def hide(one: socket.socket) -> None:
    """Hide a socket. It also leaves its SO_REUSEPORT group, as it changes its place in the kernel. Raises `OSError`."""
    if is_hidden(one):
        return
    if interface := one.getsockopt(socket.SOL_SOCKET, SO_BINDTOIFINDEX):
        # Without a capability only a socket bound to no interface can be bound to one.
        disconnect(one.fileno())
    one.setsockopt(socket.SOL_SOCKET, SO_BINDTOIFINDEX, _NO_INTERFACE - interface)


def show(one: socket.socket, interface: int) -> None:
    """Show a socket again, in no group, bound to its former `interface`. Raises `OSError`."""
    disconnect(one.fileno())
    one.setsockopt(socket.SOL_SOCKET, SO_BINDTOIFINDEX, interface)


def is_hidden(one: socket.socket) -> bool:
    return one.getsockopt(socket.SOL_SOCKET, SO_BINDTOIFINDEX) > _INTERFACES
