"""Sockets that write at the end of a reactor turn. Twisted's own wait for the kernel's readiness, a turn later."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from typing import Any

from twisted.internet import tcp
from twisted.internet.interfaces import IDelayedCall


@dataclass
class Passed:
    """Bytes received and sent."""

    received: int = 0
    sent: int = 0


class Prompt(tcp.Server):
    """A connection whose writes of one reactor turn go out together, as the turn's last work.

    So a thread that is woken by the data need not wait for the reactor's thread. `at_once`: each write goes out alone,
    which is less work where there is one in a turn.
    """

    at_once = False
    # What writes at the end of this turn.
    _due: IDelayedCall | None = None
    _now = False

    def write(self, data: bytes) -> None:
        self._now = self.at_once
        super().write(data)
        self._now = False

    def startWriting(self) -> None:
        if self._now:
            self._write()
        elif self._due is None:
            self._due = self.reactor.callLater(0, self._write)  # type: ignore[attr-defined]

    def flush(self) -> None:
        """Write now what this turn has written so far."""
        if self._due is not None:
            self._write()

    def _write(self) -> None:
        due, self._due = self._due, None
        if due is not None and due.active():
            due.cancel()
        if not self.connected:
            return
        # The reactor handles the end of the connection, errors, and data that the kernel does not take now.
        plain = not (self.disconnecting or self._writeDisconnecting)
        if not plain or self.doWrite() is not None or self._rest():
            super().startWriting()

    def _rest(self) -> bool:
        return bool(self._tempDataBuffer) or len(self.dataBuffer) > self.offset


def dial(reactor: Any, path: str, protocol: Any, name: str | None = None) -> Prompt:
    """Connect a protocol to a unix socket; bind to the abstract name `name` first, if given. Raises `OSError`."""
    link = socket.socket(socket.AF_UNIX)
    try:
        link.setblocking(False)
        if name is not None:
            link.bind(f"\0{name}")
        link.connect(path)
    except OSError:
        link.close()
        raise
    # Twisted's class for unix sockets asks for passed descriptors at each read; none are passed here.
    transport = Prompt(link, protocol, ("", 0), None, 0, reactor)  # type: ignore[arg-type]
    protocol.makeConnection(transport)
    return transport
