"""Measures the delay of the event loop: everything that waits for its turn there waits as long."""

from __future__ import annotations

from collections import deque

from twisted.application.service import Service
from twisted.internet.interfaces import IDelayedCall, IReactorTime

# Seconds between two measurements, and seconds for which one is kept.
INTERVAL, REMEMBERED = 0.5, 60.0


class Lag(Service):
    """Sets a timer periodically, and measures how late it fires."""

    def __init__(self, reactor: IReactorTime) -> None:
        self._reactor = reactor
        self._looks: deque[float] = deque([0.0], maxlen=int(REMEMBERED / INTERVAL))
        self._call: IDelayedCall | None = None

    @property
    def worst(self) -> float:
        """The longest delay of the last minute, in seconds."""
        return max(self._looks)

    def startService(self) -> None:
        super().startService()
        self._wait()

    def stopService(self) -> None:
        super().stopService()
        if self._call is not None:
            self._call.cancel()
            self._call = None

    def _wait(self) -> None:
        self._call = self._reactor.callLater(INTERVAL, self._look, self._reactor.seconds() + INTERVAL)

    def _look(self, due: float) -> None:
        self._looks.append(max(0.0, self._reactor.seconds() - due))
        self._wait()
