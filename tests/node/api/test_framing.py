"""Messages in a REST body: parsing returns the written messages, and trusts no length."""

from __future__ import annotations

import pytest
from google.protobuf.internal.encoder import _VarintBytes  # type: ignore[attr-defined]
from hypothesis import given, settings
from hypothesis import strategies as st

from node.api.framing import delimited, single
from node.base.errors import InvalidRequest


def framed(messages: list[bytes]) -> bytes:
    return b"".join(_VarintBytes(len(message)) + message for message in messages)


@settings(deadline=None)
@given(st.lists(st.binary(max_size=300), max_size=10))
def test_messages_come_back(messages: list[bytes]) -> None:
    """Messages after their lengths are parsed as they were written, empty ones too."""
    assert list(delimited(framed(messages))) == messages


def test_a_large_message_comes_back() -> None:
    """A length of four bytes is parsed."""
    messages = [b"x" * (1 << 21), b"y"]
    assert list(delimited(framed(messages))) == messages


@settings(deadline=None)
@given(st.lists(st.binary(min_size=1, max_size=200), min_size=1, max_size=5), st.data())
def test_a_body_that_is_cut_off_is_refused(messages: list[bytes], data: st.DataObject) -> None:
    """A body that ends inside a message or a length is refused after the complete messages before it."""
    body = framed(messages)
    ends = [len(framed(messages[:count])) for count in range(len(messages) + 1)]
    cut = data.draw(st.integers(0, len(body)).filter(lambda position: position not in ends))
    read = []
    with pytest.raises(InvalidRequest):
        for message in delimited(body[:cut]):
            read.append(message)  # noqa: PERF402 - what came before the fault counts
    assert read == messages[: len(read)]
    assert len(framed(read)) <= cut


@settings(deadline=None)
@given(st.binary(max_size=60))
def test_any_bytes_are_messages_or_refused(body: bytes) -> None:
    """Any body is split without gaps or refused as an invalid request."""
    try:
        messages = list(delimited(body))
    except InvalidRequest:
        return
    assert sum(map(len, messages)) <= len(body)
    assert body.endswith(messages[-1] if messages else b"")


@pytest.mark.parametrize("length", [b"\xff\xff\xff\xff\x0f", b"\xff\xff\xff\xff\x7f", b"\x80" * 5 + b"\x01", b"\x80"])
def test_impossible_lengths(length: bytes) -> None:
    """A length beyond the end, with too many bytes, or without an end is refused before memory is taken for it."""
    with pytest.raises(InvalidRequest):
        list(delimited(length + b"abc" * (length != b"\x80")))


@settings(deadline=None)
@given(st.binary(max_size=50))
def test_a_single_message_is_the_body(body: bytes) -> None:
    """A body that is not split is one message, also an empty one."""
    assert list(single(body)) == [body]
