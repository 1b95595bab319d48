"""Ports whose connections write at the end of the turn."""

from __future__ import annotations

from twisted.internet import tcp

from node.sockets import Prompt

# Connections that are let in before those that are here get a turn: else a crowd's handshakes are never done with.
ADMITTED = 16


class Port(tcp.Port):
    """One port. Twisted's own accepts the more at a time the more come."""

    transport = Prompt

    @property
    def numberAccepts(self) -> int:
        return ADMITTED

    @numberAccepts.setter
    def numberAccepts(self, _: int) -> None:
        """It stays."""
