"""Find free ports for a core's own API, where inbounds and outgoing connections are unlikely."""

from __future__ import annotations

import random
import socket
from contextlib import ExitStack, suppress
from pathlib import Path

_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_LAST = 65535
# The least number of ports above the kernel's range for them to be used.
ROOM = 256


def is_open(port: int) -> bool:
    """Whether something listens on this port of 127.0.0.1."""
    with socket.socket() as probe:
        # A listener that does not accept must not block the node.
        probe.settimeout(0.02)
        return probe.connect_ex(("127.0.0.1", port)) == 0


def free_ports(count: int) -> list[int]:
    """Return random free ports of 127.0.0.1, above the kernel's range for outgoing connections if there is room.

    Raises `OSError` if no port is free.
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
