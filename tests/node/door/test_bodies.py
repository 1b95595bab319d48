"""The memory budget for bodies: a message reserves its whole length, from its first bytes to the answer."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from node.door.bodies import LARGEST, SMALL, Bodies, Requests

sizes = st.one_of(st.integers(0, 20), st.integers(SMALL - 2, SMALL + 2), st.integers(SMALL, 3 * SMALL))


def message(size: int, length: int | None = None) -> bytes:
    """A message that announces this size, with `length` bytes of it present."""
    return bytes(1) + size.to_bytes(4) + bytes(size if length is None else length)


def fed(messages: Requests, stream: int, data: bytes, at: list[int]) -> None:
    places = sorted({0, len(data), *(place for place in at if place < len(data))})
    for begin, end in itertools.pairwise(places):
        messages.data(stream, memoryview(data)[begin:end])


@given(
    st.dictionaries(st.integers(1, 5), st.lists(sizes, min_size=1, max_size=4), max_size=4),
    st.lists(st.integers(0, 100_000)),
    st.booleans(),
)
def test_the_last_message_of_each_stream_counts(sent: dict[int, list[int]], at: list[int], late: bool) -> None:
    """However the bytes are cut, and whether the key came before or after; in the end everything is released."""
    bodies = Bodies(2**40)
    messages = Requests(bodies)
    if not late:
        messages.count()
    for stream, lengths in sent.items():
        fed(messages, stream, b"".join(map(message, lengths)), at)
    if late:
        assert bodies.taken == 0
        messages.count()
    assert bodies.taken == sum(lengths[-1] for lengths in sent.values() if lengths[-1] >= SMALL)
    assert messages.refused == []
    for stream in [*sent][:2]:
        messages.over(stream)
    messages.close()
    assert bodies.taken == 0


def test_a_message_without_room() -> None:
    """A message is refused by its prefix, before its body has come, and reserves nothing."""
    bodies = Bodies(3 * SMALL)
    first, second = Requests(bodies), Requests(bodies)
    for one in (first, second):
        one.count()
    fed(first, 1, message(2 * SMALL, 10), [])
    fed(second, 1, message(2 * SMALL, 10), [])
    fed(second, 3, message(SMALL - 1), [])
    assert (first.refused, second.refused, bodies.taken) == ([], [1], 2 * SMALL)
    first.over(1)
    fed(second, 5, message(2 * SMALL, 10), [])
    assert (second.refused, bodies.taken) == ([1], 2 * SMALL)


def test_what_grpc_refuses_reserves_nothing() -> None:
    """A message beyond gRPC's own limit, which reserves nothing."""
    bodies = Bodies(2 * LARGEST)
    messages = Requests(bodies)
    messages.count()
    fed(messages, 1, message(LARGEST + 1, 10), [])
    assert (messages.refused, bodies.taken) == ([], 0)
