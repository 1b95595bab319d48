"""Reset single connections of a child process without a search through all its sockets. Linux only, blocking.

A search through some thousand sockets takes some 50 ms; the kernel's list of connections and a socket of known number
less than 1 ms.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import suppress

from drivers.sockets import connections
from drivers.sockets.connections import Endpoint, Ports, at
from drivers.sockets.descriptors import Descriptors
from drivers.sockets.sock_diag import flows
from drivers.sockets.udp_hide import disconnect


def end(pid: int, descriptors: Descriptors, wanted: Mapping[Endpoint, Ports]) -> set[Endpoint]:
    """Reset the process's TCP connections to these peers, at the local ports given for each.

    Returns the peers. Those that are connected but not found by number are searched for. Raises `Unreachable`.
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
    """Reset these TCP connections. Returns those that existed. Raises `Unreachable`."""
    ended = set()
    for inode, duplicate in descriptors.taken(inodes):
        with suppress(OSError):  # closed meanwhile
            disconnect(duplicate)
        ended.add(inode)
    return ended
