"""Sockets that write at the end of the turn. Twisted's own ask the kernel first whether they may, in a turn more."""

from __future__ import annotations

import socket
from typing import Any

from twisted.internet import tcp


class Prompt(tcp.Server):
    """One connection. What is written in one turn goes out as one, and after it there is nothing left to be done:

    whoever is waked by it, in another thread, does not have to wait for this one. `at_once`: each write goes out by
    itself, which is less to be done where there is one a turn.
    """

    at_once = False
    _due = False
    _now = False

    def write(self, data: bytes) -> None:
        self._now = self.at_once
        super().write(data)
        self._now = False

    def startWriting(self) -> None:
        if self._now:
            self._write()
        elif not self._due:
            self._due = True
            self.reactor.callLater(0, self._write)  # type: ignore[attr-defined]

    def _write(self) -> None:
        self._due = False
        if not self.connected:
            return
        # An end, or an error, is the reactor's to deal with; so is what the kernel does not take now.
        plain = not (self.disconnecting or self._writeDisconnecting)
        if not plain or self.doWrite() is not None or self._rest():
            super().startWriting()

    def _rest(self) -> bool:
        return bool(self._tempDataBuffer) or len(self.dataBuffer) > self.offset


def dial(reactor: Any, path: str, protocol: Any, name: str | None = None) -> Prompt:
    """Connect a protocol to a unix socket, by this abstract name if there is one. Raises `OSError`."""
    link = socket.socket(socket.AF_UNIX)
    try:
        link.setblocking(False)
        if name is not None:
            link.bind(f"\0{name}")
        link.connect(path)
    except OSError:
        link.close()
        raise
    # Twisted's class for unix sockets asks for descriptors at each read, which none brings here.
    transport = Prompt(link, protocol, ("", 0), None, 0, reactor)  # type: ignore[arg-type]
    protocol.makeConnection(transport)
    return transport
