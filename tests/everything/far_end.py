"""The users' connections and their destination; both count the bytes of each connection."""

from __future__ import annotations

import random
import socket
import struct
import threading
import time
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import NamedTuple, Self

from scripts.staging import socks
from scripts.staging.acceptor import Acceptor
from scripts.staging.ports import free_port
from scripts.staging.users import TestUser

_BLOCK = 65_536
_FRAME = struct.Struct(">II")
# Size of a connection's number, which it sends first.
NUMBER = 8
# Bytes that VLESS sends before the first reply.
_ANSWERED = 2


class Piece(NamedTuple):
    """Bytes of one completed frame, and the time of its end."""

    when: float
    up: int
    down: int


@dataclass
class Moved:
    """Bytes of one connection: `sent` and `taken` by the user, `arrived` and `given` at the far end."""

    who: str
    sent: int = 0
    arrived: int = 0
    given: int = 0
    taken: int = 0
    pieces: list[Piece] = field(default_factory=list)


class FarEnd:
    """The destination, inside its `with` block.

    A connection sends its number, then frames: how many bytes follow, how many it wants back, and the bytes.
    """

    def __init__(self) -> None:
        self.host, self.port = "127.0.0.1", free_port()
        self.flows: dict[int, Moved] = {}
        self._lock = threading.Lock()
        self._acceptor = Acceptor(self.host, self.port, self._serve)

    def new(self, who: str) -> tuple[int, Moved]:
        """Register a connection that this user is about to open. Returns its number and its counts."""
        with self._lock:
            number = len(self.flows) + 1
            moved = self.flows[number] = Moved(who)
            return number, moved

    def __enter__(self) -> Self:
        self._acceptor.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._acceptor.__exit__(kind, error, trace)

    def _serve(self, link: socket.socket) -> None:
        link.settimeout(60)
        moved = self.flows.get(int.from_bytes(self._read(link, NUMBER, None)))
        if moved is None:
            return
        moved.arrived += NUMBER
        while True:
            up, down = _FRAME.unpack(self._read(link, _FRAME.size, moved))
            self._read(link, up, moved)
            while down:
                count = link.send(bytes(min(down, _BLOCK)))
                moved.given += count
                down -= count

    @staticmethod
    def _read(link: socket.socket, size: int, moved: Moved | None) -> bytes:
        data = b""
        while len(data) < size:
            block = link.recv(min(size - len(data), _BLOCK))
            if not block:
                raise ConnectionResetError("the connection ended")
            if moved is not None:
                moved.arrived += len(block)
            data += block
        return data


@dataclass(frozen=True)
class Roads:
    """Users' paths to the far end: the inbounds' ports by tag, and the SOCKS ports of a client core by tag and user.

    For VLESS this is itself the client, without a client core.
    """

    far_end: FarEnd
    ports: Mapping[str, int]
    proxies: Mapping[tuple[str, str], int]
    plain: str = "home"

    def open(self, person: TestUser, tag: str, timeout: float) -> Flow:
        """Open a connection of this user through this inbound and send its number. Raises `OSError`."""
        number, moved = self.far_end.new(person.email.lower())
        first = number.to_bytes(NUMBER)
        if tag != self.plain:
            proxy = self.proxies[tag, person.uuid]
            moved.sent += NUMBER
            return Flow(socks.connect(proxy, self.far_end.host, self.far_end.port, timeout, first=first), moved)
        flow = Flow(self._by_vless(person, timeout), moved, _ANSWERED)
        try:
            flow.send(first)
        except BaseException:
            flow.close()
            raise
        return flow

    def _by_vless(self, person: TestUser, timeout: float) -> socket.socket:
        link = socket.socket()
        try:
            link.settimeout(timeout)
            # A few addresses, but more than a limit of addresses allows.
            link.bind((f"127.0.0.{random.randrange(2, 6)}", 0))
            link.connect(("127.0.0.1", self.ports[self.plain]))
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            target = struct.pack("!H", self.far_end.port) + b"\1" + socket.inet_aton(self.far_end.host)
            link.sendall(b"\0" + uuid.UUID(person.uuid).bytes + b"\0\1" + target)
        except BaseException:
            link.close()
            raise
        return link


class Flow:
    """One connection of a user. `skipped` bytes before the first reply belong to the protocol."""

    def __init__(self, link: socket.socket, moved: Moved, skipped: int = 0) -> None:
        self._link, self._moved, self._skip = link, moved, skipped

    def frame(self, up: int, down: int) -> None:
        """Send `up` bytes and take `down` bytes. Raises `OSError` when the connection ends or stalls."""
        sent, taken = self._moved.sent, self._moved.taken
        try:
            self.send(_FRAME.pack(up, down) + bytes(up))
            self._take(down)
        finally:
            self._moved.pieces.append(Piece(time.monotonic(), self._moved.sent - sent, self._moved.taken - taken))

    def send(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            count = self._link.send(view[:_BLOCK])
            self._moved.sent += count
            view = view[count:]

    def close(self, hard: bool = False) -> None:
        """End the connection; `hard` resets it."""
        if hard:
            with suppress(OSError):
                self._link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._link.close()

    def _take(self, size: int) -> None:
        while size:
            block = self._link.recv(_BLOCK)
            if not block:
                raise ConnectionResetError("the connection ended")
            protocol = min(self._skip, len(block))
            self._skip -= protocol
            self._moved.taken += len(block) - protocol
            size -= len(block) - protocol
