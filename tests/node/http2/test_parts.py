"""Frames, header blocks and messages, wherever the bytes are cut."""

from __future__ import annotations

import contextlib
import itertools
from functools import partial

import pytest
from hpack import Encoder
from hypothesis import given
from hypothesis import strategies as st

from node.http2 import headers
from node.http2.frames import (
    END_STREAM,
    PADDED,
    PRIORITY,
    Kind,
    Violation,
    WholeFrame,
    WholeFrames,
    frame,
    framed,
    number,
    pairs,
    plain,
)
from node.http2.stream import End, Status, Stream, end_of

kinds = st.sampled_from([*Kind])
frames = st.lists(st.builds(WholeFrame, kinds, st.integers(0, 255), st.integers(0, 2**31 - 1), st.binary(max_size=300)))
messages = st.lists(st.binary(max_size=300), max_size=10)
cuts = st.lists(st.integers(0, 3000), max_size=8)


def pieces(data: bytes, at: list[int]) -> list[bytes]:
    places = [0, *sorted(min(place, len(data)) for place in at), len(data)]
    return [data[begin:end] for begin, end in itertools.pairwise(places)]


@given(frames, cuts)
def test_frames_wherever_they_are_cut(sent: list[WholeFrame], at: list[int]) -> None:
    data = b"".join(frame(Kind(one.kind), one.flags, one.stream, one.payload) for one in sent)
    reader = WholeFrames()
    assert [found for piece in pieces(data, at) for found in reader.feed(piece)] == sent


@given(messages, cuts)
def test_messages_wherever_they_are_cut(sent: list[bytes], at: list[int]) -> None:
    stream = Stream(1, 0, lambda _: None)
    for piece in pieces(b"".join(map(framed, sent)), at):
        stream.received(piece)
    assert [*stream.messages] == sent and stream.end is None


def test_a_message_that_is_compressed() -> None:
    stream = Stream(1, 0, lambda _: None)
    stream.received(b"\1\0\0\0\1x")
    assert stream.end is not None and stream.end.status == Status.INTERNAL and not stream.messages


@given(st.binary(max_size=50), st.integers(0, 255), st.booleans())
def test_what_stands_around_a_payload(payload: bytes, padding: int, priority: bool) -> None:
    first = bytes(5) if priority else b""
    whole = bytes([padding]) + first + payload + bytes(padding)
    flags = PADDED | (PRIORITY if priority else 0) | END_STREAM
    assert plain(Kind.HEADERS, flags, whole) == payload


@given(st.binary(max_size=20), st.integers(0, 255))
def test_frames_that_contradict_themselves(payload: bytes, flags: int) -> None:
    """Any payload gives bytes or `Violation`."""
    for kind in Kind:
        for read in (partial(plain, kind, flags), number, lambda payload: list(pairs(payload))):
            with contextlib.suppress(Violation):
                read(payload)


@pytest.mark.parametrize("payload", [b"", b"\0\1"])
def test_frames_that_are_too_short(payload: bytes) -> None:
    with pytest.raises(Violation):
        number(payload)


def test_settings_that_are_cut_off() -> None:
    with pytest.raises(Violation):
        list(pairs(b"\0\1\0"))


def test_header_blocks_are_independent() -> None:
    """No block needs another one, on either side."""
    block = headers.request("/core.Core/Call", (("authorization", "Bearer x"),))
    for _ in range(2):
        read = headers.reply(block)
        assert (read[":path"], read["authorization"], read["te"]) == ("/core.Core/Call", "Bearer x", "trailers")
    encoder = Encoder()
    encoder.header_table_size = 0
    for value in ("0", "5", "5"):
        assert headers.reply(encoder.encode([("grpc-status", value)])) == {"grpc-status": value}


@pytest.mark.parametrize("block", [b"\xbe", b"\xff\xff\xff\xff\xff\xff", b"\x40"])
def test_headers_that_cannot_be_read(block: bytes) -> None:
    """Among them those that use the dynamic table, which our SETTINGS forbid."""
    with pytest.raises(Violation):
        headers.reply(block)


@pytest.mark.parametrize(
    ("trailers", "end"),
    [
        ({"grpc-status": "0"}, End(0)),
        ({"grpc-status": "5", "grpc-message": "no %E2%80%98user%E2%80%99"}, End(5, "no ‘user’")),
        ({"grpc-status": "x"}, End(Status.UNAVAILABLE, "the core answered without a gRPC status (HTTP 200)")),
        ({":status": "502"}, End(Status.UNAVAILABLE, "the core answered without a gRPC status (HTTP 502)")),
    ],
)
def test_ends(trailers: dict[str, str], end: End) -> None:
    assert end_of(trailers) == end
