"""The destination of proxied traffic: an echo and bulk server that counts its bytes.

A TCP connection carries any number of commands, each a line: `echo N` and N bytes, sent back as they arrive; `give N`,
answered by N bytes; `take N` and N bytes, answered by `taken` after the last one. UDP datagrams are echoed.
"""

from __future__ import annotations

import contextlib
import io
import socket
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Self

from scripts.staging.acceptor import Acceptor, wake
from scripts.staging.ports import free_port

TAKEN = b"taken\n"
BLOCK = 64 * 1024
_PATTERN = bytes(range(256)) * (BLOCK // 256)


def given(size: int) -> bytes:
    """The bytes with which the server answers `give size`."""
    return (_PATTERN * (size // BLOCK + 1))[:size]


class EchoServer:
    """Serves one loopback address, TCP and UDP on one port, inside its `with` block.

    `received` and `sent` are the bytes of all TCP connections, command lines included, for comparison
    with a core's counters; `datagrams` counts the UDP echoes.
    """

    def __init__(self, host: str = "127.0.0.1") -> None:
        self.host, self.port = host, free_port()
        self.received = self.sent = self.datagrams = 0
        self._lock = threading.Lock()
        self._tcp = Acceptor(host, self.port, self._serve)
        self._udp = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM)
        self._udp_thread = threading.Thread(target=self._return_datagrams, daemon=True)

    def __enter__(self) -> Self:
        self._tcp.__enter__()
        self._udp.bind((self.host, self.port))
        self._udp_thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._tcp.__exit__(kind, error, trace)
        wake(self._udp)
        self._udp_thread.join(timeout=5)
        assert not self._udp_thread.is_alive(), "the UDP thread of the echo server did not end within 5 s"
        self._udp.close()

    @property
    def connections(self) -> int:
        """Number of TCP connections so far."""
        return self._tcp.accepted

    @property
    def live(self) -> int:
        """Number of open TCP connections."""
        return self._tcp.live

    def drop(self) -> None:
        """Close every open TCP connection from the server's side."""
        self._tcp.drop()

    def _serve(self, connection: socket.socket) -> None:
        with connection.makefile("rb") as stream:
            while line := stream.readline():
                self._count(received=len(line))
                self._obey(line, stream, connection)

    def _obey(self, line: bytes, stream: io.BufferedReader, connection: socket.socket) -> None:
        command, _, size = line.partition(b" ")
        if command == b"echo":
            self._read(stream, int(size), lambda block: self._send(connection, block))
        elif command == b"give":
            self._give(connection, int(size))
        elif command == b"take":
            self._read(stream, int(size), lambda block: None)
            self._send(connection, TAKEN)
        else:
            raise ConnectionAbortedError(f"unknown command {line!r}")

    def _read(self, stream: io.BufferedReader, size: int, use: Callable[[bytes], None]) -> None:
        while size:
            block = stream.read1(min(size, BLOCK))
            if not block:
                raise ConnectionResetError("the connection ended inside a command")
            size -= len(block)
            self._count(received=len(block))
            use(block)

    def _give(self, connection: socket.socket, size: int) -> None:
        while size:
            block = _PATTERN[:size]
            self._send(connection, block)
            size -= len(block)

    def _send(self, connection: socket.socket, block: bytes) -> None:
        """Count before sending, so that a test that has received the bytes finds them counted."""
        self._count(sent=len(block))
        connection.sendall(block)

    def _count(self, received: int = 0, sent: int = 0) -> None:
        with self._lock:
            self.received += received
            self.sent += sent

    def _return_datagrams(self) -> None:
        """Echo datagrams until the socket is shut down, which makes it read an empty datagram."""
        with contextlib.suppress(OSError):
            while True:
                data, peer = self._udp.recvfrom(BLOCK)
                if not data:
                    return
                self.datagrams += 1
                self._udp.sendto(data, peer)
