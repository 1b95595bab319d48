"""Leads UDP from one process to another where clients have sessions with the one they met. Linux only, blocking.

A session is in one process, and no datagram says in which. So sessions are not handed over but ended: for a moment
nobody is at the address, which the kernel tells every client that sends something (drivers.sockets.hiding), and clients
begin anew, with the next process.
"""

from __future__ import annotations

import errno
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from drivers.sockets.connections import Ports
from drivers.sockets.datagrams import crowd
from drivers.sockets.hiding import hide, show
from drivers.sockets.listeners import look
from drivers.sockets.reuseport import SO_BINDTOIFINDEX, Address, address_of, pick
from drivers.sockets.steering import Unsteerable

# Seconds in which a client that is at work sends something.
DARK = 0.3


@dataclass
class Place:
    """What processes have at one address, by their numbers, and whom of them clients find there."""

    address: Address
    sockets: dict[int, socket.socket] = field(default_factory=dict)
    current: int | None = None

    def admit(self, pid: int, one: socket.socket) -> None:
        self.sockets[pid] = one
        if crowd(one) != len(self.sockets):
            raise Unsteerable(f"another process, too, takes datagrams on port {self.address.port}")
        if self.current is None:
            self.current = pid

    def heir(self, pid: int) -> int | None:
        """Whom clients are to find when they are led to this process."""
        return pid if pid in self.sockets else None

    def darken(self, pid: int | None = None) -> None:
        """Have clients find nobody. This one is to be next: without the one before it, it would be found already."""
        self.current = None
        for number in sorted(self.sockets, key=lambda number: number != pid):
            hide(self.sockets[number])

    def lighten(self, pid: int) -> None:
        show(self.sockets[pid], self.address.interface)
        self.current = pid

    def leave(self, pid: int) -> None:
        if self.current == pid:
            # Before its socket is gone, lest its clients find another process and are not told.
            self.darken()
        self.sockets.pop(pid).close()


class Sessions:
    """Processes that are at the same addresses, and which of them clients find there. One call at a time."""

    def __init__(self) -> None:
        self._places: dict[Address, Place] = {}

    def join(self, pid: int, ports: Ports) -> None:
        """Take up a process with its sockets at these ports. Clients find it only where nobody else is, until `lead`.

        Raises `Unsteerable`; then it has to `leave`.
        """
        seen, found = look(pid, ports, socket.SOCK_DGRAM)
        try:
            if seen.obstacles:
                raise Unsteerable("; ".join(seen.obstacles))
            while found:
                one = found.pop()
                self._places.setdefault(address_of(one), Place(address_of(one))).admit(pid, one)
        finally:
            for one in found:
                one.close()
        self.hold(pid)

    def hold(self, pid: int) -> None:
        """Keep the next process from being found where clients find this one. Raises `Unsteerable`."""
        for place in self._of(pid):
            if place.current == pid:
                _hold(place.sockets[pid], place.address)

    def lead(self, pid: int) -> None:
        """End all sessions, and have clients find this process, or nobody where it is not. Raises `OSError`."""
        moving = [place for place in self._places.values() if place.current != place.heir(pid)]
        coming = [place for place in moving if pid in place.sockets]
        try:
            for place in moving:
                place.darken(pid)
            if coming:
                time.sleep(DARK)
        finally:
            for place in coming:
                place.lighten(pid)

    def silence(self, pid: int) -> None:
        """Have clients find nobody where this process is: all there are about to end. Raises `OSError`."""
        for place in self._of(pid):
            place.darken()

    def leave(self, pid: int) -> None:
        """A process has ended. Where clients found it they find nobody, until `lead`."""
        for place in self._of(pid):
            place.leave(pid)
        self._places = {address: place for address, place in self._places.items() if place.sockets}

    def close(self) -> None:
        """Let go of everything."""
        for place in self._places.values():
            for one in place.sockets.values():
                one.close()
        self._places.clear()

    def _of(self, pid: int) -> Iterator[Place]:
        return (place for place in self._places.values() if pid in place.sockets)


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
