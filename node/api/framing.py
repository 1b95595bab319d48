"""Parse the messages of a REST body: a single one, or many, each after its length as a varint. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from node.base.errors import InvalidRequest

# Bytes of a length: enough for 2**35, far above the limit of a body.
_MAX_VARINT = 5


def single(body: bytes) -> Iterator[bytes]:
    """Return the body as its only message."""
    yield body


def delimited(body: bytes) -> Iterator[bytes]:
    """Split a body of messages, each after its length as a varint.

    Raises `InvalidRequest` for a length that is truncated, has too many bytes, or goes past the end of the body.
    """
    position = 0
    while position < len(body):
        length, position = _varint(body, position)
        if length > len(body) - position:
            left = len(body) - position
            raise InvalidRequest(f"the body is incomplete: it announces a message of {length} bytes, {left} are left")
        yield body[position : position + length]
        position += length


def arrived(data: bytes) -> tuple[list[bytes], bytes]:
    """Split the received part of a stream: return its complete messages, and the incomplete rest.

    Raises `InvalidRequest` for a length with too many bytes.
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
            raise InvalidRequest("the body is incomplete: it ends inside the length of a message")
        byte = body[position + shift]
        value |= (byte & 0x7F) << (7 * shift)
        if byte < 0x80:
            return value, position + shift + 1
    raise InvalidRequest(f"the length of a message has more than {_MAX_VARINT} bytes")
