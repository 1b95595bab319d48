"""Duplicates of cores' sockets that the node holds, and the keeper with it, and their form for the next node.

The kernel's order of the listeners of an address changes when the last duplicate of one is closed. The keeper closes
first: so that moment is when the node closes its own, and a node that dies changes no order.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping

from drivers.sockets.listeners import look
from drivers.sockets.reuseport import Address
from drivers.sockets.sock_diag import Ports
from node.contract.keeper import Keeper
from protos import handover_pb2
from protos.handover_pb2 import Sharing


class Unsteerable(Exception):
    """New connections cannot be steered from one process to another. The text says why."""


class HeldSocket(socket.socket):
    """A socket that the keeper holds, too, by this name, until it is closed here."""

    def __init__(self, descriptor: int, keeper: Keeper, name: str, number: int) -> None:
        super().__init__(fileno=descriptor)
        self._keeper, self._name, self.number = keeper, name, number

    def close(self) -> None:
        if self.fileno() >= 0:
            self._keeper.drop([self._name])
        super().close()


class Shelf:
    """The held sockets of one kind of core, by number; `name` is that kind's."""

    def __init__(self, keeper: Keeper, name: str) -> None:
        self._keeper = keeper
        self._name = name
        self._last = 0

    def hold(self, one: socket.socket) -> HeldSocket:
        """Hold a socket, in place of that object. Raises `OSError`."""
        self._last += 1
        name = self._named(self._last)
        self._keeper.put(name, [one.fileno()])
        return HeldSocket(one.detach(), self._keeper, name, self._last)

    def hold_of(self, pid: int, ports: Ports, kind: socket.SocketKind) -> list[HeldSocket]:
        """Hold duplicates of a process's sockets at these ports. Raises `Unsteerable` and `OSError`."""
        seen, found = look(pid, ports, kind)
        held: list[HeldSocket] = []
        try:
            if seen.obstacles:
                raise Unsteerable("; ".join(seen.obstacles))
            for one in found:
                held.append(self.hold(one))  # noqa: PERF401 - those held before an error are closed
        except (Unsteerable, OSError):
            for one in (*held, *found):
                one.close()
            raise
        return held

    def take(self, sharing: Sharing) -> Mapping[int, socket.socket]:
        """The sockets in a message that an earlier node has left, by number, without those that it has closed since."""
        found: dict[int, socket.socket] = {}
        for number in _numbers(sharing):
            self._last = max(self._last, number)
            for descriptor in self._keeper.take(self._named(number)):
                found[number] = HeldSocket(descriptor, self._keeper, self._named(number), number)
        return found

    def store(self, sharing: Sharing) -> None:
        """Keep this message for the next node. Raises `OSError`."""
        memory = os.memfd_create("txnode-sharing", os.MFD_CLOEXEC)
        try:
            os.write(memory, sharing.SerializeToString())
            self._keeper.put(self._name, [memory])
        finally:
            os.close(memory)

    def stored(self) -> Sharing:
        """The message that an earlier node has kept; an empty one without it."""
        found = Sharing()
        for memory in self._keeper.take(self._name):
            with os.fdopen(memory, "rb") as file:
                found.ParseFromString(os.pread(memory, os.fstat(file.fileno()).st_size, 0))
        return found

    def _named(self, number: int) -> str:
        return f"{self._name}/{number}"


def packed(address: Address) -> handover_pb2.Address:
    return handover_pb2.Address(**address._asdict())


def unpacked(address: handover_pb2.Address) -> Address:
    return Address(address.family, address.host, address.port, address.only, address.interface)


def member(pid: int, one: socket.socket, order: int = 0, ended: bool = False) -> handover_pb2.Member:
    number = one.number if isinstance(one, HeldSocket) else 0
    return handover_pb2.Member(pid=pid, number=number, order=order, ended=ended)


def _numbers(sharing: Sharing) -> Iterator[int]:
    for group in (*sharing.streams, *sharing.datagrams):
        yield from (each.number for each in group.members)
    for spot in sharing.sessions:
        yield from (other.number for other in spot.others)
