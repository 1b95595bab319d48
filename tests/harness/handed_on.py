"""Hand socket state over to fresh objects, as to the next node: the one before was killed, and its keeper holds all."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TypeVar

from drivers.sockets.held import Shelf
from drivers.sockets.sessions import Sessions
from drivers.sockets.sharing import Sharing
from drivers.sockets.steering import Steering
from node.base.reactor import PooledReactor
from protos import handover_pb2
from tests.harness.held_here import HeldHere

S = TypeVar("S", bound=Steering)


def shelf() -> Shelf:
    return Shelf(HeldHere(), "sharing/test")


def steering(old: S, stored: handover_pb2.Sharing | None = None) -> S:
    """The next node's steering of streams or of datagrams; `stored` may be of an earlier moment."""
    found = type(old)(old._shelf)
    packed = _read(stored or handover_pb2.Sharing(streams=old.packed()))
    lose(old)
    found.unpack(packed.streams, found._shelf.take(packed))
    return found


def sessions(old: Sessions) -> Sessions:
    packed = handover_pb2.Sharing()
    old.pack(packed)
    lose(old)
    found = Sessions(old._shelf)
    found.unpack(_read(packed), found._shelf.take(packed))
    return found


async def sharing(old: Sharing, reactor: PooledReactor) -> Sharing:
    """The sharing of the next node, after the one before has left it."""
    await old.leave()
    return killed(old, reactor)


def killed(old: Sharing, reactor: PooledReactor) -> Sharing:
    for each in (old._steering, old._datagrams, old._sessions):
        lose(each)
    found = Sharing(reactor, old._shelf)
    found.go_on()
    return found


def lose(old: Steering | Sessions) -> None:
    """Close all sockets but those of the keeper, in the order of their numbers, as the kernel does."""
    for number in sorted(_numbers(old)):
        os.close(number)


def _numbers(old: Steering | Sessions) -> Iterable[int]:
    if isinstance(old, Sessions):
        return [one.detach() for place in old._places.values() for one in place.others.values()]
    return [member.listener.detach() for group in old._groups.values() for member in group.members]


def _read(packed: handover_pb2.Sharing) -> handover_pb2.Sharing:
    return handover_pb2.Sharing.FromString(packed.SerializeToString())
