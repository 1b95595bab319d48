"""Sum traffic from the core's stream of connections, for builds without counters; counters by users' names. Pure.

The stream omits events when there are many or its reader is slow, and may repeat a close (sing-box's `daemon`
package). So the largest sum seen of a connection counts, and its end is remembered for a while. The list at the start
of the next stream makes up for omitted events: all open connections, and the last 1,000 that ended.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass

from drivers.process.aliases import Aliases
from drivers.sing_box.abuse import OURS
from drivers.sing_box.accounts import label, name_of, unlabelled, unslashed
from node.contract.accounts import Accounts, key_of
from node.contract.counters import DIRECTIONS, Reading, Scope, counter_name
from protos.handover_pb2 import Counted
from protos.handover_pb2 import Tally as Packed
from protos.sing_box_pb2 import Connection, ConnectionEvents

LACKING = "{:,} bytes that this core carried are not counted for any user: its stream of connections omitted them"
CLOSED = 2
# Closed connections to remember: the core repeats the last 1,000 at the start of a stream.
REMEMBERED = 10_000
# Connections that a stream remembers beyond twice the open ones, before it drops those that are not open.
SPARE = 1_000


@dataclass
class _Known:
    """One connection: the counters it belongs to, and its bytes."""

    names: tuple[tuple[Scope, str], ...]
    up: int = 0
    down: int = 0


class Tally:
    """Cumulative counters by the cores' names. Users of `live` inbounds are counted by ssm-api instead."""

    def __init__(self, live: Iterable[str] = ()) -> None:
        self._live = frozenset(live)
        self.counters: dict[str, int] = {}
        # Bytes of all connections, and the number of connections that ended.
        self.carried = self.ended = 0
        self._open: dict[str, _Known] = {}
        self._closed: dict[str, _Known] = {}

    @property
    def open_ids(self) -> Set[str]:
        """The known open connections."""
        return self._open.keys()

    @property
    def packed(self) -> Packed:
        """The whole state, for the next node process."""
        both = ([_packed(id, known) for id, known in part.items()] for part in (self._open, self._closed))
        return Packed(
            counters=self.counters, carried=self.carried, ended=self.ended, open=next(both), closed=next(both)
        )

    def unpack(self, packed: Packed) -> None:
        """Restore the state of a previous node process."""
        self.counters = dict(packed.counters)
        self.carried, self.ended = packed.carried, packed.ended
        self._open = {each.id: _unpacked(each) for each in packed.open}
        self._closed = {each.id: _unpacked(each) for each in packed.closed}

    def see(self, id: str, connection: Connection | None, up: int, down: int, closed: bool) -> None:
        """Note that a connection has carried at least these bytes in all."""
        known = self._open.get(id) or self._closed.get(id)
        if known is None:
            if connection is None:
                return
            known = self._open[id] = _Known(self._names(connection))
        if up > known.up or down > known.down:
            self._book(known, max(up, known.up), max(down, known.down))
        if closed and id in self._open:
            self._close(id)

    def list(self, open_ids: Set[str]) -> None:
        """Note that only these connections are open: the stream omitted the ends of others.

        A connection that began just now may be closed by mistake; the next list opens it again.
        """
        for id in self._open.keys() - open_ids:
            self._close(id)
        for id in self._closed.keys() & open_ids:
            self._open[id] = self._closed.pop(id)

    def _close(self, id: str) -> None:
        self.ended += 1
        self._closed[id] = self._open.pop(id)
        if len(self._closed) > REMEMBERED:
            del self._closed[next(iter(self._closed))]

    def _names(self, connection: Connection) -> tuple[tuple[Scope, str], ...]:
        user = "" if connection.inbound in self._live else connection.user
        outbound = "" if connection.outbound.startswith(OURS) else connection.outbound
        named = ((Scope.USER, user), (Scope.INBOUND, connection.inbound), (Scope.OUTBOUND, outbound))
        return tuple(pair for pair in named if pair[1])

    def _book(self, known: _Known, up: int, down: int) -> None:
        for scope, name in known.names:
            for direction, added in zip(DIRECTIONS, (up - known.up, down - known.down), strict=True):
                counter = counter_name(scope, name, direction)
                self.counters[counter] = self.counters.get(counter, 0) + added
        self.carried += up - known.up + down - known.down
        known.up, known.down = up, down


def _packed(id: str, known: _Known) -> Counted:
    scopes = [scope.value for scope, _ in known.names]
    return Counted(id=id, up=known.up, down=known.down, scopes=scopes, names=[name for _, name in known.names])


def _unpacked(counted: Counted) -> _Known:
    names = zip(map(Scope, counted.scopes), counted.names, strict=True)
    return _Known(tuple(names), counted.up, counted.down)


class Stream:
    """One stream of events into a tally. Its updates have the bytes since the previous update of the same stream."""

    def __init__(self, tally: Tally) -> None:
        self.tally = tally
        self._sums: dict[str, tuple[int, int]] = {}

    def take(self, message: ConnectionEvents) -> None:
        for event in message.events:
            connection = event.connection if event.HasField("connection") else None
            before = self._sums.get(event.id)
            if connection is not None:
                up, down = connection.uplink_total, connection.downlink_total
            elif before is not None:
                up, down = before[0] + event.uplink_delta, before[1] + event.downlink_delta
            else:
                continue  # its beginning was omitted; its end has the sum
            closed = event.type == CLOSED or bool(connection and connection.closed_at)
            if closed:
                self._sums.pop(event.id, None)
            elif connection is not None and not message.reset:
                # The core reads the base of the updates before the sum in this event: bytes in between are in both.
                self._sums[event.id] = 0, 0
            else:
                self._sums[event.id] = up, down
            self.tally.see(event.id, connection, up, down, closed)
        if message.reset:
            ended_ids = {event.id for event in message.events if event.connection.closed_at}
            self.tally.list({event.id for event in message.events} - ended_ids)
        if len(self._sums) > 2 * len(self.tally.open_ids) + SPARE:
            self._sums = {id: sums for id, sums in self._sums.items() if id in self.tally.open_ids}


def reading(
    zeros: Mapping[str, int], counted: Mapping[str, int], live: Mapping[str, tuple[int, int]], aliases: Aliases
) -> Reading:
    """Merge the counters: `zeros` have 0 so far, `live` are bytes up and down by label of live users."""
    sums = Counter(zeros)
    for name, value in counted.items():
        sums[unslashed(name)] += value
    for user, both in live.items():
        for direction, value in zip(DIRECTIONS, both, strict=True):
            sums[counter_name(Scope.USER, unslashed(user), direction)] += value
    return aliases.read(sums)


def spellings(key: str, runs: Iterable[Accounts], others: Iterable[str], aliases: Aliases) -> set[str]:
    """Return all names that the core may have for a user: from these accounts and `others`, as names and as labels."""
    names = {name_of(accounts[key]) for accounts in runs if key in accounts}
    names |= {unlabelled(name) for name in others if key_of(unlabelled(name)) == key}
    names = {alias for name in names for alias in aliases.all(name)}
    return {*names, *map(label, names)}
