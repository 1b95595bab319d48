"""Parsing HTTP/2 frames by their headers: however the bytes are cut, and whatever they are."""

from __future__ import annotations

import itertools

from hyperframe.frame import Frame as Reference
from hyperframe.frame import GoAwayFrame
from hypothesis import given
from hypothesis import strategies as st

from node.http2.frames import PREFACE, Code, Frame, FrameScanner, goaway


def packed(frame: Frame, payload: bytes) -> bytes:
    head = len(payload).to_bytes(3) + bytes((frame.kind, frame.flags)) + frame.stream.to_bytes(4)
    return head + payload


def begun(reader: FrameScanner, piece: bytes) -> list[Frame]:
    """The frames that begin in this piece."""
    return [part.frame for part in reader.feed(piece) if part.begins]


bytes_ = st.integers(0, 255)
frames = st.builds(
    lambda kind, flags, stream, payload: (Frame(kind, flags, stream, len(payload)), payload),
    bytes_,
    bytes_,
    st.integers(0, 2**31 - 1),
    st.binary(max_size=40),
)
cuts = st.lists(st.integers(0, 2000), max_size=30)


def pieces(data: bytes, at: list[int]) -> list[bytes]:
    """Cut the data at these places."""
    places = sorted({0, len(data), *(place for place in at if place < len(data))})
    return [data[begin:end] for begin, end in itertools.pairwise(places)]


@given(st.lists(frames, max_size=20), cuts)
def test_every_frame_is_found_however_it_is_cut(sent: list[tuple[Frame, bytes]], at: list[int]) -> None:
    reader = FrameScanner(skip=len(PREFACE))
    data = PREFACE + b"".join(packed(frame, payload) for frame, payload in sent)
    found = [frame for piece in pieces(data, at) for frame in begun(reader, piece)]
    assert found == [frame for frame, _ in sent]
    assert reader.between


@given(st.binary(max_size=500), cuts)
def test_any_bytes_are_frames(data: bytes, at: list[int]) -> None:
    """Whatever comes, nothing is raised, no more than a header is kept, and the cuts make no difference."""
    whole, cut = FrameScanner(), FrameScanner()
    found = [frame for piece in pieces(data, at) for frame in begun(cut, piece)]
    assert found == begun(whole, data)
    assert cut.between == whole.between
    assert len(cut._begun) < 9


@given(frames)
def test_as_others_read_them(sent: tuple[Frame, bytes]) -> None:
    """The reserved bit of a stream is ignored; a known kind is parsed as by the reference."""
    frame, payload = sent
    data = bytearray(packed(frame, payload))
    data[5] |= 0x80
    (found,) = begun(FrameScanner(), bytes(data))
    assert found == frame
    if frame.kind in range(10) and not (frame.stream == 0) ^ (frame.kind in (4, 6, 7)) and frame.kind != 8:
        reference, length = Reference.parse_frame_header(memoryview(packed(frame, payload)[:9]))
        assert (reference.type, reference.stream_id, length) == (found.kind, found.stream, found.length)


def test_between() -> None:
    """Inside a header or a payload is not between two frames."""
    reader, data = FrameScanner(), packed(Frame(0, 0, 1, 3), b"abc")
    for byte in data[:-1]:
        reader.feed(bytes((byte,)))
        assert not reader.between
    reader.feed(data[-1:])
    assert reader.between


def test_goaway() -> None:
    """Another implementation parses our GOAWAY."""
    data = goaway(77, Code.ENHANCE_YOUR_CALM)
    frame, length = Reference.parse_frame_header(memoryview(data[:9]))
    assert isinstance(frame, GoAwayFrame)
    frame.parse_body(memoryview(data[9:]))
    assert length == len(data) - 9
    assert (frame.last_stream_id, frame.error_code) == (77, Code.ENHANCE_YOUR_CALM)


@given(st.lists(frames, max_size=20), cuts)
def test_a_frame_may_be_put_into_a_gap(sent: list[tuple[Frame, bytes]], at: list[int]) -> None:
    """A frame inserted into the gap of a piece is parsed; the others are unchanged."""
    reader, other = FrameScanner(), FrameScanner()
    put = packed(Frame(99, 0, 7, 3), b"put")
    puts, found = 0, []
    for piece in pieces(b"".join(packed(frame, payload) for frame, payload in sent), at):
        reader.feed(piece)
        if reader.gap is not None:
            place, puts = reader.gap[0], puts + 1
            assert 0 <= place <= len(piece)
            piece = piece[:place] + put + piece[place:]
        found += begun(other, piece)
    ours = [frame for frame in found if frame == Frame(99, 0, 7, 3)]
    assert len(ours) - [frame for frame, _ in sent].count(Frame(99, 0, 7, 3)) == puts
    assert [frame for frame in found if frame != Frame(99, 0, 7, 3)] == [
        frame for frame, _ in sent if frame != Frame(99, 0, 7, 3)
    ]


def test_a_long_message_has_gaps() -> None:
    """Frames of 16 KiB in pieces of 64: each piece has a gap, though none ends with a frame."""
    reader, kept = FrameScanner(), 0
    data = packed(Frame(0, 0, 1, 16_384), bytes(16_384)) * 64
    for begin in range(0, len(data), 65_536):
        reader.feed(data[begin : begin + 65_536])
        kept += reader.gap is not None
    assert kept == len(range(0, len(data), 65_536))
