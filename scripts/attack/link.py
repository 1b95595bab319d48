"""A client that sends arbitrary bytes over TLS and accepts any certificate."""

from __future__ import annotations

import socket
import ssl
import struct
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress

from scripts.staging.node import NodeProcess

# Seconds without a byte after which a reply counts as complete, and the longest that a case may take.
QUIET, LONGEST = 0.08, 5.0
# The attackers' source address: the node's limits for each address must not affect the controllers.
SOURCE = "127.0.0.2", 0
_MOST = 1 << 20


def blind(*protocols: str) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    if protocols:
        context.set_alpn_protocols(protocols)
    return context


@contextmanager
def linked(node: NodeProcess, port: int, *protocols: str) -> Iterator[ssl.SSLSocket]:
    with bare(node, port) as raw, blind(*protocols).wrap_socket(raw) as link:
        yield link


def bare(node: NodeProcess, port: int) -> socket.socket:
    return socket.create_connection((node.host, port), LONGEST, SOURCE)


def talk(link: socket.socket, parts: Iterable[bytes]) -> bytes:
    """Send the parts and return the reply. The node may close the connection at any time."""
    link.settimeout(LONGEST)
    with suppress(OSError):
        for part in parts:
            link.sendall(part)
    return b"".join(heard(link))


def heard(link: socket.socket) -> Iterator[bytes]:
    link.settimeout(QUIET)
    end, total = time.monotonic() + LONGEST, 0
    with suppress(OSError):
        while total < _MOST and time.monotonic() < end and (data := link.recv(65_536)):
            total += len(data)
            yield data


def reset(link: socket.socket) -> None:
    """Close with a TCP reset, as by a crash: unsent data is lost."""
    link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    link.close()
