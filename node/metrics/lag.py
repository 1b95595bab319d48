"""Measures the delay of the event loop: everything that waits for its turn there waits as long."""

from __future__ import annotations

from collections import deque

from twisted.internet.interfaces import IReactorTime

from node.base.alarm import Alarm
from node.base.part import Part

# Seconds between two measurements, and seconds for which one is kept.
INTERVAL, REMEMBERED = 0.5, 60.0


class Lag(Part):
    """Sets a timer periodically, and measures how late it fires."""

    title = "the reactor lag meter"

    def __init__(self, reactor: IReactorTime) -> None:
        self._reactor = reactor
        self._looks: deque[float] = deque([0.0], maxlen=int(REMEMBERED / INTERVAL))
        self._alarm = Alarm(reactor, self._look)
        self._due = 0.0

    @property
    def worst(self) -> float:
        """The longest delay of the last minute, in seconds."""
        return max(self._looks)

    def start(self) -> None:
        self._due = self._reactor.seconds() + INTERVAL
        self._alarm.set(INTERVAL)

    def stop(self) -> None:
        self._alarm.cancel()

    def _look(self) -> None:
        self._looks.append(max(0.0, self._reactor.seconds() - self._due))
        self.start()
