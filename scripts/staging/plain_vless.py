"""A VLESS client without a core, on a plain socket: its TCP behaviour is that of a user on a network.

VLESS without encryption is a header of some 26 bytes before the payload (version, id, no addons, TCP, the target).
"""

from __future__ import annotations

import selectors
import socket
import struct
import threading
import uuid
from contextlib import suppress

from scripts.staging.echo import EchoServer

# TCP's segment size on Ethernet; the loopback's segments of 64 kB are too coarse for a rate-limited connection.
SEGMENT = 1448
_VERSION, _NO_ADDONS, _TCP, _IPV4 = b"\0", b"\0", b"\1", b"\1"
_ANSWERED = 2  # bytes before the first reply: the version, no addons
_BLOCK = 2**18
_SECONDS = 10.0


def connect(
    port: int,
    identity: str,
    target: EchoServer,
    source: str = "127.0.0.2",
    own: int = 0,
    timeout: float = _SECONDS,
) -> socket.socket:
    """A connection to the target through the inbound, on which one byte was echoed. `own` is its source port.

    Every read and write on it times out after `timeout` seconds.
    """
    link = socket.socket()
    try:
        link.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, SEGMENT)
        link.settimeout(timeout)
        link.bind((source, own))
        link.connect(("127.0.0.1", port))
        there = struct.pack("!H", target.port) + _IPV4 + socket.inet_aton(target.host)
        link.sendall(_VERSION + uuid.UUID(identity).bytes + _NO_ADDONS + _TCP + there + b"echo 1\n!")
        left = _ANSWERED + 1
        while left:
            block = link.recv(left)
            if not block:
                raise ConnectionResetError("the core ended the connection")
            left -= len(block)
    except BaseException:
        link.close()
        raise
    return link


class Download:
    """Downloads from the target on these connections until `close`; `received` counts the bytes."""

    def __init__(self, *links: socket.socket) -> None:
        self.received = 0
        self._links = links
        self._selector = selectors.DefaultSelector()
        for link in links:
            link.sendall(b"give %d\n" % 2**50)
            self._selector.register(link, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._take, daemon=True)
        self._thread.start()

    def close(self) -> None:
        for link in self._links:
            with suppress(OSError):
                link.shutdown(socket.SHUT_RDWR)
        self._thread.join(_SECONDS)
        for link in self._links:
            link.close()
        self._selector.close()

    def _take(self) -> None:
        room = bytearray(_BLOCK)
        while self._selector.get_map():
            for key, _ in self._selector.select():
                size = 0
                with suppress(OSError):
                    size = key.fileobj.recv_into(room)  # type: ignore[union-attr]
                if not size:
                    self._selector.unregister(key.fileobj)
                self.received += size
