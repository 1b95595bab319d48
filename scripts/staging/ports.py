"""Free ports outside the kernel's range for outgoing connections."""

from __future__ import annotations

import itertools
import random
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

_LOWEST = 10_000
_BLOCK = 50
_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


def _candidates() -> Iterator[int]:
    """Usable ports in random blocks that no other process gets while this one runs; the same again if none is left.

    The mark of a taken block is an address in the kernel's abstract namespace, which goes with the process. Without
    it, concurrent test runs gave one port to two programs.
    """
    own: list[int] = []
    beyond = int(_RANGE.read_text().split()[0])
    blocks = range(_LOWEST, beyond - _BLOCK, _BLOCK)
    for first in random.sample(blocks, len(blocks)):
        mark = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            mark.bind(f"\0txnode.ports.{first}")
        except OSError:
            mark.close()
        else:
            marks.append(mark)
            block = range(first, first + _BLOCK)
            own += block
            yield from block
    yield from itertools.cycle(own)


# They stay open.
marks: list[socket.socket] = []
_ports = _candidates()
_lock = threading.Lock()


def free_port() -> int:
    """A port that is free for TCP and UDP on every address, and that no other process has been given.

    It lies below the kernel's range for outgoing connections: a port inside it can be a connection's source port, whose
    TIME_WAIT keeps a restarted core from binding for a minute.
    """
    with _lock:
        for port in itertools.islice(_ports, 0xFFFF):
            if _is_free(port):
                return port
    raise RuntimeError(f"no port from {_LOWEST} up is free: raise the lower end of net.ipv4.ip_local_port_range")


def own_address() -> str:
    """A random loopback address that nothing else uses, so that a port can be bound again at once."""
    return ".".join(["127", *(str(random.randrange(1, 255)) for _ in range(3))])


def _is_free(port: int) -> bool:
    return all(_binds(port, kind) for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM))


def _binds(port: int, kind: socket.SocketKind) -> bool:
    dual = socket.has_dualstack_ipv6()
    with socket.socket(socket.AF_INET6 if dual else socket.AF_INET, kind) as probe:
        if dual:
            probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        try:
            probe.bind(("", port))
        except OSError:
            return False
        return True
