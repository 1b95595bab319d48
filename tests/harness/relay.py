"""A TCP relay to a port of this machine that can be cut at any time."""

from __future__ import annotations

import contextlib
import socket
import threading

from scripts.staging.acceptor import Acceptor, wake
from scripts.staging.ports import free_port


class Relay(Acceptor):
    """Relays connections to `port` to the port `to`; `drop` cuts all current ones."""

    def __init__(self, to: int) -> None:
        self.port = free_port()
        self._to = to
        super().__init__("127.0.0.1", self.port, self._carry)

    def _carry(self, near: socket.socket) -> None:
        with socket.create_connection(("127.0.0.1", self._to)) as far:
            back = threading.Thread(target=_pump, args=(far, near), daemon=True)
            back.start()
            _pump(near, far)
            back.join()


def _pump(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while block := source.recv(65536):
            sink.sendall(block)
    wake(source)
    wake(sink)
