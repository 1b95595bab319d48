"""The places of bodies: each message has one for its whole length, from its first bytes to the answer."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from node.door.bodies import LARGEST, SMALL, Bodies, Messages

sizes = st.one_of(st.integers(0, 20), st.integers(SMALL - 2, SMALL + 2), st.integers(SMALL, 3 * SMALL))


def message(size: int, length: int | None = None) -> bytes:
    """One that announces this size, with as many bytes as are to be here."""
    return bytes(1) + size.to_bytes(4) + bytes(size if length is None else length)


def fed(messages: Messages, stream: int, data: bytes, at: list[int]) -> None:
    places = sorted({0, len(data), *(place for place in at if place < len(data))})
    for begin, end in itertools.pairwise(places):
        messages.data(stream, memoryview(data)[begin:end])


@given(
    st.dictionaries(st.integers(1, 5), st.lists(sizes, min_size=1, max_size=4), max_size=4),
    st.lists(st.integers(0, 100_000)),
    st.booleans(),
)
def test_the_last_message_of_each_stream_counts(sent: dict[int, list[int]], at: list[int], late: bool) -> None:
    """However it is cut, whether the key was shown before or after; and in the end everything is given back."""
    bodies = Bodies(2**40)
    messages = Messages(bodies)
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


def test_who_finds_no_place() -> None:
    """The first bytes say how much is to come: it is refused before that is here, and takes nothing."""
    bodies = Bodies(3 * SMALL)
    first, second = Messages(bodies), Messages(bodies)
    for one in (first, second):
        one.count()
    fed(first, 1, message(2 * SMALL, 10), [])
    fed(second, 1, message(2 * SMALL, 10), [])
    fed(second, 3, message(SMALL - 1), [])
    assert (first.refused, second.refused, bodies.taken) == ([], [1], 2 * SMALL)
    first.over(1)
    fed(second, 5, message(2 * SMALL, 10), [])
    assert (second.refused, bodies.taken) == ([1], 2 * SMALL)


def test_what_grpc_refuses_takes_no_place() -> None:
    """A message beyond gRPC's own limit."""
    bodies = Bodies(2 * LARGEST)
    messages = Messages(bodies)
    messages.count()
    fed(messages, 1, message(LARGEST + 1, 10), [])
    assert (messages.refused, bodies.taken) == ([], 0)
