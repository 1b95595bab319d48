"""Small processes that share a TCP port as runs of a core do, and clients that record which one they met."""

from __future__ import annotations

import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from scripts.staging.process import tied

# Listens on the given addresses, reports that, greets each connection with its name, and echoes. Replies to "came?"
# with the number of connections. At SIGUSR1 it closes all listeners, opens them again, and reports that.
PROGRAM = """
import os, select, signal, socket, sys
name, reuse, *addresses = sys.argv[1:]
poll, listeners = select.epoll(), []

def listen(*_):
    while listeners:
        one = listeners.pop()
        poll.unregister(one)
        one.close()
    for address in addresses:
        host, port = address.rsplit("|", 1)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        one = socket.socket(family)
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, int(reuse))
        if family == socket.AF_INET6:
            one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        one.bind((host, int(port)))
        one.listen(1024)
        one.setblocking(False)
        listeners.append(one)
        poll.register(one, select.EPOLLIN)
    # Not by print, which a signal may interrupt.
    os.write(1, b"listens\\n")

signal.signal(signal.SIGUSR1, listen)
listen()
links, came = {}, 0
while True:
    for number, _ in poll.poll():
        try:
            if number in links:
                data = links[number].recv(64)
                if data == b"came?":
                    data = str(came).encode()
                if not data:
                    raise ConnectionError
                links[number].send(data)
                continue
            found = [one for one in listeners if one.fileno() == number]
            if not found:
                # Closed, but reported while another process has a copy, as the test's process has for a moment.
                continue
            link, _ = found[0].accept()
            came += 1
            number = link.fileno()
            links[number] = link
            poll.register(link, select.EPOLLIN)
            link.send(name.encode())
        except BlockingIOError:
            pass
        except ConnectionError:
            links.pop(number).close()
"""
_RESET = struct.pack("ii", 1, 0)


class Greeter:
    """Such a process, running until the end of its `with` block. `name` is one letter; it listens once constructed.

    `through` is a command prefix.
    """

    def __init__(
        self, name: str, addresses: Sequence[tuple[str, int]], *, reuse: bool = True, through: Sequence[str] = ()
    ) -> None:
        self.name = name
        where = [f"{host}|{port}" for host, port in addresses]
        self._process = tied(
            [*through, sys.executable, "-I", "-S", "-c", PROGRAM, name, str(int(reuse)), *where], stdout=subprocess.PIPE
        )
        if not self._listens():
            self.kill()
            raise AssertionError(f"{name} does not listen on {where}")

    @property
    def pid(self) -> int:
        return self._process.pid

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def renew(self) -> None:
        """Have it close its listeners and open them again."""
        self.signal(signal.SIGUSR1)
        assert self._listens()

    def _listens(self) -> bool:
        assert self._process.stdout is not None
        return bool(self._process.stdout.readline() == b"listens\n")

    def kill(self) -> None:
        """Kill it and wait for its end."""
        self._process.kill()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()


def meet(address: tuple[str, int], timeout: float = 5.0) -> str:
    """Connect and return the greeter's name. Closes with a reset, which leaves no TIME_WAIT in the kernel."""
    with socket.create_connection(address, timeout=timeout) as link:
        link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        return link.recv(1).decode()


def ask(link: socket.socket, question: bytes) -> bytes:
    """A greeter's reply on this connection; b"" if the connection has ended."""
    try:
        link.sendall(question)
        return link.recv(64)
    except OSError:
        return b""


@dataclass(frozen=True)
class Visit:
    """One connection of a client: begin and end, and the greeter's name or the error."""

    begin: float
    end: float
    met: str


class Visitors:
    """Clients in threads that connect repeatedly inside the `with` block."""

    def __init__(self, addresses: Sequence[tuple[str, int]], pause: float = 0.001) -> None:
        self.visits: list[Visit] = []
        self._over = threading.Event()
        self._came = threading.Condition()
        self._pause = pause
        self._threads = [threading.Thread(target=self._visit, args=(address,)) for address in addresses]

    @property
    def failed(self) -> list[Visit]:
        return [visit for visit in self.visits if len(visit.met) != 1]

    def strays(self, name: str, since: float, until: float) -> list[Visit]:
        """The visits within this time that met another greeter than `name`."""
        return [visit for visit in self.visits if since <= visit.begin and visit.end <= until and visit.met != name]

    def until(self, enough: Callable[[int], bool]) -> None:
        """Wait until `enough` accepts the number of visits."""
        with self._came:
            came = self._came.wait_for(lambda: enough(len(self.visits)), 30)
        assert came, f"{len(self.visits)} visits in 30 s"

    def more(self, count: int) -> None:
        """Wait for this many more."""
        goal = len(self.visits) + count
        self.until(lambda visits: visits >= goal)

    def _visit(self, address: tuple[str, int]) -> None:
        while not self._over.wait(self._pause):
            begin = time.monotonic()
            try:
                met = meet(address)
            except OSError as error:
                met = f"{type(error).__name__}: {error}"
            with self._came:
                self.visits.append(Visit(begin, time.monotonic(), met or "nobody"))
                self._came.notify_all()

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        with suppress(RuntimeError):  # it was not started
            for thread in self._threads:
                thread.join()
