"""Floods of a port of the node, over HTTP/2 and TCP, each in its own process."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from scripts.staging.process import Child

# One connection after the other: a TLS handshake, a preface, then the same bytes repeatedly until the node closes.
# Prints the number of bytes that each connection accepted.
_FLOOD = """\
import socket, ssl, sys

port, source, head, again = int(sys.argv[1]), sys.argv[2], bytes.fromhex(sys.argv[3]), bytes.fromhex(sys.argv[4])
context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
context.set_alpn_protocols(["h2"])
again *= max(1, 16384 // len(again))
while True:
    sent = 0
    try:
        with socket.create_connection(("127.0.0.1", port), 5, (source, 0)) as raw, context.wrap_socket(raw) as link:
            link.sendall(head)
            while sent < 64 * 2**20:
                link.sendall(again)
                sent += len(again)
    except OSError:
        pass
    print(sent, flush=True)
"""

# Hundreds of TCP connections at once that send nothing; prints their number for each batch.
_IDLE = """\
import socket, sys, time

port, source = int(sys.argv[1]), sys.argv[2]
held = []
while True:
    link = socket.socket()
    link.bind((source, 0))
    try:
        link.connect(("127.0.0.1", port))
    except OSError:
        continue
    held.append(link)
    if len(held) == 600:
        print(len(held), flush=True)
        time.sleep(0.5)
        for link in held:
            link.close()
        held.clear()
"""

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return len(payload).to_bytes(3) + bytes((kind, flags)) + stream.to_bytes(4) + payload


# POST https://x/
_CALL = b"\x83\x87\x84\x41\1x"
# By name: the bytes that a connection sends first, and those that it repeats.
FLOODS = {
    "continuation": (PREFACE + frame(1, 0, 1, b"\0" * 10), frame(9, 0, 1, b"\0\1a\1b" * 3000)),
    "empty continuation": (PREFACE + frame(1, 0, 1), frame(9, 0, 1)),
    "ping": (PREFACE, frame(6, 0, 0, bytes(8))),
    "settings": (PREFACE, frame(4, 0, 0, bytes((0, 3, 0, 0, 0, 100)))),
    "window": (PREFACE, frame(8, 0, 0, bytes((0, 0, 0, 1)))),
    # Streams that are opened and reset at once (rapid reset), in rising order.
    "reset": (
        PREFACE,
        b"".join(frame(1, 5, n, _CALL) + frame(3, 0, n, bytes(4)) for n in range(1, 999, 2)),
    ),
    "half open": (PREFACE, b"".join(frame(1, 4, n, _CALL) for n in range(1, 1999, 2))),
}


@contextmanager
def flooding(port: int, kind: str, source: str = "127.0.0.2") -> Iterator[Callable[[], list[int]]]:
    """Run one flood ("idle": TCP alone). Yields a function that returns the bytes that each connection accepted."""
    script, texts = (_IDLE, ()) if kind == "idle" else (_FLOOD, FLOODS[kind])
    argv = [sys.executable, "-ISc", script, str(port), source, *(text.hex() for text in texts)]
    with Child(argv, {"PATH": os.defpath}) as child:
        yield lambda: [int(line) for line in child.lines]
