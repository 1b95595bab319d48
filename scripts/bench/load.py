"""Real traffic of many users from a separate process: VLESS clients on plain sockets, without a client core.

VLESS without encryption is a header of some 26 bytes before the payload (version, id, no addons, TCP, the target).
All connections lead to an echo server in the same process, so that the bytes of each user are known.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import socket
import struct
import threading
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection

# The bytes of one echo.
PAYLOAD = bytes(100)
# The users' source address: Xray never lists 127.0.0.1 as online.
SOURCE = "127.0.0.2"
# Connections that are opened before the first echo is awaited.
BATCH = 200
_SECONDS = 30.0
_VERSION, _NO_ADDONS, _TCP, _IPV4 = b"\0", b"\0", b"\1", b"\1"
_ANSWERED = 2  # bytes before the first reply: the version, no addons


class Load:
    """Controls the traffic process. Users are given by their VLESS ids. Each call returns after all its echoes."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def visit(self, ids: Sequence[str], port: int) -> None:
        """For each user, open a connection, echo once, and close it."""
        self._do("visit", ids, port)

    def open(self, ids: Sequence[str], port: int) -> None:
        """For each user, open a connection, echo once, and keep it."""
        self._do("open", ids, port)

    def move(self) -> None:
        """Echo once through every open connection."""
        self._do("move")

    def close(self) -> None:
        """Close the open connections."""
        self._do("close")

    def _do(self, *command: object) -> None:
        self._pipe.send(command)
        answer = self._pipe.recv()
        assert answer is None, answer


@contextmanager
def loading() -> Iterator[Load]:
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_work, args=(there,), daemon=True)
    process.start()
    try:
        yield Load(here)
    finally:
        here.send(("end",))
        process.join()


def _work(pipe: Connection) -> None:
    users, links = _Users(_echo()), list[socket.socket]()
    while (command := pipe.recv())[0] != "end":
        try:
            match command:
                case "visit", ids, port:
                    for start in range(0, len(ids), BATCH):
                        _close(users.connected(ids[start : start + BATCH], port))
                case "open", ids, port:
                    for start in range(0, len(ids), BATCH):
                        links += users.connected(ids[start : start + BATCH], port)
                case ("move",):
                    _moved(links)
                case ("close",):
                    _close(links)
                    links.clear()
            pipe.send(None)
        except OSError as error:
            pipe.send(f"users' traffic failed: {error}")


class _Users:
    """Opens connections of users to the echo server on this port."""

    def __init__(self, echo: int) -> None:
        self._target = struct.pack("!H", echo) + _IPV4 + socket.inet_aton("127.0.0.1")

    def connected(self, ids: Sequence[str], port: int) -> list[socket.socket]:
        links = [socket.create_connection(("127.0.0.1", port), _SECONDS, (SOURCE, 0)) for _ in ids]
        for link, identity in zip(links, ids, strict=True):
            header = _VERSION + uuid.UUID(identity).bytes + _NO_ADDONS + _TCP + self._target
            link.sendall(header + PAYLOAD)
        for link in links:
            _receive(link, _ANSWERED + len(PAYLOAD))
        return links


def _moved(links: Sequence[socket.socket]) -> None:
    for link in links:
        link.sendall(PAYLOAD)
    for link in links:
        _receive(link, len(PAYLOAD))


def _receive(link: socket.socket, size: int) -> None:
    while size:
        block = link.recv(size)
        if not block:
            raise ConnectionResetError("the core closed a connection")
        size -= len(block)


def _close(links: Sequence[socket.socket]) -> None:
    for link in links:
        link.close()


class _Echo(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._transport.write(data)


def _echo() -> int:
    """Run an echo server in a thread for the life of the process. Returns its port."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    serving = loop.create_server(_Echo, "127.0.0.1", 0, backlog=4096)
    server = asyncio.run_coroutine_threadsafe(serving, loop).result()
    port = server.sockets[0].getsockname()[1]
    assert isinstance(port, int)
    return port
