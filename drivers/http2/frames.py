"""Whole frames, cut from what a core writes, and those that we write. Bytes in, values out."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from enum import IntEnum
from typing import NamedTuple

from node.http2 import HEADER, PADDED, PRIORITY, STREAM, Kind, frame

_PAIR = struct.Struct(">HL")
_NUMBER = struct.Struct(">L")
# Bytes of a HEADERS frame before its block: a stream that it depends on, and a weight.
_PRIORITY = 5
# Bytes of the largest payload, where nothing else was set: nobody is told to send us larger ones.
LARGEST = 16_384


class Setting(IntEnum):
    """RFC 9113, 6.5.2."""

    HEADER_TABLE_SIZE = 1
    ENABLE_PUSH = 2
    MAX_CONCURRENT_STREAMS = 3
    INITIAL_WINDOW_SIZE = 4
    MAX_FRAME_SIZE = 5


class Frame(NamedTuple):
    """`kind` may be one that nobody knows."""

    kind: int
    flags: int
    stream: int
    payload: bytes


class BadFrame(Exception):
    """One that says something impossible of itself."""


class Frames:
    """Keeps less than a frame between two pieces."""

    def __init__(self, largest: int = LARGEST) -> None:
        self._largest = largest
        self._begun = b""

    def feed(self, data: bytes) -> list[Frame]:
        """The frames that end in this piece. Raises `BadFrame`."""
        data = self._begun + data if self._begun else data
        found: list[Frame] = []
        at, end = 0, len(data)
        while at + HEADER.size <= end:
            high, low, kind, flags, stream = HEADER.unpack_from(data, at)
            begin = at + HEADER.size
            if (size := high << 16 | low) > self._largest:
                raise BadFrame(f"a frame of {size} bytes")
            after = begin + size
            if after > end:
                break
            found.append(Frame(kind, flags, stream & STREAM, data[begin:after]))
            at = after
        self._begun = data[at:]
        return found


def plain(one: Frame) -> bytes:
    """The payload without padding and priority. Raises `BadFrame`."""
    payload, padding = one.payload, 0
    if one.flags & PADDED:
        padding, payload = payload[0] if payload else 0, payload[1:]
    if one.kind == Kind.HEADERS and one.flags & PRIORITY:
        payload = payload[_PRIORITY:]
    if padding > len(payload):
        raise BadFrame("a frame of more padding than it has bytes")
    return payload[: len(payload) - padding]


def settings(values: Mapping[Setting, int]) -> bytes:
    return frame(Kind.SETTINGS, 0, 0, b"".join(_PAIR.pack(*pair) for pair in values.items()))


def pairs(payload: bytes) -> Iterator[tuple[int, int]]:
    """What the other side sets. Raises `BadFrame`."""
    if len(payload) % _PAIR.size:
        raise BadFrame("settings that are cut off")
    yield from _PAIR.iter_unpack(payload)


def number(payload: bytes) -> int:
    """What RST_STREAM and WINDOW_UPDATE say; of GOAWAY the last stream. Raises `BadFrame`."""
    if len(payload) < _NUMBER.size:
        raise BadFrame("a frame that is too short")
    return int(_NUMBER.unpack_from(payload)[0])
