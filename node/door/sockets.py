"""Sockets that take what they can at once. Twisted's own wait for a turn of the reactor before each write."""

from __future__ import annotations

from typing import Any

from twisted.internet import tcp

# Connections that are let in before those that are here get a turn: else a crowd's handshakes are never done with.
ADMITTED = 8


class Prompt(tcp.Server):
    """One connection."""

    def write(self, data: bytes) -> None:
        if self.connected and not self.disconnecting and not self._waits():
            sent: Any = self.writeSomeData(data)
            # An error comes again in its turn, where there is somebody to deal with it.
            data = data[sent:] if isinstance(sent, int) else data
        if data:
            super().write(data)

    def _waits(self) -> bool:
        """Something was written before that the kernel has not taken."""
        return bool(self._tempDataBuffer) or len(self.dataBuffer) > self.offset


class Port(tcp.Port):
    """One port. Twisted's own accepts the more at a time the more come."""

    transport = Prompt

    @property
    def numberAccepts(self) -> int:
        return ADMITTED

    @numberAccepts.setter
    def numberAccepts(self, _: int) -> None:
        """It stays."""
