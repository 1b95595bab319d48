"""Compare the traffic that controllers were billed with the bytes that users and the far end have counted."""

from __future__ import annotations

import os
import random
import socket
import ssl
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress

from drivers.sockets.reuseport import deafen
from protos.service_pb2 import ListedUser, StatRequest, StatResponse, UsersStat, UserStat
from scripts.staging.controller import Controller
from scripts.staging.node import NodeProcess
from tests.everything.far_end import NUMBER, FarEnd, Moved

# Bytes moved so many seconds before a core was killed may be lost: an interval of readings, on a busy machine.
LOSS = 1.5
_BLOCK = 65_536
# Bytes by user and direction.
Bytes = Counter[tuple[str, str]]


class Bills:
    """All bytes that controllers read with `reset`. `kills` are the times (monotonic) when cores were killed.

    `omitted` returns how many bytes the node has reported as counted for no user. With `mixes` the core may attribute a
    connection to another user if it begins while users change: then the sums of all users must be right.
    """

    def __init__(self, far_end: FarEnd, omitted: Callable[[], int] = lambda: 0, mixes: bool = False) -> None:
        self.billed = Bytes()
        # The same, without corrections.
        self._received = Bytes()
        self._omitted, self._mixes = omitted, mixes
        # Omitted bytes that earlier rounds have lacked.
        self._accepted = 0
        self.kills: list[float] = []
        self._far_end = far_end
        self._lock = threading.Lock()

    def take(self, controller: Controller, name: str = "") -> None:
        """Read with reset, all users or one."""
        self._book(controller.stats(UserStat if name else UsersStat, name, reset=True))

    def leave_early(self, node: NodeProcess, rng: random.Random) -> bool:
        """Read with reset and hang up before the reply arrives; a faster reply is booked.

        Returns whether it hung up. Raises `OSError`.
        """
        context = ssl.create_default_context(cadata=node.pem)
        raw = socket.create_connection((node.host, node.rest_port), 5)
        with context.wrap_socket(raw, server_hostname="localhost") as link:
            link.sendall(_question(node.key))
            time.sleep(rng.choice([0, 0, 0.0005, 0.001, 0.003]))
            with _deaf(link):
                begin = _what_came(link)
            if begin:
                self._book(_reply(link, begin))
                return False
            return True

    def faults(self) -> Iterator[str]:
        """A line of text for each bill that is too high or too low."""
        low, high = self._bounds()
        if self._is_foreseen(low, high):
            return
        for which, most in high.items():
            name, billed = " ".join(which), self.billed[which]
            if billed > most:
                yield f"{name} billed {billed:,}, but only {most:,} were sent: {billed - most:,} too many"
            if billed < low[which]:
                yield f"{name} billed {billed:,}, but {low[which]:,} arrived: {low[which] - billed:,} too few"

    def unlike(self, rows: Iterable[ListedUser]) -> Iterator[str]:
        """A line of text for each user whose bytes by inbound are not those of the bills."""
        for row in rows:
            for direction in ("uplink", "downlink"):
                apart, billed = (
                    sum(getattr(each, direction) for each in row.traffic),
                    self._received[row.name.lower(), direction],
                )
                if apart != billed:
                    yield f"{row.name} {direction} billed {billed:,}, but {apart:,} by inbound"

    def _is_foreseen(self, low: Bytes, high: Bytes) -> bool:
        """Whether all differences are of a kind that the core is known for."""
        few, many = low - self.billed, self.billed - high
        omitted = self._omitted() - self._accepted
        if self._mixes:
            return low.total() - omitted <= self.billed.total() <= high.total()
        return not many and few.total() <= omitted

    def forgive(self, foreseen: bool) -> None:
        """Correct the bills, so that differences are not reported again. `foreseen`: none was a fault."""
        low, high = self._bounds()
        self._accepted += max(0, low.total() - self.billed.total()) if foreseen else 0
        for which, most in high.items():
            self.billed[which] = min(most, max(low[which], self.billed[which]))

    def summary(self) -> str:
        low, high = self._bounds()
        return f"bytes billed {self.billed.total():,} of {low.total():,} to {high.total():,}"

    def _book(self, reply: StatResponse) -> None:
        with self._lock:
            for stat in reply.stats:
                self.billed[stat.name.lower(), stat.type] += stat.value
                self._received[stat.name.lower(), stat.type] += stat.value

    def _bounds(self) -> tuple[Bytes, Bytes]:
        """The least and the most bytes that the bills may have."""
        low, high = Bytes(), Bytes()
        for moved in list(self._far_end.flows.values()):
            high[moved.who, "uplink"] += moved.sent
            high[moved.who, "downlink"] += moved.given
            up, down = self._lost(moved)
            low[moved.who, "uplink"] += max(0, moved.arrived - up)
            low[moved.who, "downlink"] += max(0, moved.taken - down)
        return low, high

    def _lost(self, moved: Moved) -> tuple[int, int]:
        """The bytes of a connection that were moved around a kill, including those of its number."""
        if not self.kills:
            return 0, 0
        pieces = [piece for piece in list(moved.pieces) if self._near_a_kill(piece.when)]
        return NUMBER + sum(piece.up for piece in pieces), sum(piece.down for piece in pieces)

    def _near_a_kill(self, when: float) -> bool:
        return any(kill - LOSS < when < kill + LOSS for kill in self.kills)


def _question(key: str) -> bytes:
    body = StatRequest(type=UsersStat, reset=True).SerializeToString()
    lines = [
        "GET /stats HTTP/1.1",
        "Host: localhost",
        f"Authorization: Bearer {key}",
        "Content-Type: application/x-protobuf",
        f"Content-Length: {len(body)}",
        "Connection: close",
    ]
    return "\r\n".join([*lines, "", ""]).encode() + body


@contextmanager
def _deaf(link: ssl.SSLSocket) -> Iterator[None]:
    """Inside, the kernel drops received packets of this connection, and so acknowledges nothing to the node."""
    deafen(link)
    yield
    if link.fileno() >= 0:
        deafen(link, deaf=False)


def _what_came(link: ssl.SSLSocket) -> bytes:
    """The bytes of the reply so far. If there are none, reset the connection: the node got no acknowledgement."""
    link.setblocking(False)
    try:
        return link.recv(_BLOCK)
    except ssl.SSLWantReadError:
        link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        # Without TLS's close_notify.
        os.close(link.detach())
        return b""


def _reply(link: ssl.SSLSocket, data: bytes) -> StatResponse:
    """Read the rest of the reply that begins with `data`; an empty message if its status is not 200."""
    link.settimeout(5)
    with suppress(ssl.SSLError, ConnectionError):
        while block := link.recv(_BLOCK):
            data += block
    head, _, body = data.partition(b"\r\n\r\n")
    return StatResponse.FromString(body) if head.startswith(b"HTTP/1.1 200") else StatResponse()
