"""Hand socket state over to fresh objects, as to the next node process: same descriptors, nothing closed.

Or simulate a killed node: the kernel closes all descriptors.
"""

from __future__ import annotations

from typing import TypeVar

from drivers.sockets import packing
from drivers.sockets.sessions import Sessions
from drivers.sockets.sharing import Sharing
from drivers.sockets.steering import Steering
from node.reactor import PooledReactor
from protos import handover_pb2

S = TypeVar("S", bound=Steering)


def steering(old: S) -> S:
    """Hand over the steering of streams or of datagrams."""
    packed = handover_pb2.Sharing(streams=old.packed())
    _let_go(old)
    found = type(old)()
    found.unpack(_read(packed).streams, packing.sockets(packing.descriptors(packed)))
    return found


def sessions(old: Sessions) -> Sessions:
    packed = handover_pb2.Sharing()
    old.pack(packed)
    _forget(old)
    found = Sessions()
    found.unpack(_read(packed), packing.sockets(packing.descriptors(packed)))
    return found


async def sharing(old: Sharing, reactor: PooledReactor) -> Sharing:
    packed = await old.leave()
    _let_go(old._steering)
    _let_go(old._datagrams)
    _forget(old._sessions)
    found = Sharing(reactor)
    found.go_on(_read(packed))
    return found


def killed(old: Steering | Sessions) -> None:
    """Close all held sockets in the order of their descriptors, as the kernel does for a killed process."""
    if isinstance(old, Sessions):
        held = [one for place in old._places.values() for one in place.others.values()]
        old._places.clear()
    else:
        held = [member.listener for group in old._groups.values() for member in group.members]
        old._groups.clear()
    for one in sorted(held, key=lambda one: one.fileno()):
        one.close()


def killed_sharing(old: Sharing) -> None:
    for each in (old._steering, old._datagrams, old._sessions):
        killed(each)


def _read(packed: handover_pb2.Sharing) -> handover_pb2.Sharing:
    return handover_pb2.Sharing.FromString(packed.SerializeToString())


def _let_go(old: Steering) -> None:
    for group in old._groups.values():
        for member in group.members:
            member.listener.detach()


def _forget(old: Sessions) -> None:
    for place in old._places.values():
        for one in place.others.values():
            one.detach()
