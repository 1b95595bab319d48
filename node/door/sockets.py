"""Listening ports whose connections write at the end of a reactor turn."""

from __future__ import annotations

import socket

from twisted.internet import tcp

from node.base.sockets import Prompt

# Connections accepted in one reactor turn; with more, a crowd of new ones keeps earlier handshakes from ending.
ADMITTED = 16


class Port(tcp.Port):
    """A listening port. Twisted's own accepts more at a time, the more connections come."""

    transport = Prompt

    def createInternetSocket(self) -> socket.socket:
        link: socket.socket = super().createInternetSocket()
        # Accepted connections inherit TCP_NODELAY. Without it a small write waits until the client has acknowledged the
        # one before it, which clients delay by some 40 ms.
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return link

    @property
    def numberAccepts(self) -> int:
        return ADMITTED

    @numberAccepts.setter
    def numberAccepts(self, _: int) -> None:
        """Ignored: the number is fixed."""
