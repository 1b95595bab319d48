"""Parse the HTTP/2 frames that a core sends, and pack SETTINGS. Bytes in, values out."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from node.http2 import HEADER, PADDED, PAIR, PRIORITY, STREAM, Kind, Setting, frame

_NUMBER = struct.Struct(">L")
# Bytes of the priority fields of a HEADERS frame, before its block: a stream dependency and a weight.
_PRIORITY = 5
# Bytes of the largest payload: the default of RFC 9113, which our SETTINGS do not raise.
LARGEST = 16_384


class Frame(NamedTuple):
    """A whole frame. `kind` may be an unknown one."""

    kind: int
    flags: int
    stream: int
    payload: bytes


class BadFrame(Exception):
    """A frame that is malformed."""


class Frames:
    """Cuts a stream of bytes into frames. Keeps less than a frame between two pieces."""

    def __init__(self, largest: int = LARGEST) -> None:
        self._largest = largest
        self._begun = b""

    def feed(self, data: bytes) -> list[Frame]:
        """Return the frames that end in this piece. Raises `BadFrame`."""
        data = self._begun + data if self._begun else data
        found: list[Frame] = []
        at, end = 0, len(data)
        while at + HEADER.size <= end:
            high, low, kind, flags, stream = HEADER.unpack_from(data, at)
            begin = at + HEADER.size
            if (size := high << 16 | low) > self._largest:
                raise BadFrame(f"a frame of {size} bytes, larger than {self._largest}")
            after = begin + size
            if after > end:
                break
            found.append(Frame(kind, flags, stream & STREAM, data[begin:after]))
            at = after
        self._begun = data[at:]
        return found


def plain(one: Frame) -> bytes:
    """Return the payload without padding and priority fields. Raises `BadFrame`."""
    payload, padding = one.payload, 0
    if one.flags & PADDED:
        padding, payload = payload[0] if payload else 0, payload[1:]
    if one.kind == Kind.HEADERS and one.flags & PRIORITY:
        payload = payload[_PRIORITY:]
    if padding > len(payload):
        raise BadFrame("a frame with more padding than payload")
    return payload[: len(payload) - padding]


def settings(values: Mapping[Setting, int]) -> bytes:
    """Pack a SETTINGS frame."""
    return frame(Kind.SETTINGS, 0, 0, b"".join(PAIR.pack(*pair) for pair in values.items()))


def pairs(payload: bytes) -> Iterator[tuple[int, int]]:
    """Parse the payload of a SETTINGS frame. Raises `BadFrame`."""
    if len(payload) % PAIR.size:
        raise BadFrame("a truncated SETTINGS frame")
    yield from PAIR.iter_unpack(payload)


def number(payload: bytes) -> int:
    """Parse the number in an RST_STREAM or WINDOW_UPDATE; of GOAWAY the last stream. Raises `BadFrame`."""
    if len(payload) < _NUMBER.size:
        raise BadFrame("a frame that is too short for its kind")
    return int(_NUMBER.unpack_from(payload)[0])
