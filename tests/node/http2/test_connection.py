"""One connection, to a core that sends what the test says."""

from __future__ import annotations

import struct
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from twisted.internet.testing import StringTransport

from node.http2.client import CALLS_BEFORE_SETTINGS, LOST, ClientConnection
from node.http2.frames import (
    ACK,
    END_HEADERS,
    END_STREAM,
    PREFACE,
    Code,
    Kind,
    Setting,
    WholeFrame,
    WholeFrames,
    frame,
    framed,
    reset,
    settings,
    window_update,
)
from node.http2.stream import End, Status, Stream

OK = b"\x88"
# `grpc-status: 0`, as a literal.
DONE = b"\0\x0bgrpc-status\x010"


class Core:
    """A core: what it receives, and what it sends."""

    def __init__(self) -> None:
        self.transport = StringTransport()
        self.connection = ClientConnection()
        self.connection.makeConnection(self.transport)
        assert self.transport.value().startswith(PREFACE)
        # The core may have allowed larger frames.
        self._frames = WholeFrames(2**24)
        self._read = len(PREFACE)
        assert [one.kind for one in self.seen()] == [Kind.SETTINGS, Kind.WINDOW_UPDATE]

    def seen(self) -> list[WholeFrame]:
        data = self.transport.value()[self._read :]
        self._read += len(data)
        return self._frames.feed(data)

    @staticmethod
    def read(data: bytes) -> list[WholeFrame]:
        return WholeFrames(2**24).feed(data)

    def sent(self, stream: int) -> bytes:
        """Return the bytes that came since of a stream's request."""
        return b"".join(one.payload for one in self.seen() if one.kind == Kind.DATA and one.stream == stream)

    def says(self, *frames: bytes) -> None:
        self.connection.dataReceived(b"".join(frames))

    def answers(self, stream: int, *messages: bytes) -> None:
        self.says(
            frame(Kind.HEADERS, END_HEADERS, stream, OK),
            *(frame(Kind.DATA, 0, stream, framed(message)) for message in messages),
            frame(Kind.HEADERS, END_HEADERS | END_STREAM, stream, DONE),
        )

    def call(self, message: bytes = b"x") -> Stream:
        return self.connection.open(b"head", message)


def ends(streams: Iterable[Stream]) -> list[int | None]:
    return [stream.end.status if stream.end else -1 for stream in streams]


def test_calls_side_by_side() -> None:
    core = Core()
    streams = [core.call(bytes([number])) for number in range(3)]
    headers = [one for one in core.seen() if one.kind == Kind.HEADERS]
    assert [one.stream for one in headers] == [stream.number for stream in streams] == [1, 3, 5]
    for stream in reversed(streams):
        core.answers(stream.number, b"to %d" % stream.number)
    assert [[*stream.messages] for stream in streams] == [[b"to 1"], [b"to 3"], [b"to 5"]]
    assert ends(streams) == [Status.OK] * 3


@given(st.lists(st.integers(1, 30_000), max_size=30), st.integers(0, 100_000), st.integers(16_384, 40_000))
def test_no_more_is_sent_than_the_core_takes(more: list[int], first: int, largest: int) -> None:
    """Whatever windows the core opens, for the connection and the stream, and when: all bytes arrive, in order."""
    core, message = Core(), bytes(range(256)) * 600
    core.says(settings({Setting.INITIAL_WINDOW_SIZE: first, Setting.MAX_FRAME_SIZE: largest}))
    core.seen()
    stream = core.call(message)
    windows = {0: 65_535, stream.number: first}
    got = b""
    for size in [*more, None]:
        frames = [one for one in core.seen() if one.kind == Kind.DATA]
        assert all(len(one.payload) <= largest for one in frames)
        part = b"".join(one.payload for one in frames)
        got += part
        windows = {number: window - len(part) for number, window in windows.items()}
        assert min(windows.values()) >= 0 or got == framed(message)
        if size is None:
            break
        place = (0, stream.number)[size % 2]
        windows[place] += size
        core.says(window_update(place, size))
    core.says(window_update(0, 200_000), window_update(stream.number, 200_000))
    frames = [one for one in core.seen() if one.kind == Kind.DATA]
    got += b"".join(one.payload for one in frames)
    assert got == framed(message)


def test_a_window_that_shrinks() -> None:
    """Even below zero: the call waits until there is room again. Others go on."""
    core = Core()
    large = core.call(bytes(100_000))
    assert len(core.sent(large.number)) == 65_535
    core.says(settings({Setting.INITIAL_WINDOW_SIZE: 10}), window_update(0, 1_000_000))
    assert not core.sent(large.number)
    core.says(window_update(large.number, 65_525))
    assert not core.sent(large.number)
    small = core.call(b"abc")
    assert core.sent(small.number) == framed(b"abc")
    core.says(window_update(large.number, 100_000))
    assert len(core.sent(large.number)) == 100_005 - 65_535


def test_a_cancelled_call_is_reset_once() -> None:
    """Its answer is ignored, and it does not block others that wait for room."""
    core = Core()
    large, other = core.call(bytes(100_000)), core.call(b"abc")
    core.seen()
    large.close()
    large.close()
    assert [(one.kind, one.stream) for one in core.seen()] == [(Kind.RST_STREAM, large.number)]
    core.says(window_update(0, 100))
    assert core.sent(other.number) == framed(b"abc")
    core.answers(large.number, b"late")
    core.answers(other.number, b"cba")
    other.close()
    assert not core.seen() and not large.messages
    assert not core.connection._streams and not core.connection._unsent


def test_window_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also for streams that were given up: the connection's window is shared."""
    monkeypatch.setattr("node.http2.client.WINDOW_UPDATE_AFTER", 1000)
    core = Core()
    stream = core.call()
    core.seen()
    core.says(frame(Kind.DATA, 0, stream.number, bytes(999)), frame(Kind.DATA, 0, 77, bytes(500)))
    core.says(frame(Kind.DATA, 0, stream.number, bytes(10)))
    updates = [(one.stream, struct.unpack(">L", one.payload)[0]) for one in core.seen()]
    assert updates == [(0, 1499), (stream.number, 1009)]


def test_goaway() -> None:
    """Calls up to the last stream go on, then the connection ends; later ones fail, and no call begins here."""
    core = Core()
    streams = [core.call() for _ in range(3)]
    core.says(frame(Kind.GOAWAY, 0, 0, struct.pack(">LL", streams[1].number, 0)))
    assert not core.connection.usable
    assert ends(streams) == [-1, -1, Status.UNAVAILABLE]
    core.answers(1, b"a")
    assert not core.transport.disconnecting
    core.answers(3, b"b")
    assert core.transport.disconnecting
    assert ends(streams[:2]) == [Status.OK] * 2


def begun(core: Core) -> list[tuple[int, int]]:
    """Kinds and streams of the calls that were begun or reset since the last look."""
    return [(one.kind, one.stream) for one in core.seen() if one.kind in (Kind.HEADERS, Kind.RST_STREAM)]


def test_no_more_calls_at_once_than_the_core_takes() -> None:
    """The others wait, in order; one that is cancelled before its turn was never begun."""
    core = Core()
    core.says(settings({Setting.MAX_CONCURRENT_STREAMS: 2}))
    streams = [core.call() for _ in range(6)]
    assert begun(core) == [(Kind.HEADERS, 1), (Kind.HEADERS, 3)]
    streams[3].close()
    core.answers(3)
    assert begun(core) == [(Kind.HEADERS, 5)]
    streams[0].close()
    assert begun(core) == [(Kind.RST_STREAM, 1), (Kind.HEADERS, 9)]
    core.says(settings({Setting.MAX_CONCURRENT_STREAMS: 3}))
    assert begun(core) == [(Kind.HEADERS, 11)]
    for number in (5, 9, 11):
        core.answers(number)
    assert ends(streams) == [None, 0, 0, None, 0, 0] and not core.connection.busy


def test_calls_before_the_settings() -> None:
    """The core may refuse calls above its limit to come; after SETTINGS without a limit all are begun."""
    core = Core()
    streams = [core.call() for _ in range(300)]
    assert len(begun(core)) == CALLS_BEFORE_SETTINGS
    core.says(settings({}))
    assert len(begun(core)) == 300 - CALLS_BEFORE_SETTINGS
    streams.append(core.call())
    core.says(settings({Setting.MAX_CONCURRENT_STREAMS: 1}))
    streams += [core.call(), core.call()]
    core.says(frame(Kind.GOAWAY, 0, 0, struct.pack(">LL", 2**31 - 1, 0)))
    assert begun(core) == [(Kind.HEADERS, streams[300].number)]
    assert ends(streams[300:]) == [-1, Status.UNAVAILABLE, Status.UNAVAILABLE]
    core.connection.connectionLost()
    assert ends(streams) == [Status.UNAVAILABLE] * 303


def test_ends_of_all_kinds() -> None:
    core = Core()
    streams = [core.call() for _ in range(4)]
    core.says(reset(1, Code.CANCEL))
    core.says(frame(Kind.HEADERS, END_HEADERS, 3, b"\x8d"))  # status 404
    core.says(frame(Kind.DATA, END_STREAM, 5, b""))
    core.connection.connectionLost()
    assert ends(streams) == [Status.UNAVAILABLE] * 4
    assert streams[3].end == End(Status.UNAVAILABLE, LOST)
    assert not core.connection.usable and not core.connection._streams


def test_headers_in_parts() -> None:
    core = Core()
    stream = core.call()
    core.says(frame(Kind.HEADERS, END_STREAM, 1, DONE[:4]), frame(Kind.CONTINUATION, 0, 1, DONE[4:9]))
    assert stream.end is None
    core.says(frame(Kind.CONTINUATION, END_HEADERS, 1, DONE[9:]))
    assert ends([stream]) == [Status.OK]


@pytest.mark.parametrize(
    "broken",
    [
        frame(Kind.HEADERS, 0, 1, OK) + frame(Kind.DATA, 0, 1, b""),
        frame(Kind.HEADERS, END_HEADERS | END_STREAM, 1, b"\xbe"),
        frame(Kind.RST_STREAM, 0, 1, b"\0"),
        frame(Kind.SETTINGS, 0, 0, b"\0"),
        frame(Kind.GOAWAY, 0, 0, b""),
    ],
)
def test_a_core_that_violates_the_protocol(broken: bytes) -> None:
    """The connection is closed, and the calls under way fail."""
    core = Core()
    stream = core.call()
    core.says(broken)
    assert ends([stream]) == [Status.UNAVAILABLE] and not core.connection.usable


def test_settings_and_pings_are_answered() -> None:
    core = Core()
    core.call()
    core.seen()
    core.says(settings({}), frame(Kind.PING, 0, 0, b"12345678"), frame(Kind.PING, ACK, 0, b"87654321"))
    core.says(frame(Kind.SETTINGS, ACK, 0), bytes(3) + b"\x63" + bytes(5))
    assert core.seen() == [WholeFrame(Kind.SETTINGS, ACK, 0, b""), WholeFrame(Kind.PING, ACK, 0, b"12345678")]


def test_a_ping_with_the_last_answer_is_answered_with_the_next_call() -> None:
    """Also if it came before the core knew of the answer, and no later than the next one."""
    core = Core()
    stream = core.call()
    core.seen()
    pings = [frame(Kind.PING, 0, 0, bytes([number]) * 8) for number in range(4)]
    pongs = [WholeFrame(Kind.PING, ACK, 0, bytes([number]) * 8) for number in range(4)]
    core.says(pings[0], frame(Kind.HEADERS, END_HEADERS | END_STREAM, 1, DONE))
    assert ends([stream]) == [Status.OK] and core.seen() == []
    core.call()
    assert [one for one in core.seen() if one.kind == Kind.PING] == pongs[:1]
    core.says(frame(Kind.HEADERS, END_HEADERS | END_STREAM, 3, DONE), pings[1])
    assert core.seen() == []
    core.says(pings[2])
    core.says(pings[3])
    assert core.seen() == pongs[1:3]


def test_numbers_run_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then no call begins here any more; those under way go on."""
    core = Core()
    core.connection._next = 2**31 - 1
    stream = core.call()
    assert not core.connection.usable
    core.answers(stream.number, b"a")
    assert ends([stream]) == [Status.OK] and core.transport.disconnecting
