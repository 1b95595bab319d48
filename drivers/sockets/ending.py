"""Ends connections of a child process by the numbers of its sockets, not by a look at all. Linux only, blocking.

A look at some thousand sockets takes some 50 ms, the kernel's list of connections and a socket of a known number less
than one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import suppress

from drivers.sockets import connections
from drivers.sockets.connections import Endpoint, Ports, at
from drivers.sockets.descriptors import Descriptors
from drivers.sockets.hiding import disconnect
from drivers.sockets.sock_diag import flows


def end(pid: int, descriptors: Descriptors, wanted: Mapping[Endpoint, Ports]) -> set[Endpoint]:
    """End the process's TCP connections to these peers where its own port is one of those beside them.

    Returns whose were ended. Who is connected and is not found by number is looked for among all. Raises `Unreachable`.
    """
    try:
        found = flows([some for ports in wanted.values() for some in ports], wanted.keys())
    except OSError:
        return connections.cut(pid, wanted).ended
    inodes = {flow.inode: flow.peer for flow in found if at(flow.port, wanted[flow.peer])}
    ended = {inodes[inode] for inode in reset(descriptors, inodes)}
    missed = {peer: wanted[peer] for peer in inodes.values() if peer not in ended}
    return ended | connections.cut(pid, missed).ended if missed else ended


def reset(descriptors: Descriptors, inodes: Collection[int]) -> set[int]:
    """Reset these TCP connections. Returns those that were there. Raises `Unreachable`."""
    ended = set()
    for inode, duplicate in descriptors.taken(inodes):
        with suppress(OSError):  # it ended by itself meanwhile
            disconnect(duplicate)
        ended.add(inode)
    return ended
