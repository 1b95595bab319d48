"""A reverse proxy on loopback, as nginx before an inbound: it reports the addresses of its clients."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from types import TracebackType
from typing import Self

from scripts.staging.acceptor import Acceptor, wake
from scripts.staging.ports import free_port

_BLOCK, _END = 64 * 1024, b"\r\n\r\n"
_HEADER = b"x-forwarded-for:"


class Front:
    """Passes connections to its `port` on to `behind`, another port of 127.0.0.1, inside its `with` block.

    It names the client's address in X-Forwarded-For, in place of what the client sent; with `proxy` by the PROXY
    protocol instead, and leaves headers as they are.
    """

    def __init__(self, behind: int, proxy: bool = False) -> None:
        self.port = free_port()
        self._behind = behind
        self._proxy = proxy
        self._tcp = Acceptor("127.0.0.1", self.port, self._serve)

    def __enter__(self) -> Self:
        self._tcp.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._tcp.__exit__(kind, error, trace)

    def _serve(self, client: socket.socket) -> None:
        host, port = client.getpeername()
        with socket.create_connection(("127.0.0.1", self._behind)) as core:
            if self._proxy:
                core.sendall(f"PROXY TCP4 {host} 127.0.0.1 {port} {self.port}\r\n".encode())
            else:
                core.sendall(_replaced(_head(client), host))
            up = threading.Thread(target=_copy, args=(client, core), daemon=True)
            up.start()
            _copy(core, client)
            up.join()


def _head(client: socket.socket) -> bytes:
    """The head of a request, and what came with it."""
    read = b""
    while _END not in read:
        block = client.recv(_BLOCK)
        if not block:
            raise ConnectionResetError("the client ended the connection in the head of its request")
        read += block
    return read


def _replaced(read: bytes, host: str) -> bytes:
    head, _, rest = read.partition(_END)
    lines = [line for line in head.split(b"\r\n") if not line.lower().startswith(_HEADER)]
    return b"\r\n".join([*lines, f"X-Forwarded-For: {host}".encode()]) + _END + rest


def _copy(source: socket.socket, target: socket.socket) -> None:
    """Copy until one side ends, then end both."""
    with suppress(OSError):
        while block := source.recv(_BLOCK):
            target.sendall(block)
    wake(source)
    wake(target)
