"""HTTP/2's frames by their headers alone (RFC 9113, 4.1): bytes in, headers out. What they carry passes unread."""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import NamedTuple

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
END_STREAM = 0x1
ACK = 0x1
END_HEADERS = 0x4

_HEADER = struct.Struct(">BHBBL")
_SIZE = _HEADER.size
_STREAM = 0x7FFF_FFFF


class Kind(IntEnum):
    DATA = 0
    HEADERS = 1
    PRIORITY = 2
    RST_STREAM = 3
    SETTINGS = 4
    PUSH_PROMISE = 5
    PING = 6
    GOAWAY = 7
    WINDOW_UPDATE = 8
    CONTINUATION = 9


class Code(IntEnum):
    """Why a connection ends (RFC 9113, 7)."""

    NO_ERROR = 0
    PROTOCOL_ERROR = 1
    ENHANCE_YOUR_CALM = 11


class Frame(NamedTuple):
    """The header of a frame. `kind` may be one that nobody knows."""

    kind: int
    flags: int
    stream: int
    length: int


class Frames:
    """Cuts one direction of a connection; `skip` bytes stand before the first frame.

    Keeps less than one header between two pieces, however they are cut.
    """

    def __init__(self, skip: int = 0) -> None:
        self._skip = skip
        self._begun = b""

    @property
    def between(self) -> bool:
        """The last piece ended where a frame ends."""
        return not self._skip and not self._begun

    def feed(self, data: bytes) -> list[Frame]:
        """The frames that begin in this piece."""
        if self._begun:
            data, self._begun = self._begun + data, b""
        found = []
        at, end = self._skip, len(data)
        while at + _SIZE <= end:
            high, low, kind, flags, stream = _HEADER.unpack_from(data, at)
            length = high << 16 | low
            found.append(Frame(kind, flags, stream & _STREAM, length))
            at += _SIZE + length
        if at < end:
            self._begun = data[at:]
        self._skip = max(at - end, 0)
        return found


def goaway(last: int, code: Code) -> bytes:
    """The frame that says goodbye: streams above `last` were not looked at, so a client may repeat them elsewhere."""
    return _HEADER.pack(0, 8, Kind.GOAWAY, 0, 0) + struct.pack(">LL", last, code)
