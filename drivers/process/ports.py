"""Ports of this machine for a core's own API, where neither inbounds nor outgoing connections are likely to be."""

from __future__ import annotations

import random
import socket
from contextlib import ExitStack, suppress
from pathlib import Path

_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_LAST = 65535
# Ports above the kernel's range that are enough to choose from.
ROOM = 256


def is_open(port: int) -> bool:
    """Whether something listens on this port of 127.0.0.1."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def free_ports(count: int) -> list[int]:
    """Random ports of 127.0.0.1 that are free now, above the kernel's range for outgoing connections if there is room.

    Raises `OSError` if there are none.
    """
    lowest, highest = map(int, _RANGE.read_text().split())
    span = range(highest + 1, _LAST + 1) if _LAST - highest >= ROOM else range(lowest, _LAST + 1)
    found: list[int] = []
    with ExitStack() as stack:
        for port in random.sample(span, len(span)):
            probe = stack.enter_context(socket.socket())
            with suppress(OSError):
                probe.bind(("127.0.0.1", port))
                found.append(port)
            if len(found) == count:
                return found
    raise OSError("no port of 127.0.0.1 is free")
