"""How a REST body carries messages: one alone, or many, each behind its length as a varint. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from node.errors import InvalidRequest

# A length below 2**35 needs no more bytes than this; the body limit is far lower.
_MAX_VARINT = 5


def single(body: bytes) -> Iterator[bytes]:
    """The body is one message."""
    yield body


def delimited(body: bytes) -> Iterator[bytes]:
    """The body is messages, each behind its length as a varint. A length is checked against what is there.

    Raises `InvalidRequest` for a length that is cut off, too long, or goes past the end.
    """
    position = 0
    while position < len(body):
        length, position = _varint(body, position)
        if length > len(body) - position:
            raise InvalidRequest(f"a message claims {length} bytes where {len(body) - position} are left")
        yield body[position : position + length]
        position += length


def arrived(data: bytes) -> tuple[list[bytes], bytes]:
    """The messages that are whole at the beginning of a stream of them, and the rest, of which there is more to come.

    Raises `InvalidRequest` for a length that is too long.
    """
    found, position = [], 0
    while (begun := data[position : position + _MAX_VARINT]) and (len(begun) == _MAX_VARINT or min(begun) < 0x80):
        length, begin = _varint(data, position)
        if length > len(data) - begin:
            break
        found.append(data[begin : begin + length])
        position = begin + length
    return found, data[position:]


def _varint(body: bytes, position: int) -> tuple[int, int]:
    value = 0
    for shift in range(_MAX_VARINT):
        if position + shift >= len(body):
            raise InvalidRequest("the body ends inside a length")
        byte = body[position + shift]
        value |= (byte & 0x7F) << (7 * shift)
        if byte < 0x80:
            return value, position + shift + 1
    raise InvalidRequest("a length has too many bytes")
