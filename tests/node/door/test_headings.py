"""Headers of clients without a key: those that gRPC's server might not survive are refused, however packed."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hpack import Encoder
from hypothesis import given
from hypothesis import strategies as st

from node.door.manners import Headings
from node.http2.frames import END_HEADERS, PRIORITY, Frame, Kind, Violation
from tests.harness.strangers import nobody

Field = tuple[bytes, bytes]
CALL: list[Field] = [(b":method", b"POST"), (b":scheme", b"https"), (b":path", b"/x/Y"), (b":authority", b"node")]


def read(headings: Headings, block: bytes, flags: int = 0, at: int = 0, piece: int = 7) -> None:
    """Read a block as HEADERS and, from `at` on, a CONTINUATION, in pieces of a few bytes."""
    parts = [(Kind.HEADERS, flags, block[:at]), (Kind.CONTINUATION, 0, block[at:])] if at else []
    for kind, flag, part in parts or [(Kind.HEADERS, flags, block)]:
        last = END_HEADERS if kind == Kind.CONTINUATION or not at else 0
        frame = Frame(kind, flag | last, 1, len(part))
        for begin in range(0, max(len(part), 1), piece):
            headings.read(frame, memoryview(part)[begin : begin + piece])


@pytest.mark.parametrize("huffman", [False, True])
@pytest.mark.parametrize("at", [0, 5])
def test_usual_calls(huffman: bool, at: int) -> None:
    """Several calls, the later ones with indexed fields; bytes that are not text are allowed in other fields."""
    encoder, headings = Encoder(), Headings(nobody)
    for more in ([], [(b"x-api-key", b"\xff")], []):
        read(headings, encoder.encode(CALL + more, huffman=huffman), at=at)


@pytest.mark.parametrize("huffman", [False, True])
@pytest.mark.parametrize("place", [2, 3])
def test_fields_that_are_not_ascii(huffman: bool, place: int) -> None:
    """A path, or an authority, that is not ASCII."""
    fields = [(name, "/é".encode() if number == place else value) for number, (name, value) in enumerate(CALL)]
    with pytest.raises(Violation, match="not ASCII"):
        read(Headings(nobody), Encoder().encode(fields, huffman=huffman))


RIGHT = b"the right key"


def knows(authorization: Sequence[str], keys: Sequence[str]) -> bool:
    presented = [*authorization, *keys]
    return bool(presented) and all(key.encode("utf-8", "surrogateescape") == RIGHT for key in presented)


@pytest.mark.parametrize("huffman", [False, True])
@pytest.mark.parametrize("at", [0, 5])
@pytest.mark.parametrize("name", [b"authorization", b"x-api-key"])
def test_the_key(name: bytes, at: int, huffman: bool) -> None:
    """The key is found when its block is complete."""
    encoder, headings = Encoder(), Headings(knows)
    for more, shown in (([], False), ([(name, b"\xff")], False), ([(name, RIGHT)], True)):
        read(headings, encoder.encode(CALL + more, huffman=huffman), at=at)
        assert headings.shown is shown


@pytest.mark.parametrize(
    ("fields", "astray"),
    [
        (CALL, True),
        ([*CALL, (b"x-api-key", b"wrong")], False),
        ([*CALL, (b"authorization", b"")], False),
        ([(b":method", b"GET")], True),
        ([(b":path", b"/service.NodeService/Start")], False),
        ([(b":path", b"/grpc.health.v1.Health/Check")], False),
        ([(b":path", b"/service.NodeServices")], True),
    ],
)
def test_strangers(fields: list[Field], astray: bool) -> None:
    """A request with neither a key nor the path of a service; one that follows does not change that."""
    encoder, headings = Encoder(), Headings(knows)
    read(headings, encoder.encode(fields))
    assert headings.astray is astray
    read(headings, encoder.encode([*CALL, (b"x-api-key", RIGHT)]))
    assert headings.shown
    assert headings.astray is astray


def test_many_keys() -> None:
    """With more keys than a client sends, only gRPC's server checks them, whichever are valid."""
    compared: list[str] = []

    def compare(authorization: Sequence[str], keys: Sequence[str]) -> bool:
        compared.extend((*authorization, *keys))
        return True

    headings = Headings(compare)
    read(headings, Encoder().encode([*CALL, *[(b"x-api-key", RIGHT)] * 100]))
    assert not headings.shown and not compared


def test_priority() -> None:
    """Priority fields are not a part of the block, and must be complete."""
    read(Headings(nobody), bytes(5) + Encoder().encode(CALL), PRIORITY)
    for payload in (b"", bytes(4)):
        with pytest.raises(Violation, match="shorter"):
            read(Headings(nobody), payload, PRIORITY)


@given(st.lists(st.binary(max_size=60), max_size=8), st.sampled_from((0, PRIORITY)))
def test_any_bytes(blocks: list[bytes], flags: int) -> None:
    """Any bytes are decoded or refused."""
    headings = Headings(nobody)
    try:
        for block in blocks:
            read(headings, block, flags)
    except Violation:
        return


def test_a_bomb() -> None:
    """A field that is sent once and referenced a thousand times."""
    encoder = Encoder()
    first = encoder.encode([(b"a", bytes(4000))])
    again = encoder.encode([(b"a", bytes(4000))])
    headings = Headings(nobody)
    with pytest.raises(Violation, match="cannot be decoded"):
        read(headings, b"".join(itertools.chain([first], itertools.repeat(again, 1000))), piece=10_000)
