"""Free ports outside the kernel's range for outgoing connections."""

from __future__ import annotations

import itertools
import os
import random
import socket
import threading
from pathlib import Path

_LOWEST = 10_000
_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


def _candidates() -> itertools.cycle[int]:
    """An endless cycle of usable ports from a random one on, so that concurrent test runs rarely collide.

    The pytest-xdist workers of one run take every n-th port each.
    """
    beyond = int(_RANGE.read_text().split()[0])
    start = random.randrange(_LOWEST, beyond)
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    ports = [port for port in (*range(start, beyond), *range(_LOWEST, start)) if port % workers == worker % workers]
    return itertools.cycle(ports)


_ports = _candidates()
_given: set[int] = set()
_lock = threading.Lock()


def free_port() -> int:
    """A port that is free for TCP and UDP on every address, and that this process has not returned before.

    It lies below the kernel's range for outgoing connections: a port inside it can be a connection's source port, whose
    TIME_WAIT keeps a restarted core from binding for a minute.
    """
    with _lock:
        for port in itertools.islice(_ports, 0xFFFF):
            if port not in _given and _is_free(port):
                _given.add(port)
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
