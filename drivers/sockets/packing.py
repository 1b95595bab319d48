"""Pack the held sockets for the next node process, which inherits the descriptors."""

from __future__ import annotations

import socket
from collections.abc import Iterable

from drivers.sockets.reuseport import Address
from protos import handover_pb2
from protos.handover_pb2 import Sharing


def packed(address: Address) -> handover_pb2.Address:
    return handover_pb2.Address(**address._asdict())


def unpacked(address: handover_pb2.Address) -> Address:
    return Address(address.family, address.host, address.port, address.only, address.interface)


def member(pid: int, one: socket.socket, order: int = 0, ended: bool = False) -> handover_pb2.Member:
    return handover_pb2.Member(pid=pid, descriptor=one.fileno(), order=order, ended=ended)


def descriptors(sharing: Sharing) -> list[int]:
    """All descriptors in a message."""
    grouped = (each for groups in (sharing.streams, sharing.datagrams) for group in groups for each in group.members)
    return [each.descriptor for each in (*grouped, *(other for spot in sharing.sessions for other in spot.others))]


def sockets(numbers: Iterable[int]) -> dict[int, socket.socket]:
    """The sockets of these descriptors. Raises `OSError`; then the descriptors stay open, for the way back."""
    found: dict[int, socket.socket] = {}
    try:
        for number in numbers:
            found[number] = socket.socket(fileno=number)
    except OSError:
        for one in found.values():
            one.detach()
        raise
    return found
