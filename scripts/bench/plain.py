"""VLESS clients without a core, for benches that count every failed connection.

A client core redials when a connection is refused, and hides that from its user. These clients do not.
"""

from __future__ import annotations

import itertools
import socket
import threading
import time
from contextlib import suppress
from types import TracebackType
from typing import Self

from protos.service_pb2 import User
from scripts.staging import plain_vless, transfer
from scripts.staging.activity import Activity
from scripts.staging.echo import EchoServer

# Seconds between two new connections of a user being removed, and between two checks of the open ones.
KNOCK, LOOK = 0.05, 0.03
# A connection that lasted no longer than this was refused: sing-box accepts a barred user, then closes.
LIVED = 0.5


class PlainActivity(Activity):
    """`Activity` straight to the inbound's port, on plain sockets: a refused connection counts as failed."""

    def __init__(
        self, port: int, identity: str, echo: EchoServer, live: int, pause: float, patience: float = 5.0
    ) -> None:
        super().__init__(port, echo, live, pause, patience)
        self._identity = identity

    def _dial(self, timeout: float, first: bytes) -> socket.socket:
        link = plain_vless.connect(self._port, self._identity, self._echo, timeout=timeout)
        try:
            link.sendall(first)
        except BaseException:
            link.close()
            raise
        return link


class Leaver:
    """A user who is about to be removed: opens connections continuously and records when each of them ends.

    `held` connections are open when the `with` block begins. The caller sets `sent` to the time of sending the removal.
    """

    def __init__(self, port: int, identity: str, echo: EchoServer, held: list[socket.socket]) -> None:
        self.sent = float("inf")
        self._port, self._identity, self._echo = port, identity, echo
        self._held = dict.fromkeys(held, 0.0)
        # When each connection was opened, and when it ended.
        self._open = dict(self._held)
        self._ended: dict[socket.socket, float] = {}
        self._over = threading.Event()
        self._threads = [threading.Thread(target=work, daemon=True) for work in (self._knock, self._watch)]

    @property
    def cut(self) -> float | None:
        """Seconds from the removal until the last of the held connections had ended; None while one is open."""
        if not all(link in self._ended for link in self._held):
            return None
        return max((self._ended[link] for link in self._held), default=self.sent) - self.sent

    @property
    def newest(self) -> float:
        """Seconds from the removal to the last new connection that was not refused; 0 if there was none."""
        ends = [(begun, self._ended.get(link, time.monotonic())) for link, begun in list(self._open.items())]
        lived = [begun - self.sent for begun, end in ends if end - begun > LIVED]
        return max([0.0, *lived])

    def settled(self, quiet: float) -> bool:
        """Whether all held connections ended, and new ones have been refused, for `quiet` seconds."""
        return self.cut is not None and time.monotonic() - self.sent - max(self.newest, self.cut) > quiet

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(10)
            assert not thread.is_alive(), "a thread of the removed user did not end"
        for link in self._open:
            link.close()

    def _knock(self) -> None:
        while not self._over.wait(KNOCK):
            begun = time.monotonic()
            with suppress(OSError):
                link = plain_vless.connect(self._port, self._identity, self._echo, timeout=1.0)
                self._open[link] = begun

    def _watch(self) -> None:
        while not self._over.wait(LOOK):
            for link in list(self._open):
                if link not in self._ended and not alive(link):
                    self._ended[link] = time.monotonic()


def alive(link: socket.socket) -> bool:
    """Whether the connection echoes a byte."""
    try:
        transfer.small_echo(link, b"x")
    except (OSError, AssertionError):
        return False
    return True


def comes_in(port: int, user: User, echo: EchoServer, deadline: float) -> float:
    """The time of the user's first successful connection, tried without a pause until `deadline` (monotonic).

    Raises `AssertionError` if none succeeds.
    """
    for _ in itertools.count():
        with suppress(OSError):
            plain_vless.connect(port, user.proxies.vless.id, echo, timeout=1.0).close()
            return time.monotonic()
        assert time.monotonic() < deadline, f"{user.email} cannot connect"
        time.sleep(0.002)
    raise AssertionError("unreachable")
