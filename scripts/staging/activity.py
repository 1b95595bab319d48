"""Continuous user traffic while a test changes the core: long-lived connections and a stream of new ones, recorded."""

from __future__ import annotations

import itertools
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from types import TracebackType
from typing import NamedTuple, Self

from scripts.staging import socks, transfer
from scripts.staging.acceptor import wake
from scripts.staging.echo import EchoServer

# Seconds between two rounds over the long-lived connections, and the longest that anything may take.
ROUND = 0.2
PATIENCE = 15.0
# Seconds between two datagrams of `chatter`.
CHATTER = 0.02
# What is echoed first on each connection.
_FIRST = bytes(5)


class Opened(NamedTuple):
    """A new connection: when it was dialled (monotonic), and how many seconds passed until an echo came back."""

    begun: float
    took: float


class Activity:
    """Traffic of one user through a SOCKS port, from the start of the `with` block to its end, or to `rest`.

    It opens `live` connections first and sends on them periodically. Meanwhile it opens and closes new ones, `pause`
    seconds after each other, with a timeout of `patience` seconds each. `dropped` lists the errors of live connections
    that ended, `failed` those of new ones that could not be opened; `moved` are the bytes of all successful echoes by
    direction, as a core counts them.
    """

    def __init__(self, port: int, echo: EchoServer, live: int, pause: float, patience: float = PATIENCE) -> None:
        self.opened: list[Opened] = []
        self.dropped: list[str] = []
        self.failed: list[str] = []
        self._port, self._echo, self._live, self._pause, self._patience = port, echo, live, pause, patience
        self._links: list[socket.socket] = []
        # One for each of the two threads, and one for the caller's thread.
        self._moved: tuple[Counter[str], ...] = (Counter(), Counter(), Counter())
        self._over = threading.Event()
        self._threads = [threading.Thread(target=work, daemon=True) for work in (self._talk, self._visit)]

    @property
    def moved(self) -> Counter[str]:
        return sum(self._moved, Counter())

    @property
    def links(self) -> list[socket.socket]:
        """The long-lived connections, for use after `rest`."""
        return list(self._links)

    def say(self, link: socket.socket, size: int) -> None:
        """Echo `size` more bytes on a live connection, and count them."""
        _say(link, size, self._moved[2])

    def rest(self) -> None:
        """Stop: open no more connections, and send nothing on the live ones."""
        self._over.set()
        for thread in self._threads:
            thread.join(PATIENCE + ROUND)
            assert not thread.is_alive(), "a thread of the user's traffic did not end"

    def __enter__(self) -> Self:
        try:
            self._links = [self._open(PATIENCE, self._moved[2]) for _ in range(self._live)]
        except BaseException:
            self._close()
            raise
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.rest()
        finally:
            self._close()

    def _talk(self) -> None:
        while not self._over.wait(ROUND):
            for link in list(self._links):
                if trouble := _trouble(partial(_say, link, 200, self._moved[0])):
                    self.dropped.append(trouble)
                    self._links.remove(link)

    def _visit(self) -> None:
        while not self._over.wait(self._pause):
            begun = time.monotonic()
            if trouble := _trouble(lambda: self._open(self._patience, self._moved[1]).close()):
                self.failed.append(trouble)
            else:
                self.opened.append(Opened(begun, time.monotonic() - begun))

    def _dial(self, timeout: float, first: bytes) -> socket.socket:
        """A connection on which this is sent first."""
        return socks.connect(self._port, self._echo.host, self._echo.port, timeout, first=first)

    def _open(self, timeout: float, moved: Counter[str]) -> socket.socket:
        link = self._dial(timeout, transfer.asking(_FIRST))
        try:
            _heard(link, _FIRST, moved)
        except BaseException:
            link.close()
            raise
        return link

    def _close(self) -> None:
        for link in self._links:
            with suppress(OSError):
                wake(link)
            link.close()
        self._links.clear()


@contextmanager
def chatter(port: int, echo: EchoServer) -> Iterator[None]:
    """Send datagrams through a SOCKS port all the time without waiting for answers, so that the client is never idle.

    On the loopback a client that waits for an answer may send nothing for seconds, and so notices no change.
    """
    over = threading.Event()

    def talk() -> None:
        while not over.wait(CHATTER):
            with suppress(OSError), socks.UdpAssociation(port, 1.0) as association:
                while not over.wait(CHATTER):
                    association.send(bytes(100), echo.host, echo.port)

    thread = threading.Thread(target=talk, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(PATIENCE)
        assert not thread.is_alive(), "the thread that sends datagrams did not end"


def gap(activity: Activity) -> float:
    """The longest time in seconds between two successful new connections."""
    ends = sorted(opened.begun + opened.took for opened in activity.opened)
    return max(later - earlier for earlier, later in itertools.pairwise(ends))


def longest(activities: Iterable[Activity]) -> Opened:
    """The new connection that took the longest time."""
    return max((opened for activity in activities for opened in activity.opened), key=lambda opened: opened.took)


def _say(link: socket.socket, size: int, moved: Counter[str]) -> None:
    payload = bytes(size)
    link.sendall(transfer.asking(payload))
    _heard(link, payload, moved)


def _heard(link: socket.socket, payload: bytes, moved: Counter[str]) -> None:
    """Receive the echo of what was sent, and count both."""
    transfer.receive_echo(link, payload)
    moved.update(uplink=len(transfer.asking(payload)), downlink=len(payload))


def _trouble(work: Callable[[], object]) -> str:
    """Time and error if `work` fails, else ""."""
    try:
        work()
    except (OSError, AssertionError) as error:
        return f"{time.monotonic():.2f}: {error!r}"
    return ""
