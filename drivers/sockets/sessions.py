"""Leads UDP from one process to another where clients have sessions with the one they met. Linux only, blocking.

A session is in one process, and no datagram says in which. So sessions are not handed over but ended: for a moment
nobody is at the address, which the kernel tells every client that sends something (drivers.sockets.hiding), and clients
begin anew, with the next process.
"""

from __future__ import annotations

import errno
import socket
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from drivers.sockets import left
from drivers.sockets.connections import Ports
from drivers.sockets.datagrams import crowd
from drivers.sockets.group import Unsteerable
from drivers.sockets.hiding import hide, interface_of, is_hidden, show
from drivers.sockets.listeners import look
from drivers.sockets.reuseport import SO_BINDTOIFINDEX, Address, address_of, pick
from protos.handover_pb2 import Reach, Sharing, Spot

# Seconds in which a client that is at work sends something.
DARK = 0.3


@dataclass
class Place:
    """Who is at one address. `others` are duplicates of what those have there whom clients do not find: all hidden.

    None is kept of the one whom they find: when it dies they are to be told at once.
    """

    address: Address
    current: int | None = None
    others: dict[int, socket.socket] = field(default_factory=dict)

    def __contains__(self, pid: int) -> bool:
        return pid == self.current or pid in self.others

    def admit(self, pid: int, one: socket.socket) -> None:
        self.others[pid] = one
        if crowd(one) > len(self.others) + (self.current is not None):
            raise Unsteerable(f"another process, too, takes datagrams on port {self.address.port}")
        if self.current is None:
            self.hold(pid)
        else:
            hide(one)

    def hold(self, pid: int) -> None:
        """This one is found, whoever else comes."""
        try:
            _hold(self.others[pid], self.address)
        finally:
            self._settle(pid)

    def darken(self) -> None:
        """Have clients find nobody."""
        self.current = None
        for one in self.others.values():
            hide(one)

    def lighten(self, pid: int) -> None:
        """Have clients find this one."""
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
    """Processes that are at the same addresses, and which of them clients find there. One call at a time."""

    def __init__(self) -> None:
        self._places: dict[Address, Place] = {}
        self._ports: dict[int, Ports] = {}

    def join(self, pid: int, ports: Ports) -> None:
        """Take up a process with its sockets at these ports. Clients find it only where nobody else is, until `lead`.

        Raises `Unsteerable`; then it has to `leave`.
        """
        self._ports[pid] = ports
        found = _look(pid, ports)
        try:
            while found:
                one = found.pop()
                self._places.setdefault(address_of(one), Place(address_of(one))).admit(pid, one)
        finally:
            for one in found:
                one.close()

    def regain(self, places: Mapping[int, Ports], led: int) -> None:
        """Take up processes that a node which is gone led to, and have clients find this one, or nobody.

        Raises `Unsteerable`, and `OSError`; then all of it is to be closed.
        """
        self._ports |= places
        for pid, ports in places.items():
            for one in _look(pid, ports):
                address = address_of(one)._replace(interface=interface_of(one))
                self._places.setdefault(address, Place(address)).others[pid] = one
        for place in self._places.values():
            for pid, one in list(place.others.items()):
                if pid != led:
                    hide(one)
                elif not is_hidden(one):
                    place.hold(pid)

    def hold(self, pid: int) -> None:
        """Keep the next process from being found where clients find this one. Raises `Unsteerable`."""
        for place in self._taken(place for place in self._places.values() if place.current == pid):
            if pid in place.others:
                place.hold(pid)

    def lead(self, pid: int) -> None:
        """End all sessions, and have clients find this process, or nobody where it is not.

        Raises `Unsteerable`, and `OSError`.
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
        """Have clients find nobody where this process is: all there are about to end. Raises as `lead`."""
        for place in self._taken(place for place in self._places.values() if pid in place):
            place.darken()

    def leave(self, pid: int) -> None:
        """A process has ended. Where clients found it they find nobody, until `lead`."""
        for place in self._places.values():
            if pid in place:
                place.leave(pid)
        self._places = {address: place for address, place in self._places.items() if place.current or place.others}
        self._ports.pop(pid, None)

    def close(self) -> None:
        """Let go of everything."""
        for place in self._places.values():
            place.close()
        self._places.clear()
        self._ports.clear()

    def pack(self, sharing: Sharing) -> None:
        """Note all of it, for the next program of the node, which has the same descriptors."""
        for place in self._places.values():
            others = [left.member(pid, one) for pid, one in place.others.items()]
            sharing.sessions.append(Spot(address=left.packed(place.address), current=place.current, others=others))
        for pid, ports in self._ports.items():
            first, end = [some.start for some in ports], [some.stop for some in ports]
            sharing.reaches.append(Reach(pid=pid, first=first, end=end))

    def unpack(self, sharing: Sharing, sockets: Mapping[int, socket.socket]) -> None:
        """Go on where an earlier program ended."""
        for spot in sharing.sessions:
            others = {other.pid: sockets[other.descriptor] for other in spot.others}
            address, current = left.unpacked(spot.address), spot.current if spot.HasField("current") else None
            self._places[address] = Place(address, current, others)
        for reach in sharing.reaches:
            self._ports[reach.pid] = list(map(range, reach.first, reach.end))

    def _taken(self, places: Iterable[Place]) -> list[Place]:
        """Take duplicates of those whom clients find at these places, unless they have died. Raises `Unsteerable`."""
        taken = {place.address: place for place in places}
        for pid in {place.current for place in taken.values() if place.current is not None}:
            for one in _look(pid, self._ports[pid]):
                place = taken.get(address_of(one))
                if place is not None and place.current == pid:
                    place.others[pid] = one
                else:
                    one.close()
        return list(taken.values())


def _look(pid: int, ports: Ports) -> list[socket.socket]:
    """Duplicates of what a process has at these ports, none if it has died. Raises `Unsteerable`."""
    seen, found = look(pid, ports, socket.SOCK_DGRAM)
    if seen.obstacles:
        for one in found:
            one.close()
        raise Unsteerable("; ".join(seen.obstacles))
    return found


def _hold(one: socket.socket, address: Address) -> None:
    """Have this one given everything, whoever else comes to its address. Raises `Unsteerable`.

    One that was hidden is in no group, so that nothing can be set there. The next socket at its address makes a group
    of both: here one of our own, for some microseconds, in which it may take a datagram or two.
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
        raise Unsteerable(f"{address} cannot be held by the node itself: {error.strerror}") from error


def _twin(one: socket.socket, address: Address) -> socket.socket:
    """Another socket at the same address."""
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
