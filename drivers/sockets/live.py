"""Connections as the kernel lists them, and as the node knows them. Pure."""

from __future__ import annotations

from drivers.sockets.connections import Endpoint
from drivers.sockets.sock_diag import Flow
from node.contract.connections import Address, Handle, Live

# Bytes of an inode in a handle, in front of the peer.
_INODE = 8


def nobody_listens(_: str, __: Address) -> None:
    """Nobody wants to know of each connection that comes."""


def live_of(key: str, flow: Flow) -> Live:
    """This user's connection."""
    handle = flow.inode.to_bytes(_INODE) + flow.peer
    return Live(
        *(key, flow.peer[:-2], handle, flow.silent, flow.sent, flow.received, flow.waiting, flow.round_trip),
    )


def inode_of(handle: Handle) -> int:
    return int.from_bytes(handle[:_INODE])


def peer_of(handle: Handle) -> Endpoint:
    return handle[_INODE:]
