"""Track open connections by user and source address, from the core's stream of connections.

The stream omits events when there are many or its reader is slow, and may repeat an end (see `tally`). The next list
of open connections makes up for omitted events: every stream begins with one. A connection whose beginning was omitted
is noticed by its updates; then a list is requested.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Hashable, Iterable, Mapping, Set
from dataclasses import dataclass, field
from typing import TypeVar

from drivers.process.abuse import PROTOCOL
from drivers.sing_box.accounts import unlabelled
from drivers.sing_box.tally import CLOSED
from drivers.sockets.sock_diag import Endpoint, connected, endpoint
from node.base.logs import Logger
from node.contract.abuse import Request
from node.contract.accounts import key_of
from node.contract.connections import Address, Handle
from protos.sing_box_pb2 import Connection, ConnectionEvent, ConnectionEvents

K = TypeVar("K", bound=Hashable)

# The tag of an inbound, and the key of a user.
Pair = tuple[str, str]
# Ended connections to remember: a list that was made before an end does not bring the connection back.
REMEMBERED = 10_000
# Source addresses to remember from which a client may keep an idle session.
SESSIONS = 50_000
# Seconds after which a new connection is reported as a request, and the most of them that wait for that.
SETTLED, BEGUN = 0.5, 20_000


def pair_of(connection: Connection) -> Pair:
    return connection.inbound, key_of(unlabelled(connection.user))


def online_by_key(connections: Iterable[Connection]) -> dict[str, dict[str, int]]:
    """By user: the addresses, and the start of the newest connection from each, in Unix seconds."""
    online: dict[str, dict[str, int]] = {}
    for connection in connections:
        addresses = online.setdefault(pair_of(connection)[1], {})
        address = connection.source.rpartition(":")[0].strip("[]")
        addresses[address] = max(addresses.get(address, 0), connection.created_at // 1000)
    return online


def source_of(connection: Connection) -> Endpoint | None:
    """Return the client's address and port, without a zone; None if `source` is not an address."""
    address, _, port = connection.source.rpartition(":")
    try:
        return endpoint(address.strip("[]").partition("%")[0], int(port))
    except (OSError, OverflowError, ValueError):
        return None


@dataclass(slots=True, eq=False)
class Line:
    """A user's open TCP connection or UDP session from one address and port through one inbound.

    `ids` are the core's connections in it: several where the client multiplexes. `up`, `down`: their bytes since the
    line is known. `moved`: the time of the last new connection or bytes.
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

    @property
    def pair(self) -> Pair:
        return self.tag, self.key


@dataclass(slots=True, eq=False)
class _Flow:
    """One of the core's connections. It has no line if its user is not managed, or its source is not an address.

    `number`: the value of `Table.number` when it became known. `up`, `down`: its bytes that are added to its line.
    `streamed_up`, `streamed_down`: its bytes by the stream alone, which repeats those that a list had meanwhile.
    """

    line: Line | None
    number: int
    up: int = 0
    down: int = 0
    streamed_up: int = 0
    streamed_down: int = 0

    def begin(self, up: int, down: int, now: float) -> None:
        """Set its bytes at the moment when it becomes known."""
        self.streamed_up, self.streamed_down = up, down
        self.reach(up, down, now)

    def carry(self, up: int, down: int, now: float) -> None:
        """Add the bytes of an update."""
        self.streamed_up, self.streamed_down = self.streamed_up + up, self.streamed_down + down
        self.reach(self.streamed_up, self.streamed_down, now)

    def reach(self, up: int, down: int, now: float) -> None:
        """Note that it has carried at least these bytes in all."""
        added_up, added_down = max(0, up - self.up), max(0, down - self.down)
        if self.line is not None and (added_up or added_down):
            self.up, self.down = self.up + added_up, self.down + added_down
            self.line.up, self.line.down = self.line.up + added_up, self.line.down + added_down
            self.line.moved = now


# When a connection began, its line, and its bytes; None for one that has ended already.
_Begun = tuple[float, Connection, Line, _Flow | None]


class Table:
    """The open connections of managed inbounds `tags`; in those `multiplexed` clients keep sessions for streams."""

    def __init__(self, tags: Collection[str], multiplexed: Collection[str] = ()) -> None:
        self._tags = tuple(tags)
        self._multiplexed = frozenset(multiplexed)
        # For multiplexed inbounds: the last user from each address, and the addresses where a user is the last.
        self._last: dict[Endpoint, Pair] = {}
        self._sessions: dict[Pair, set[Endpoint]] = {}
        self._places = {tag: number.to_bytes(2) for number, tag in enumerate(self._tags)}
        self._flows: dict[str, _Flow] = {}
        self._ended: dict[str, None] = {}
        self._lines: dict[Handle, Line] = {}
        self._by_key: dict[str, set[Handle]] = {}
        self._by_source: dict[Endpoint, set[Handle]] = {}
        # How many connections have become known so far.
        self.number = 0
        # Whether a list is needed: there was none yet, or the stream omitted something.
        self.lacks = True
        # Connections that began, with the time; None until somebody asks for them.
        self._begun: deque[_Begun] | None = None

    def __len__(self) -> int:
        return len(self._lines)

    def has(self, key: str) -> bool:
        return key in self._by_key

    def of(self, keys: Collection[str]) -> list[Line]:
        return [self._lines[handle] for key in keys for handle in self._by_key.get(key, ())]

    def get(self, handle: Handle) -> Line | None:
        return self._lines.get(handle)

    def is_free(self, source: Endpoint) -> bool:
        """Whether no line comes from that address."""
        return source not in self._by_source

    def is_alone(self, line: Line) -> bool:
        """Whether no other line comes from its address, also after its end.

        Clients of one proxy share an address, and clients may forge one (X-Forwarded-For).
        """
        return self._by_source.get(line.source, set()) <= {line.handle}

    def places(self, pairs: Collection[Pair]) -> dict[Endpoint, str]:
        """Map the source addresses of these users, and of their possible idle sessions, to the inbound.

        Addresses that they share with other users are left out.
        """
        lines = [line for line in self.of({key for _, key in pairs}) if line.pair in pairs]
        found = {source: pair[0] for pair in pairs for source in self._sessions.get(pair, ())}
        found |= {line.source: line.tag for line in lines}
        at = {source: {self._lines[handle].pair for handle in self._by_source.get(source, ())} for source in found}
        return {source: tag for source, tag in found.items() if at[source] <= set(pairs)}

    def take(self, message: ConnectionEvents, now: float) -> list[Line]:
        """Process events of the followed stream. Returns the line of each new connection."""
        return [line for event in message.events if (line := self._take(event, now)) is not None]

    def renew(self, message: ConnectionEvents, number: int, now: float) -> list[Line]:
        """Process a list of all open connections. `number`: the value of `Table.number` when it was requested."""
        listed = {event.id: event.connection for event in message.events}
        for id, flow in [*self._flows.items()]:
            if id not in listed and flow.number <= number:
                self._drop(id)  # not remembered as ended: a later list may still have it
        self.lacks = False
        return [line for id, connection in listed.items() if (line := self._see(id, connection, now)) is not None]

    def _see(self, id: str, connection: Connection, now: float) -> Line | None:
        """Process a connection of a list, which has its sums."""
        if connection.closed_at:
            self._end(id, connection, now)
        elif id in self._flows:
            self._flows[id].reach(connection.uplink_total, connection.downlink_total, now)
        elif self._is_new(id):
            return self._begin(connection, now)
        return None

    def _take(self, event: ConnectionEvent, now: float) -> Line | None:
        connection = event.connection if event.HasField("connection") else None
        if event.type == CLOSED or (connection is not None and connection.closed_at):
            if self._begun is not None and connection is not None and self._is_new(event.id):
                self._note_ended(self._begun, connection, now)
            self._end(event.id, connection, now)
        elif event.id in self._flows:
            self._flows[event.id].carry(event.uplink_delta, event.downlink_delta, now)
        elif connection is None:
            self.lacks |= self._is_new(event.id)
        elif self._is_new(event.id):
            return self._begin(connection, now)
        return None

    def requests(self, exempt: Collection[str], now: float) -> list[Request]:
        """The connections that began `SETTLED` seconds ago or before, since the last call, without those of `exempt`.

        By then most targets have answered that do.
        """
        if self._begun is None:
            self._begun = deque(maxlen=BEGUN)
        found = []
        while self._begun and self._begun[0][0] <= now - SETTLED:
            _, connection, line, flow = self._begun.popleft()
            if line.key not in exempt:
                udp, torrent = connection.network == "udp", connection.protocol == PROTOCOL
                answered = flow is not None and flow.down > 0
                found.append(Request(line.key, line.address, line.tag, connection.destination, udp, torrent, answered))
        return found

    def _note_ended(self, begun: deque[_Begun], connection: Connection, now: float) -> None:
        """Note a connection that the stream reports only at its end."""
        (tag, key), source = pair_of(connection), source_of(connection)
        if source is not None and key and tag in self._places:
            begun.append((now, connection, Line(tag, key, source, b"", now), None))

    def _is_new(self, id: str) -> bool:
        return id not in self._flows and id not in self._ended

    def _begin(self, connection: Connection, now: float) -> Line | None:
        """Take in a connection with its bytes so far: a busy core reports some only when they have carried bytes."""
        self.number += 1
        line = self._line(connection, now)
        self._flows[connection.id] = flow = _Flow(line, self.number)
        flow.begin(connection.uplink_total, connection.downlink_total, now)
        if self._begun is not None and line is not None:
            self._begun.append((now, connection, line, flow))
        if line is not None:
            line.ids.add(connection.id)
            line.moved = now
            if line.tag in self._multiplexed:
                self._remember(line)
        return line

    def _remember(self, line: Line) -> None:
        before = self._last.pop(line.source, line.pair)
        if before != line.pair:
            _discard(self._sessions, before, line.source)
        self._last[line.source] = line.pair
        self._sessions.setdefault(line.pair, set()).add(line.source)
        if len(self._last) > SESSIONS:
            oldest = next(iter(self._last))
            _discard(self._sessions, self._last.pop(oldest), oldest)

    def _line(self, connection: Connection, now: float) -> Line | None:
        (tag, key), source = pair_of(connection), source_of(connection)
        if source is None or not key or tag not in self._places:
            return None
        handle = self._places[tag] + len(source).to_bytes() + source + key.encode("utf-8", "surrogatepass")
        line = self._lines.get(handle)
        if line is None:
            line = self._lines[handle] = Line(tag, key, source, handle, now)
            self._by_key.setdefault(key, set()).add(handle)
            self._by_source.setdefault(source, set()).add(handle)
        return line

    def place_of(self, handle: Handle) -> tuple[str, Endpoint]:
        """Return the inbound and source address in a handle, whose line may be gone by now."""
        return self._tags[int.from_bytes(handle[:2])], handle[3 : 3 + handle[2]]

    def _end(self, id: str, connection: Connection | None, now: float) -> None:
        """Note the end of a connection, so that an older list does not bring it back."""
        self._ended[id] = None
        if len(self._ended) > REMEMBERED:
            del self._ended[next(iter(self._ended))]
        if id in self._flows:
            if connection is not None:
                self._flows[id].reach(connection.uplink_total, connection.downlink_total, now)
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


class Detours:
    """Inbounds that detour to another one (ShadowTLS, VMess): which connections came through them.

    The core reports such connections, and their users, for the inbound behind. The kernel shows through which one a
    connection came: the client's socket is connected to its port. `ports` has the ports of detouring inbounds, by the
    tag of the inbound behind and by their own tag.
    """

    log = Logger()

    def __init__(self, ports: Mapping[str, Mapping[str, int]]) -> None:
        self._ports = ports

    def by_barred(self, connections: Iterable[Connection], barred: Set[Pair]) -> list[Connection]:
        """Return the connections whose users are barred from the inbound through which they came."""
        suspects: dict[int, list[Connection]] = {}
        for connection in connections if self._ports else ():
            behind, key = pair_of(connection)
            for tag, port in self._ports.get(behind, {}).items():
                if (tag, key) in barred:
                    suspects.setdefault(port, []).append(connection)
        return [connection for port, some in suspects.items() for connection in self._by(port, some)]

    def _by(self, port: int, suspects: list[Connection]) -> list[Connection]:
        """Return those that came through this port; all of them if the kernel does not list connections."""
        try:
            peers = connected([range(port, port + 1)])
        except OSError as error:
            self.log.warn(
                "the kernel does not list connections: users removed from an inbound with a detour lose all their "
                "connections to the inbound behind it: {error}",
                error=error,
            )
            return suspects
        return [connection for connection in suspects if source_of(connection) in peers]
