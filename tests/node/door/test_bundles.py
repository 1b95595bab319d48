"""Bundles of messages: the client gets the single messages, however the bytes are cut, and all else unchanged."""

from __future__ import annotations

from collections.abc import Iterable

from hypothesis import given
from hypothesis import strategies as st

from node.door.bundles import BUNDLED, Bundles, bundle
from node.http2.frames import Frame, Kind
from tests.node.http2.test_frames import cuts, packed, pieces

# Two streams with bundles, and one of a handler that writes none.
STREAMS, OTHER = (1, 3), 5
HEADERS = [(Frame(Kind.HEADERS, 4, stream, 3), b"abc") for stream in (*STREAMS, OTHER)]


def message(body: bytes) -> bytes:
    """Pack a message as it is on the wire."""
    return b"\0" + len(body).to_bytes(4) + body


def data(stream: int, payload: bytes, size: int = 16_384) -> Iterable[tuple[Frame, bytes]]:
    """Pack DATA frames as the server does for a client that takes `size` bytes at a time."""
    for at in range(0, len(payload), size):
        part = payload[at : at + size]
        yield Frame(Kind.DATA, 0, stream, len(part)), part


def wire(frames: Iterable[tuple[Frame, bytes]]) -> bytes:
    return b"".join(packed(frame, payload) for frame, payload in frames)


def read(sent: bytes) -> tuple[list[tuple[Frame, bytes]], dict[int, bytes]]:
    """Parse the frames, and join the DATA of each stream."""
    found, bodies, at = [], dict[int, bytes](), 0
    while at < len(sent):
        frame = Frame.at(sent, at)
        payload = sent[at + 9 : at + 9 + frame.length]
        found.append((frame, payload))
        if frame.kind == Kind.DATA:
            bodies[frame.stream] = bodies.get(frame.stream, b"") + payload
        at += 9 + frame.length
    assert at == len(sent)
    return found, bodies


batches = st.lists(
    st.tuples(st.sampled_from(STREAMS), st.lists(st.binary(max_size=30), max_size=5), st.integers(1, 60)), max_size=12
)


@given(batches, cuts, st.binary(max_size=9).filter(lambda reply: reply != BUNDLED))
def test_the_client_gets_the_messages(sent: list[tuple[int, list[bytes], int]], at: list[int], reply: bytes) -> None:
    """Bytes sent to the client and bytes returned to the server's window are together all that the server has sent."""
    frames = [*HEADERS, *(frame for stream in STREAMS for frame in data(stream, message(BUNDLED)))]
    for stream, messages, size in sent:
        frames += data(stream, message(bundle(messages)), size)
    frames += [*data(OTHER, message(reply)), (Frame(Kind.PING, 0, 0, 8), bytes(8))]
    bundles, out, back = Bundles({*STREAMS, OTHER}), b"", b""
    for piece in pieces(wire(frames), at):
        out += bundles.feed(piece)
        back += bundles.give_back()
    assert bundles.passed == len(wire(frames))
    found, bodies = read(out)
    for stream in STREAMS:
        lines = [one for whose, messages, _ in sent for one in messages if whose == stream]
        assert bodies.get(stream, b"") == b"".join(map(message, lines))
    assert bodies[OTHER] == message(reply)
    assert [frame for frame in found if frame[0].kind != Kind.DATA] == [*HEADERS, frames[-1]]
    given = [(frame.stream, int.from_bytes(payload)) for frame, payload in read(back)[0]]
    for stream in STREAMS:
        whole = sum(frame.length for frame, _ in frames if (frame.kind, frame.stream) == (Kind.DATA, stream))
        assert sum(size for whose, size in given if whose == stream) == whole - len(bodies.get(stream, b""))
    assert sum(size for whose, size in given if whose == 0) == sum(size for whose, size in given if whose)


@given(st.integers(1, 6), cuts)
def test_the_mark_in_pieces(size: int, at: list[int]) -> None:
    """The client's window may have room for only a part of the mark, where another stream is not read."""
    sent = wire([*HEADERS[:1], *data(1, message(BUNDLED), size), *data(1, message(bundle([b"line"])))])
    bundles = Bundles({1})
    out = b"".join(map(bundles.feed, pieces(sent, at)))
    assert read(out)[1] == {1: message(b"line")}
    assert [frame.stream for frame, _ in read(bundles.give_back())[0]] == [0, 1]


@given(st.integers(1, 7), st.binary(max_size=20), cuts)
def test_a_reply_in_pieces(size: int, reply: bytes, at: list[int]) -> None:
    """A reply that begins like the mark reaches the client completely."""
    bundles = Bundles({1})
    sent = wire([*HEADERS[:1], *data(1, message(b"x" + reply), size)])
    assert read(b"".join(map(bundles.feed, pieces(sent, at))))[1] == {1: message(b"x" + reply)}
    assert bundles.give_back() == b""


@given(st.lists(st.binary(max_size=20), max_size=6), cuts)
def test_other_messages_are_unchanged(messages: list[bytes], at: list[int]) -> None:
    """Also those that look like the mark, where they are not the first message, or not a message at all."""
    first = [*HEADERS[2:], *data(OTHER, message(b"\1")), *data(OTHER, message(BUNDLED))]
    sent = wire([*first, *(frame for one in messages for frame in data(OTHER, message(one), 6))])
    bundles = Bundles({OTHER})
    assert b"".join(map(bundles.feed, pieces(sent, at))) == sent
    assert bundles.give_back() == b""


def test_a_stream_without_bundles_gives_nothing_back() -> None:
    """A WINDOW_UPDATE of zero is an error that ends the connection (RFC 9113, 6.9)."""
    bundles = Bundles({1})
    bundles.feed(wire([*HEADERS[:1], *data(1, message(b"a reply"))]))
    bundles.over(1)
    assert bundles.give_back() == b""


def test_a_truncated_mark_is_given_back() -> None:
    """The stream is gone; the connection's window gets the bytes back."""
    bundles = Bundles({1})
    bundles.feed(wire([*HEADERS[:1], *data(1, message(BUNDLED)[:3])]))
    bundles.over(1)
    assert [(frame.stream, payload) for frame, payload in read(bundles.give_back())[0]] == [(0, bytes((0, 0, 0, 3)))]


def test_a_stream_that_is_over() -> None:
    """Nothing is kept of the stream; what the server still writes is passed on, because the client counts it."""
    opened = {1}
    bundles = Bundles(opened)
    assert bundles.feed(wire([*HEADERS[:1], *data(1, message(BUNDLED))])) == wire(HEADERS[:1])
    opened.clear()
    bundles.over(1)
    late = wire([*HEADERS[:1], *data(1, message(bundle([b"line"])))])
    assert bundles.feed(late) == late
    assert (bundles._fresh, bundles._streams, sum(bundles._taken.values())) == ({}, {}, len(message(BUNDLED)))


@given(st.binary(max_size=500), cuts)
def test_any_bytes(sent: bytes, at: list[int]) -> None:
    """Whatever a server writes, the cuts make no difference."""
    whole, cut = Bundles({1, 3, 5}), Bundles({1, 3, 5})
    assert b"".join(map(cut.feed, pieces(sent, at))) == whole.feed(sent)
    assert (cut.passed, cut.give_back()) == (whole.passed, whole.give_back())
