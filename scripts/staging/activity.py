"""Users at work while something is done to their core: connections that stay, and new ones all the time, all noted."""

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

# Seconds between two rounds over the connections that stay, and that anything may take.
ROUND = 0.2
PATIENCE = 15.0
# Seconds between two datagrams of a user who sends them all the time.
CHATTER = 0.02


class Opened(NamedTuple):
    """A new connection: when it was begun, and how many seconds it took until an echo came back."""

    begun: float
    took: float


class Activity:
    """What one user does through a SOCKS port, from the start of the `with` block to its end, or to `rest`.

    `live` connections are opened first and say something again and again; meanwhile new ones are opened, `pause`
    seconds after each other, and closed, each within the user's `patience`. `dropped` tells of those that ended,
    `failed` of those that did not come about; `moved` are the bytes by direction, as a core counts them, of all that
    went well.
    """

    def __init__(self, port: int, echo: EchoServer, live: int, pause: float, patience: float = PATIENCE) -> None:
        self.opened: list[Opened] = []
        self.dropped: list[str] = []
        self.failed: list[str] = []
        self._port, self._echo, self._live, self._pause, self._patience = port, echo, live, pause, patience
        self._links: list[socket.socket] = []
        # Of each of the two threads, and of whoever says more.
        self._moved: tuple[Counter[str], ...] = (Counter(), Counter(), Counter())
        self._over = threading.Event()
        self._threads = [threading.Thread(target=work, daemon=True) for work in (self._talk, self._visit)]

    @property
    def moved(self) -> Counter[str]:
        return sum(self._moved, Counter())

    @property
    def links(self) -> list[socket.socket]:
        """The connections that stay, for whoever uses them after `rest`."""
        return list(self._links)

    def say(self, link: socket.socket, size: int) -> None:
        """Move some bytes more, and count them."""
        _say(link, size, self._moved[2])

    def rest(self) -> None:
        """Open no more connections, and say nothing on those that are there."""
        self._over.set()
        for thread in self._threads:
            thread.join(PATIENCE + ROUND)
            assert not thread.is_alive(), "a user does not come to rest"

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

    def _open(self, timeout: float, moved: Counter[str]) -> socket.socket:
        link = socks.connect(self._port, self._echo.host, self._echo.port, timeout)
        try:
            _say(link, 5, moved)
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
    """A user sends datagrams through a SOCKS port all the time, and cares for no answer: their client never rests.

    On the loopback a client that waits for an answer may have nothing to send for seconds, and hears of nothing.
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
        assert not thread.is_alive(), "a user does not come to rest"


def gap(activity: Activity) -> float:
    """The most seconds in which the user tried all the time and no new connection came about."""
    ends = sorted(opened.begun + opened.took for opened in activity.opened)
    return max(later - earlier for earlier, later in itertools.pairwise(ends))


def longest(activities: Iterable[Activity]) -> Opened:
    """The new connection that took longest."""
    return max((opened for activity in activities for opened in activity.opened), key=lambda opened: opened.took)


def _say(link: socket.socket, size: int, moved: Counter[str]) -> None:
    transfer.small_echo(link, bytes(size))
    moved.update(uplink=len(b"echo %d\n" % size) + size, downlink=size)


def _trouble(work: Callable[[], object]) -> str:
    """When and how it fails, if it does."""
    try:
        work()
    except (OSError, AssertionError) as error:
        return f"{time.monotonic():.2f}: {error!r}"
    return ""
