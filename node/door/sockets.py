"""Listening ports whose connections write at the end of a reactor turn."""

from __future__ import annotations

import socket
from typing import Any

from twisted.internet import tcp

from node.base.sockets import Prompt

# Connections accepted in one reactor turn; with more, a crowd of new ones keeps earlier handshakes from ending.
ADMITTED = 16
# Connections that may wait to be accepted; the kernel drops the SYN of further ones, which retry after a second.
BACKLOG = 1024


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


def listen(reactor: Any, factory: Any, port: int, interface: str, held: int | None = None) -> Port:
    """Listen on a port, or by `held`, a socket that listens there already and is closed here.

    Raises `CannotListenError`.
    """
    if held is None:
        listening = Port(port, factory, BACKLOG, interface, reactor)
    else:
        with socket.socket(fileno=held) as there:
            listening = Port._fromListeningDescriptor(reactor, held, there.family, factory)
    listening.startListening()
    return listening
