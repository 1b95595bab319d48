"""A stranger's headers: what gRPC's server could not bear is refused, however it is packed; the rest passes."""

from __future__ import annotations

import itertools

import pytest
from hpack import Encoder
from hypothesis import given
from hypothesis import strategies as st

from node.door.frames import Frame
from node.door.headings import BadHeadings, Headings
from node.http2 import END_HEADERS, PRIORITY, Kind

Field = tuple[bytes, bytes]
CALL: list[Field] = [(b":method", b"POST"), (b":scheme", b"https"), (b":path", b"/x/Y"), (b":authority", b"node")]


def read(headings: Headings, block: bytes, flags: int = 0, at: int = 0, piece: int = 7) -> None:
    """Has it read as HEADERS and, behind `at`, a CONTINUATION, in pieces of a few bytes."""
    parts = [(Kind.HEADERS, flags, block[:at]), (Kind.CONTINUATION, 0, block[at:])] if at else []
    for kind, flag, part in parts or [(Kind.HEADERS, flags, block)]:
        last = END_HEADERS if kind == Kind.CONTINUATION or not at else 0
        frame = Frame(kind, flag | last, 1, len(part))
        for begin in range(0, max(len(part), 1), piece):
            headings.read(frame, memoryview(part)[begin : begin + piece])


@pytest.mark.parametrize("huffman", [False, True])
@pytest.mark.parametrize("at", [0, 5])
def test_usual_calls(huffman: bool, at: int) -> None:
    """One after the other, the later ones by what the first one has said; also what is no text in other fields."""
    encoder, headings = Encoder(), Headings()
    for more in ([], [(b"x-api-key", b"\xff")], []):
        read(headings, encoder.encode(CALL + more, huffman=huffman), at=at)


@pytest.mark.parametrize("huffman", [False, True])
@pytest.mark.parametrize("place", [2, 3])
def test_what_is_no_text(huffman: bool, place: int) -> None:
    """A path, or a name of the node, that is none."""
    fields = [(name, b"/\xff" if number == place else value) for number, (name, value) in enumerate(CALL)]
    with pytest.raises(BadHeadings, match="no text"):
        read(Headings(), Encoder().encode(fields, huffman=huffman))


def test_priority() -> None:
    """What stands before a block is no part of it, and has to be there."""
    read(Headings(), bytes(5) + Encoder().encode(CALL), PRIORITY)
    for payload in (b"", bytes(4)):
        with pytest.raises(BadHeadings, match="shorter"):
            read(Headings(), payload, PRIORITY)


@given(st.lists(st.binary(max_size=60), max_size=8), st.sampled_from((0, PRIORITY)))
def test_any_bytes(blocks: list[bytes], flags: int) -> None:
    """They are read or refused."""
    headings = Headings()
    try:
        for block in blocks:
            read(headings, block, flags)
    except BadHeadings:
        return


def test_a_bomb() -> None:
    """A field that is said once and meant a thousand times."""
    encoder = Encoder()
    first = encoder.encode([(b"a", bytes(4000))])
    again = encoder.encode([(b"a", bytes(4000))])
    headings = Headings()
    with pytest.raises(BadHeadings, match="cannot be read"):
        read(headings, b"".join(itertools.chain([first], itertools.repeat(again, 1000))), piece=10_000)
