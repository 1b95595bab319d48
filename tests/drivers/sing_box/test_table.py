"""The table of open connections, from a stream that omits and repeats events and starts again."""

from __future__ import annotations

import socket
from collections import Counter
from unittest import mock

from hypothesis import given
from hypothesis import strategies as st

from drivers.sing_box import table
from drivers.sing_box.table import Line, Table, online_by_key
from drivers.sing_box.tally import CLOSED
from protos.sing_box_pb2 import Connection, ConnectionEvent, ConnectionEvents

NEW, UPDATE = 0, 1
KEYS = ("anna", "bert")


def connection(
    id: str, user: str = "Anna", source: str = "127.0.0.2:7", up: int = 0, closed: bool = False
) -> Connection:
    return Connection(id=id, user=user, inbound="in", source=source, uplink_total=up, closed_at=int(closed))


def new(id: str, user: str = "Anna", source: str = "127.0.0.2:7", up: int = 0) -> ConnectionEvent:
    return ConnectionEvent(type=NEW, id=id, connection=connection(id, user, source, up))


def update(id: str, added: int) -> ConnectionEvent:
    return ConnectionEvent(type=UPDATE, id=id, uplink_delta=added)


def closed(id: str, up: int = 0) -> ConnectionEvent:
    connection = Connection(id=id, user="Anna", inbound="in", source="127.0.0.2:7", uplink_total=up, closed_at=1)
    return ConnectionEvent(type=CLOSED, id=id, connection=connection)


def streamed(*events: ConnectionEvent) -> ConnectionEvents:
    """Events of a running stream."""
    return ConnectionEvents(events=events)


def listed(*events: ConnectionEvent) -> ConnectionEvents:
    """The list at the start of a stream."""
    return ConnectionEvents(events=events, reset=True)


def there(seen: Table) -> dict[tuple[str, bytes], set[str]]:
    """The core's connections of each user by source address."""
    return {(line.key, line.source): line.ids for line in seen.of(KEYS)}


def source(text: str, port: int) -> bytes:
    family = socket.AF_INET6 if ":" in text else socket.AF_INET
    return socket.inet_pton(family, text) + port.to_bytes(2)


def test_users_online() -> None:
    """Of each user the addresses, of both families, and when the newest connection from each began, in seconds."""
    begun = [("a", "Anna", "10.0.0.1:1", 5000), ("b", "anna", "10.0.0.1:2", 7999), ("c", "Anna", "[fd00::1]:3", 6000)]
    some = [Connection(id=id, user=user, source=source, created_at=at) for id, user, source, at in begun]
    some.append(Connection(id="d", user="bert", source="10.0.0.1:4", created_at=1000))
    assert online_by_key(some) == {"anna": {"10.0.0.1": 7, "fd00::1": 6}, "bert": {"10.0.0.1": 1}}
    assert online_by_key([]) == {}


def test_connections_from_one_address() -> None:
    """Several connections of a user in one socket are one line, with any spelling of the name; two users have two."""
    seen = Table(["in"])
    fresh = seen.take(
        streamed(new("1"), new("2", "ANNA"), new("3", "bert"), new("4", source="[::ffff:127.0.0.2]:7")), 0
    )
    (annas,), (berts,) = seen.of(["anna"]), seen.of(["bert"])
    assert fresh == [annas, annas, berts, annas]
    assert (annas.ids, berts.ids, annas.address) == ({"1", "2", "4"}, {"3"}, socket.inet_aton("127.0.0.2"))
    assert annas.handle != berts.handle and not seen.is_alone(annas)
    seen.take(streamed(closed("3"), closed("1")), 0)
    assert seen.of(KEYS) == [annas] and seen.is_alone(annas) and not seen.has("bert")


def test_a_beginning_and_its_end_in_one_message() -> None:
    """The line is returned, and is alone at its address unless another user is there."""
    seen = Table(["in"])
    (line,) = seen.take(streamed(new("1"), closed("1")), 0)
    assert not line.ids and seen.is_alone(line)
    seen.take(streamed(new("2", "bert")), 0)
    assert not seen.is_alone(line)


def test_connections_that_do_not_count() -> None:
    """Through an unmanaged inbound, without a user, without an address: they have no line, and no list is needed."""
    seen = Table(["in"])
    other = Connection(id="1", user="anna", inbound="other", source="127.0.0.2:7")
    some = [
        ConnectionEvent(id="1", connection=other),
        new("2", user=""),
        new("3", source="here:1"),
        new("4", source=""),
    ]
    seen.renew(listed(), 0, 0)
    assert not seen.take(streamed(*some, *(update(str(number), 1) for number in range(1, 5))), 0)
    assert not seen.of(KEYS) and not seen.lacks and not seen.has("")
    seen.take(streamed(new("5", source="[fe80::1%eth0]:9")), 0)
    assert [line.source for line in seen.of(KEYS)] == [source("fe80::1", 9)]


def test_bytes_and_silence() -> None:
    """An update adds bytes; the end has the sum; a list adds what the stream omitted, and nothing that it has."""
    seen = Table(["in"])
    (line,) = seen.take(streamed(new("1")), 1)
    seen.take(streamed(update("1", 5)), 2)
    seen.take(streamed(update("1", 0)), 3)
    assert (line.up, line.moved) == (5, 2)
    seen.renew(listed(new("1", up=5)), seen.number, 4)
    assert (line.up, line.moved) == (5, 2)
    seen.renew(listed(new("1", up=50)), seen.number, 5)
    assert (line.up, line.moved) == (50, 5)
    # The stream's next update has the bytes since its last one; the list had those.
    seen.take(streamed(update("1", 45)), 6)
    assert (line.up, line.moved) == (50, 5)
    seen.take(streamed(new("2"), closed("1", up=60)), 7)
    assert (line.up, line.moved) == (60, 7)
    (late,) = Table(["in"]).renew(listed(new("9", up=7)), 0, 8)
    assert (late.up, late.moved) == (7, 8)


def test_a_beginning_that_is_late() -> None:
    """On a busy machine the core reports a connection after its first bytes: its updates do not have those."""
    seen = Table(["in"])
    (line,) = seen.take(streamed(new("1", up=5)), 1)
    assert (line.up, line.moved) == (5, 1)
    seen.take(streamed(update("1", 2)), 2)
    assert (line.up, line.moved) == (7, 2)


def test_an_omitted_beginning() -> None:
    """Updates reveal it, but not after the end, which an update may follow."""
    seen = Table(["in"])
    seen.renew(listed(), 0, 0)
    seen.take(streamed(closed("1"), update("1", 1)), 0)
    assert not seen.lacks
    seen.take(streamed(update("2", 1)), 0)
    assert seen.lacks
    seen.renew(listed(new("1"), new("2")), seen.number, 0)
    assert [line.ids for line in seen.of(KEYS)] == [{"2"}] and not seen.lacks


def test_an_old_list() -> None:
    """Connections that began after its request stay; older ones that are not in it have ended."""
    seen = Table(["in"])
    seen.take(streamed(new("1"), new("2", "bert")), 0)
    number = seen.number
    seen.take(streamed(new("3")), 0)
    assert not seen.renew(listed(new("2", "bert")), number, 0)
    assert there(seen) == {("anna", source("127.0.0.2", 7)): {"3"}, ("bert", source("127.0.0.2", 7)): {"2"}}


def test_memory_is_bounded() -> None:
    seen = Table(["in"])
    for number in range(table.REMEMBERED + 100):
        seen.take(streamed(new(str(number)), closed(str(number))), 0)
    assert len(seen._ended) == table.REMEMBERED
    assert not (seen._flows or seen._lines or seen._by_key or seen._by_source)


@given(st.data())
def test_the_table_has_all_open_connections(data: st.DataObject) -> None:
    """Whatever is omitted, repeated or listed late: after the next list the table is exact."""
    seen = Table(["in"])
    open_: dict[str, tuple[str, int]] = {}
    ended: list[str] = []
    late: tuple[ConnectionEvents, int] | None = None
    heard: Counter[str] = Counter()

    def event(id: str) -> ConnectionEvent:
        key, port = open_[id]
        return new(id, key, f"127.0.0.2:{port}")

    def say(*events: ConnectionEvent) -> None:
        """The stream may omit or repeat an event."""
        for _ in range(data.draw(st.sampled_from([1, 0, 2]))):
            note(seen.take(streamed(*events), 0))

    def note(fresh: list[Line]) -> None:
        heard.update(line.key for line in fresh)

    def everything() -> ConnectionEvents:
        return listed(*map(event, open_), *map(closed, ended))

    for _ in range(data.draw(st.integers(0, 40))):
        match data.draw(st.sampled_from(["open", "close", "move", "ask", "answer", "list"])):
            case "open":
                id = str(len(open_) + len(ended))
                open_[id] = data.draw(st.sampled_from(KEYS)), data.draw(st.integers(1, 3))
                say(event(id))
            case "close" if open_:
                id = data.draw(st.sampled_from(sorted(open_)))
                del open_[id]
                ended.append(id)
                say(data.draw(st.sampled_from([closed(id), ConnectionEvent(type=CLOSED, id=id)])))
            case "move" if open_:
                say(update(data.draw(st.sampled_from(sorted(open_))), 1))
            case "ask":
                late = everything(), seen.number
            case "answer" if late:
                note(seen.renew(*late, 0))
                late = None
            case "list":
                note(seen.renew(everything(), seen.number, 0))
    note(seen.renew(everything(), seen.number, 0))
    expected: dict[tuple[str, bytes], set[str]] = {}
    for id, (key, port) in open_.items():
        expected.setdefault((key, source("127.0.0.2", port)), set()).add(id)
    assert there(seen) == expected and not seen.lacks
    assert all(seen.has(key) == any(key == other for other, _ in open_.values()) for key in KEYS)
    assert all(heard[key] >= sum(key == other for other, _ in open_.values()) for key in KEYS)
    handles = [line.handle for line in seen.of(KEYS)]
    assert len(set(handles)) == len(handles) == len(seen) and all(seen.get(handle) for handle in handles)


def test_the_address_in_a_handle() -> None:
    """It is there without the line, for both families and any name; a new connection from the port is noticed."""
    seen = Table(["other", "in"])
    for place in ("127.0.0.2:7", "[2001:db8::1]:7"):
        seen.take(streamed(new("a", source=place)), 0)
        [line] = seen.of(["anna"])
        assert seen.place_of(line.handle) == ("in", line.source) and not seen.is_free(line.source)
        seen.take(streamed(closed("a")), 0)
        assert seen.place_of(line.handle) == ("in", line.source) and seen.is_free(line.source)
        seen = Table(["other", "in"])


def test_where_users_may_keep_a_session() -> None:
    """The last user of an address is remembered where clients keep sessions, but not if another user is there."""
    place = source("127.0.0.2", 7)
    seen, plain = Table(["in"], ["in"]), Table(["in"])
    for each in (seen, plain):
        each.take(streamed(new("1")), 0)
        assert each.places([("in", "anna")]) == {place: "in"}
        assert not each.places([("in", "bert")]) and not each.places([("other", "anna")])
        each.take(streamed(new("2", "bert")), 0)
        assert not each.places([("in", "anna")]), "they share it"
        assert each.places([("in", "anna"), ("in", "bert")]) == {place: "in"}
        each.take(streamed(closed("2"), closed("1")), 0)
        assert not each.places([("in", "anna")])
    assert seen.places([("in", "bert")]) == {place: "in"} and not plain.places([("in", "bert")])


def test_old_sessions_are_forgotten() -> None:
    """First those without a connection for the longest time."""
    seen = Table(["in"], ["in"])
    with mock.patch.object(table, "SESSIONS", 2):
        for number in (1, 2, 1, 3):
            seen.take(streamed(new(str(seen.number), source=f"127.0.0.2:{number}")), 0)
            seen.take(streamed(closed(str(seen.number - 1))), 0)
    assert seen.places([("in", "anna")]).keys() == {source("127.0.0.2", 1), source("127.0.0.2", 3)}
