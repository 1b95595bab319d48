"""Traffic from a stream that omits and repeats events and starts again."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from drivers.sing_box.tally import CLOSED, REMEMBERED, SPARE, Stream, Tally
from protos.sing_box_pb2 import Connection, ConnectionEvent, ConnectionEvents

NEW, UPDATE = 0, 1


def connection(id: str, up: int, closed: bool = False, user: str = "a") -> Connection:
    return Connection(id=id, user=user, inbound="in", outbound="out", uplink_total=up, closed_at=int(closed))


def new(id: str, up: int = 0, closed: bool = False) -> ConnectionEvent:
    return ConnectionEvent(type=NEW, id=id, connection=connection(id, up, closed))


def update(id: str, added: int) -> ConnectionEvent:
    return ConnectionEvent(type=UPDATE, id=id, uplink_delta=added)


def closed(id: str, up: int) -> ConnectionEvent:
    return ConnectionEvent(type=CLOSED, id=id, connection=connection(id, up, closed=True))


def streamed(*events: ConnectionEvent) -> ConnectionEvents:
    """Events of a running stream."""
    return ConnectionEvents(events=events)


def listed(*events: ConnectionEvent) -> ConnectionEvents:
    """The list at the start of a stream: all open connections, and some that ended."""
    return ConnectionEvents(events=events, reset=True)


def uplink(tally: Tally, name: str = "user>>>a") -> int:
    return tally.counters.get(f"{name}>>>traffic>>>uplink", 0)


def test_a_connection_counts_for_its_user_and_both_ends() -> None:
    """An empty name has no counter."""
    tally = Tally()
    Stream(tally).take(
        streamed(new("1"), update("1", 10), ConnectionEvent(id="2", connection=connection("2", 5, user="")))
    )
    assert [uplink(tally, name) for name in ("user>>>a", "inbound>>>in", "outbound>>>out")] == [10, 15, 15]
    assert not [name for name in tally.counters if name.startswith("user>>>>>>")]


def test_two_streams_count_once() -> None:
    """A list beside the stream has the sum, and the next update counts from the stream's own base."""
    tally = Tally()
    stream = Stream(tally)
    stream.take(streamed(new("1"), update("1", 10)))
    Stream(tally).take(listed(new("1", 25)))
    stream.take(streamed(update("1", 15)))
    assert uplink(tally) == 25
    stream.take(streamed(update("1", 5)))
    assert uplink(tally) == 30


def test_a_repeated_end() -> None:
    """By the same stream, without the connection, and by the list of the next one."""
    tally = Tally()
    stream = Stream(tally)
    stream.take(
        streamed(new("1"), update("1", 10), closed("1", 12), ConnectionEvent(type=CLOSED, id="1"), closed("1", 12))
    )
    Stream(tally).take(listed(new("1", 12, closed=True)))
    assert uplink(tally) == 12


def test_an_omitted_beginning() -> None:
    """Updates of an unknown connection wait for its end, which has the sum."""
    tally = Tally()
    stream = Stream(tally)
    stream.take(streamed(update("1", 10)))
    assert uplink(tally) == 0
    stream.take(streamed(closed("1", 30)))
    assert uplink(tally) == 30


def test_memory_is_bounded() -> None:
    """Only so many closed connections are remembered."""
    tally = Tally()
    stream = Stream(tally)
    for number in range(REMEMBERED + 100):
        stream.take(streamed(new(str(number)), closed(str(number), 1)))
    assert uplink(tally) == REMEMBERED + 100
    assert len(tally._closed) == REMEMBERED
    assert not tally._open and not stream._sums


def test_bytes_while_the_core_reports_a_beginning() -> None:
    """The core reads a new connection's sum twice: updates count from the first reading, the event has the second."""
    tally = Tally()
    stream = Stream(tally)
    stream.take(streamed(new("1", 200)))
    stream.take(streamed(update("1", 200)))
    assert uplink(tally) == 200
    stream.take(streamed(closed("1", 200)))
    assert uplink(tally) == tally.carried == 200


def test_an_omitted_end() -> None:
    """The next list does not have the connection. One that is in it is open, even if it seemed to have ended."""
    tally = Tally()
    stream = Stream(tally)
    stream.take(streamed(new("1"), new("2"), update("1", 10)))
    Stream(tally).take(listed(new("2", 5)))
    assert (list(tally._open), list(tally._closed), tally.ended) == (["2"], ["1"], 1)
    Stream(tally).take(listed(new("1", 15), new("2", 5)))
    assert tally._open.keys() == {"1", "2"} and not tally._closed
    assert uplink(tally) == 20


@given(st.data())
def test_no_byte_twice_and_all_in_the_end(data: st.DataObject) -> None:
    """Whatever events but ends the stream omits, and however often it starts again: no byte counts twice."""
    tally = Tally()
    stream = Stream(tally)
    carried: dict[str, int] = {}
    known: dict[str, int] = {}
    open_: set[str] = set()

    def carry(id: str) -> None:
        carried[id] += data.draw(st.integers(0, 100))

    for _ in range(data.draw(st.integers(0, 30))):
        match data.draw(st.sampled_from(["open", "carry", "tick", "list", "again", "close"])):
            case "open":
                id = str(len(carried))
                open_.add(id)
                carried[id] = known[id] = data.draw(st.integers(0, 100))
                carry(id)
                if data.draw(st.booleans()):
                    stream.take(streamed(new(id, carried[id])))
            case "carry" if open_:
                carry(data.draw(st.sampled_from(sorted(open_))))
            case "tick":
                for id in sorted(open_):
                    event, known[id] = update(id, carried[id] - known[id]), carried[id]
                    if data.draw(st.booleans()):
                        stream.take(streamed(event))
            case "list":
                Stream(tally).take(listed(*(new(id, carried[id]) for id in open_)))
            case "again":
                stream = Stream(tally)
                begins = [new(id, carried[id], closed=id not in open_) for id in carried]
                for id in sorted(open_):
                    carry(id)
                known = dict(carried)
                stream.take(listed(*begins))
            case "close" if open_:
                id = data.draw(st.sampled_from(sorted(open_)))
                open_.discard(id)
                stream.take(streamed(closed(id, carried[id])))
        assert uplink(tally) <= sum(carried.values())
    stream.take(streamed(*(closed(id, carried[id]) for id in open_)))
    assert uplink(tally) == sum(carried.values())


def test_memory_of_omitted_ends_is_bounded() -> None:
    """A stream may go on for months. Updates of open connections still count."""
    tally = Tally()
    stream = Stream(tally)
    stream.take(streamed(new("long", 1)))
    for number in range(10 * SPARE):
        stream.take(streamed(new(str(number), 1)))
        if number % 100 == 0:
            Stream(tally).take(listed(new("long", 1)))
    assert len(stream._sums) <= 2 * SPARE
    stream.take(streamed(update("long", 5)))
    assert uplink(tally) == 10 * SPARE + 5


def test_a_hand_over() -> None:
    """Bytes count once, of connections that are open, ended before, or end meanwhile."""
    before = Tally()
    Stream(before).take(streamed(new("1"), update("1", 10), new("2"), update("2", 20), closed("2", 25), new("3")))
    after = Tally()
    after.unpack(before.packed)
    assert (after.counters, after.open_ids, after.carried, after.ended) == (before.counters, {"1", "3"}, 35, 1)
    Stream(after).take(listed(new("1", 12), new("2", 25, closed=True), new("3", 7, closed=True), new("4", 1)))
    assert uplink(after) == 12 + 25 + 7 + 1 and after.open_ids == {"1", "4"}
