"""Ports whose connections write at the end of the turn."""

from __future__ import annotations

import socket

from twisted.internet import tcp

from node.sockets import Prompt

# Connections that are let in before those that are here get a turn: else a crowd's handshakes are never done with.
ADMITTED = 16


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
