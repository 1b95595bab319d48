"""Convert connections from the kernel's list to the node's form, and their handles. Pure."""

from __future__ import annotations

from drivers.sockets.connections import Endpoint
from drivers.sockets.sock_diag import Flow
from node.contract.connections import Address, Handle, Live

# The bytes of the inode that begins a handle; the peer follows.
_INODE = 8


def ignore_arrivals(_: str, __: Address) -> None:
    """The default for a callback about new connections: no limit needs it."""


def live_of(key: str, flow: Flow) -> Live:
    """A user's connection, with a handle to close it."""
    handle = flow.inode.to_bytes(_INODE) + flow.peer
    return Live(
        *(key, flow.peer[:-2], handle, flow.silent, flow.sent, flow.received, flow.waiting, flow.round_trip),
    )


def inode_of(handle: Handle) -> int:
    return int.from_bytes(handle[:_INODE])


def peer_of(handle: Handle) -> Endpoint:
    return handle[_INODE:]
