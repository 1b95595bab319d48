"""Bytes out of the core's stream of connections, for builds without counters. Pure.

The stream may leave events out when its reader is slow, and say a close twice (sing-box's `daemon` package): so what
counts is the largest sum that was seen of a connection, and its end is remembered for a while.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from protos.sing_box_pb2 import Connection, ConnectionEvent

CLOSED = 2
# Closed connections that are remembered: the core repeats the last 1,000 when a stream begins.
REMEMBERED = 10_000


@dataclass
class _Known:
    """What is known of one connection: the counters it belongs to, and its bytes."""

    names: tuple[str, ...]
    up: int = 0
    down: int = 0


class Tally:
    """Cumulative counters, by the names that cores have for them."""

    def __init__(self) -> None:
        self.counters: dict[str, int] = {}
        self._open: dict[str, _Known] = {}
        self._closed: dict[str, _Known] = {}

    def take(self, events: Iterable[ConnectionEvent]) -> None:
        for event in events:
            known = self._known(event)
            if known is None:
                continue
            up, down = known.up + event.uplink_delta, known.down + event.downlink_delta
            if event.HasField("connection"):
                up = max(up, event.connection.uplink_total)
                down = max(down, event.connection.downlink_total)
            self._book(known, up, down)
            if event.type == CLOSED or event.connection.closed_at:
                self._close(event.id)

    def _known(self, event: ConnectionEvent) -> _Known | None:
        known = self._open.get(event.id) or self._closed.get(event.id)
        if known is None and event.HasField("connection"):
            known = self._open[event.id] = _Known(_names(event.connection))
        return known

    def _book(self, known: _Known, up: int, down: int) -> None:
        for name in known.names:
            for direction, added in (("uplink", up - known.up), ("downlink", down - known.down)):
                counter = f"{name}>>>traffic>>>{direction}"
                self.counters[counter] = self.counters.get(counter, 0) + added
        known.up, known.down = up, down

    def _close(self, id: str) -> None:
        known = self._open.pop(id, None)
        if known is None:
            return
        self._closed[id] = known
        if len(self._closed) > REMEMBERED:
            del self._closed[next(iter(self._closed))]


def _names(connection: Connection) -> tuple[str, ...]:
    named = (("user", connection.user), ("inbound", connection.inbound), ("outbound", connection.outbound))
    return tuple(f"{scope}>>>{name}" for scope, name in named if name)
