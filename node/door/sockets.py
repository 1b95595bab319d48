"""Sockets that write at the end of the turn. Twisted's own ask the kernel first whether they may, in a turn more."""

from __future__ import annotations

import socket

from twisted.internet import tcp

# Connections that are let in before those that are here get a turn: else a crowd's handshakes are never done with.
ADMITTED = 16


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


class Port(tcp.Port):
    """One port. Twisted's own accepts the more at a time the more come."""

    transport = Prompt

    def createInternetSocket(self) -> socket.socket:
        link: socket.socket = super().createInternetSocket()
        # Its connections have it from here. Else what is written while the client has not acknowledged what was before
        # waits for that, and clients wait some 40 ms before they do.
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return link

    @property
    def numberAccepts(self) -> int:
        return ADMITTED

    @numberAccepts.setter
    def numberAccepts(self, _: int) -> None:
        """It stays."""
