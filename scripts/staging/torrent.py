"""BitTorrent between programs of the tests: a peer and a tracker that answer, and a client's first packets."""

from __future__ import annotations

import os
import socket
import struct
import threading
from contextlib import suppress
from types import TracebackType
from typing import Self

from scripts.staging.acceptor import Acceptor, wake
from scripts.staging.ports import free_port
from scripts.staging.socks import UdpAssociation, connect, exactly

_PROTOCOL = b"\x13BitTorrent protocol"
# Bytes of a handshake: the protocol, eight for extensions, the hash of the torrent, the peer's id.
_HANDSHAKE = len(_PROTOCOL) + 8 + 20 + 20
# The first packet to a UDP tracker (BEP 15), and the types of uTP's first packet and of its answer (BEP 29).
_MAGIC, _CONNECT = 0x41727101980, 0
_SYN, _STATE = 0x41, 0x21
BLOCK = 64 * 1024


class Peer:
    """A peer (BEP 3; with uTP) and UDP tracker on one port of a loopback address, inside its `with` block."""

    def __init__(self, host: str = "127.0.0.1") -> None:
        self.host, self.port = host, free_port()
        # How many handshakes and first packets it has got.
        self.asked = 0
        self._tcp = Acceptor(host, self.port, self._serve)
        self._udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._thread = threading.Thread(target=self._answer, daemon=True)

    def __enter__(self) -> Self:
        self._tcp.__enter__()
        self._udp.bind((self.host, self.port))
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._tcp.__exit__(kind, error, trace)
        wake(self._udp)
        self._thread.join(timeout=5)
        self._udp.close()

    def _serve(self, link: socket.socket) -> None:
        hello = exactly(link, _HANDSHAKE)
        self.asked += 1
        if hello.startswith(_PROTOCOL):
            link.sendall(hello[:-20] + os.urandom(20))
            while block := link.recv(BLOCK):
                link.sendall(block)

    def _answer(self) -> None:
        with suppress(OSError):
            while True:
                packet, peer = self._udp.recvfrom(2048)
                if not packet:
                    return
                self.asked += 1
                if packet[0] == _SYN:
                    self._udp.sendto(bytes([_STATE]) + packet[1:], peer)
                elif packet.startswith(struct.pack("!QI", _MAGIC, _CONNECT)):
                    self._udp.sendto(struct.pack("!I", _CONNECT) + packet[12:16] + os.urandom(8), peer)


def shakes_hands(socks_port: int, peer: Peer, blocks: int = 0, timeout: float = 10.0) -> bool:
    """Whether the peer answers a handshake through the SOCKS port, and returns so many blocks that follow."""
    hello = _PROTOCOL + bytes(8) + os.urandom(40)
    try:
        with connect(socks_port, peer.host, peer.port, timeout, first=hello) as link:
            answer = exactly(link, _HANDSHAKE)
            blob, returned = os.urandom(BLOCK), True
            for _ in range(blocks):
                link.sendall(blob)
                returned &= exactly(link, BLOCK) == blob
            return returned and answer[:-20] == hello[:-20]
    except OSError:
        return False


def asks_tracker(socks_port: int, peer: Peer, timeout: float = 2.0) -> bool:
    """Whether the tracker answers a first packet over UDP."""
    number = os.urandom(4)
    return _asks(socks_port, peer, struct.pack("!QI", _MAGIC, _CONNECT) + number, timeout)[4:8] == number


def asks_utp(socks_port: int, peer: Peer, timeout: float = 2.0) -> bool:
    """Whether the peer answers a first packet of uTP."""
    syn = struct.pack("!BBHIIIHH", _SYN, 0, 12345, 0, 0, 0xF0000, 1, 0)
    return _asks(socks_port, peer, syn, timeout)[1:] == syn[1:]


def _asks(socks_port: int, peer: Peer, packet: bytes, timeout: float) -> bytes:
    with UdpAssociation(socks_port, timeout) as association:
        association.send(packet, peer.host, peer.port)
        try:
            return association.receive()
        except OSError:
            return b""
