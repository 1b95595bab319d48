"""Which connections are open, by user and by where they come from, out of the core's stream of connections. Pure.

The stream leaves events out when there are many or its reader is slow, and may say an end twice (see `tally`). What it
left out is in the next list: of all that are open, which every stream begins with. A connection whose beginning was
left out shows by its updates, and is known by the list that is asked for then.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable
from dataclasses import dataclass, field
from typing import TypeVar

from drivers.sing_box.fronts import pair_of, source_of
from drivers.sing_box.tally import CLOSED
from drivers.sockets.connections import Endpoint
from node.contract.connections import Address, Handle
from protos.sing_box_pb2 import Connection, ConnectionEvent, ConnectionEvents

K = TypeVar("K", bound=Hashable)

# Ends that are remembered: what a list says that was made before one of them does not bring it back.
REMEMBERED = 10_000


@dataclass(slots=True, eq=False)
class Line:
    """What a user has open from one place by one inbound: a TCP connection of theirs, or a session over UDP.

    `ids` are the core's connections over it: several where the client puts them together. `up`, `down`: bytes of those
    that there are and were since it is known. `moved`: when one was seen last.
    """

    tag: str
    key: str
    source: Endpoint
    handle: Handle
    moved: float
    ids: set[str] = field(default_factory=set)
    up: int = 0
    down: int = 0

    @property
    def address(self) -> Address:
        return self.source[:-2]


@dataclass(slots=True, eq=False)
class _Flow:
    """One of the core's connections. No line: of nobody whom the node lets in, or from no address.

    `number`: the how manieth it was to become known. `up`, `down`: its bytes that its line has.
    """

    line: Line | None
    number: int
    up: int = 0
    down: int = 0

    def carry(self, up: int, down: int, now: float) -> None:
        """So much more."""
        if self.line is not None and (up > 0 or down > 0):
            self.up, self.down = self.up + up, self.down + down
            self.line.up, self.line.down = self.line.up + up, self.line.down + down
            self.line.moved = now


class Table:
    """`tags` are the inbounds whose users count."""

    def __init__(self, tags: Collection[str]) -> None:
        self._tags = tuple(tags)
        self._places = {tag: number.to_bytes(2) for number, tag in enumerate(self._tags)}
        self._flows: dict[str, _Flow] = {}
        self._ended: dict[str, None] = {}
        self._lines: dict[Handle, Line] = {}
        self._by_key: dict[str, set[Handle]] = {}
        self._by_source: dict[Endpoint, set[Handle]] = {}
        # How many connections there were to know so far.
        self.number = 0
        # Whether a list is needed: nothing is known yet, or something was left out.
        self.lacks = True

    def __len__(self) -> int:
        return len(self._lines)

    def has(self, key: str) -> bool:
        return key in self._by_key

    def of(self, keys: Collection[str]) -> list[Line]:
        return [self._lines[handle] for key in keys for handle in self._by_key.get(key, ())]

    def get(self, handle: Handle) -> Line | None:
        return self._lines.get(handle)

    def is_free(self, source: Endpoint) -> bool:
        """Whether nobody has anything open from that place."""
        return source not in self._by_source

    def is_alone(self, line: Line) -> bool:
        """Whether nobody else comes from that place: clients of a proxy do, and who makes up where they come from."""
        return len(self._by_source[line.source]) == 1

    def take(self, message: ConnectionEvents, now: float) -> list[Line]:
        """What the stream that is followed says as it goes on. Returns what is new, a line for each connection."""
        return [line for event in message.events if (line := self._take(event, now)) is not None]

    def renew(self, message: ConnectionEvents, number: int, now: float) -> list[Line]:
        """What a stream begins with: all that are open. `number` was so much when it was asked for."""
        listed = {event.id: event.connection for event in message.events}
        for id, flow in [*self._flows.items()]:
            if id not in listed and flow.number <= number:
                self._drop(id)  # not for good: should it be in a later list, it is open
        self.lacks = False
        return [line for id, connection in listed.items() if (line := self._see(id, connection, now)) is not None]

    def _see(self, id: str, connection: Connection, now: float) -> Line | None:
        """As it is in a list, with its sums."""
        if connection.closed_at:
            self._end(id, connection, now)
        elif self._is_new(id):
            return self._begin(connection, connection.uplink_total, connection.downlink_total, now)
        return None

    def _take(self, event: ConnectionEvent, now: float) -> Line | None:
        connection = event.connection if event.HasField("connection") else None
        if event.type == CLOSED or (connection is not None and connection.closed_at):
            self._end(event.id, connection, now)
        elif event.id in self._flows:
            self._flows[event.id].carry(event.uplink_delta, event.downlink_delta, now)
        elif connection is None:
            self.lacks |= self._is_new(event.id)
        elif self._is_new(event.id):
            return self._begin(connection, 0, 0, now)  # what it has carried so far is in the first update, too
        return None

    def _is_new(self, id: str) -> bool:
        return id not in self._flows and id not in self._ended

    def _begin(self, connection: Connection, up: int, down: int, now: float) -> Line | None:
        self.number += 1
        line = self._line(connection, now)
        self._flows[connection.id] = flow = _Flow(line, self.number)
        flow.carry(up, down, now)
        if line is not None:
            line.ids.add(connection.id)
            line.moved = now
        return line

    def _line(self, connection: Connection, now: float) -> Line | None:
        (tag, key), source = pair_of(connection), source_of(connection)
        if source is None or not key or tag not in self._places:
            return None
        handle = self._handle(tag, source, key)
        line = self._lines.get(handle)
        if line is None:
            line = self._lines[handle] = Line(tag, key, source, handle, now)
            self._by_key.setdefault(key, set()).add(handle)
            self._by_source.setdefault(source, set()).add(handle)
        return line

    def _handle(self, tag: str, source: Endpoint, key: str) -> Handle:
        return self._places[tag] + len(source).to_bytes() + source + key.encode("utf-8", "surrogatepass")

    def place_of(self, handle: Handle) -> tuple[str, Endpoint]:
        """By which inbound and from where the line came that had this handle, which may be forgotten by now."""
        return self._tags[int.from_bytes(handle[:2])], handle[3 : 3 + handle[2]]

    def _end(self, id: str, connection: Connection | None, now: float) -> None:
        """It is over, whatever an older list says."""
        self._ended[id] = None
        if len(self._ended) > REMEMBERED:
            del self._ended[next(iter(self._ended))]
        if id in self._flows:
            if connection is not None:
                flow = self._flows[id]
                flow.carry(
                    max(0, connection.uplink_total - flow.up), max(0, connection.downlink_total - flow.down), now
                )
            self._drop(id)

    def _drop(self, id: str) -> None:
        line = self._flows.pop(id).line
        if line is None:
            return
        line.ids.discard(id)
        if not line.ids:
            del self._lines[line.handle]
            _discard(self._by_key, line.key, line.handle)
            _discard(self._by_source, line.source, line.handle)


def _discard(index: dict[K, set[Handle]], key: K, handle: Handle) -> None:
    index[key].discard(handle)
    if not index[key]:
        del index[key]
