"""A user who speaks VLESS straight to an inbound, without a core: on a socket of our own, as it would be on a network.

VLESS without encryption is a header of some 26 bytes in front of the payload (version, id, no addons, TCP, the target).
"""

from __future__ import annotations

import selectors
import socket
import struct
import threading
import uuid
from contextlib import suppress

from scripts.staging.echo import EchoServer

# The largest segment of an Ethernet; the loopback's of 64 kB are long for a connection that is held to a speed.
SEGMENT = 1448
_VERSION, _NO_ADDONS, _TCP, _IPV4 = b"\0", b"\0", b"\1", b"\1"
_ANSWERED = 2  # bytes in front of the first reply: the version, no addons
_BLOCK = 2**18
_SECONDS = 10.0


def connect(port: int, identity: str, target: EchoServer, source: str = "127.0.0.2", own: int = 0) -> socket.socket:
    """A connection to the target through the inbound, on which a byte has come back. `own`: the port that it has."""
    link = socket.socket()
    try:
        link.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, SEGMENT)
        link.settimeout(_SECONDS)
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
    """Takes what the target gives on these connections for as long as they last, and counts. It ends with `close`."""

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
