"""What is held of sockets, in another program of the node: it has the same descriptors, and nothing was closed.

Or what is left of it where a node was killed: nothing, and the kernel has closed all.
"""

from __future__ import annotations

from typing import TypeVar

from drivers.sockets import left
from drivers.sockets.sessions import Sessions
from drivers.sockets.sharing import Sharing
from drivers.sockets.steering import Steering
from node.reactor import PooledReactor
from protos import handover_pb2

S = TypeVar("S", bound=Steering)


def steering(old: S) -> S:
    """Of streams, or of datagrams."""
    packed = handover_pb2.Sharing(streams=old.packed())
    _let_go(old)
    found = type(old)()
    found.unpack(_read(packed).streams, left.sockets(left.descriptors(packed)))
    return found


def sessions(old: Sessions) -> Sessions:
    packed = handover_pb2.Sharing()
    old.pack(packed)
    _forget(old)
    found = Sessions()
    found.unpack(_read(packed), left.sockets(left.descriptors(packed)))
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
    """The kernel closes what a process had, by the numbers of its descriptors."""
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
