"""Protobuf written by hand, for the few messages that there may be 100,000 of. Pure.

The encoding: https://protobuf.dev/programming-guides/encoding/. A tag is the field's number times 8, and 2 for bytes.
"""

from __future__ import annotations


def varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


class _Sizes(dict[int, bytes]):
    def __missing__(self, size: int) -> bytes:
        return varint(size)


# A size as a varint; the usual ones are looked up.
SIZE = _Sizes((size, varint(size)) for size in range(512))


def field(tag: bytes, value: bytes) -> bytes:
    """Bytes, a text's or a message's, as a field of a message."""
    return tag + SIZE[len(value)] + value
