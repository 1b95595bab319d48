"""TCP server with a thread for each connection; it leaves neither a thread nor a socket behind."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Self


class Acceptor:
    """Listens on one loopback address inside its `with` block and hands every connection to `serve`, in a thread.

    `serve` may raise `OSError`, as connections can end at any time. `accepted` counts all, `live` the open ones.
    """

    def __init__(self, host: str, port: int, serve: Callable[[socket.socket], None]) -> None:
        self._address = host, port
        self._serve = serve
        self._lock = threading.Lock()
        self._live: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._closing = False
        self.accepted = 0

    @property
    def live(self) -> int:
        with self._lock:
            return len(self._live)

    def drop(self) -> None:
        """Close every open connection from the server's side."""
        with self._lock:
            for connection in self._live:
                wake(connection)

    def __enter__(self) -> Self:
        family = socket.AF_INET6 if ":" in self._address[0] else socket.AF_INET
        self._listener = socket.create_server(self._address, family=family, backlog=1024)
        self._start(self._accept)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._lock:
            self._closing = True
        wake(self._listener)
        self.drop()
        for thread in self._threads:
            thread.join(timeout=5)
            assert not thread.is_alive(), "a thread of a test server did not end within 5 s"
        self._listener.close()

    def _start(self, work: Callable[[], None]) -> None:
        thread = threading.Thread(target=work, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                self._take(connection)

    def _take(self, connection: socket.socket) -> None:
        with self._lock:
            if self._closing:
                connection.close()
                return
            self._live.add(connection)
            self.accepted += 1
        self._start(lambda: self._handle(connection))

    def _handle(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError):
            self._serve(connection)
        with self._lock:
            self._live.discard(connection)
            connection.close()


def wake(end: socket.socket) -> None:
    """Shut a socket down in both directions, which wakes threads that wait on it.

    On an unconnected socket `shutdown` raises `OSError`, but wakes them as well.
    """
    with contextlib.suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)
