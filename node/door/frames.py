"""Parse HTTP/2 frames by their headers (RFC 9113, 4.1): bytes in, frame headers out. Most payloads pass unread."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import NamedTuple

from node.http2 import END_HEADERS, END_STREAM, HEADER, STREAM, Code, Kind, frame

# HPACK (RFC 7541): `:status: 200` is entry 8 of the static table; lengths below 127 take one byte.
_STATUS_200 = b"\x88"
_LONG = 127


_LOOKED_INTO = {Kind.DATA, Kind.HEADERS, Kind.SETTINGS, Kind.CONTINUATION}


class Frame(NamedTuple):
    """The header of a frame. `kind` may be an unknown one."""

    kind: int
    flags: int
    stream: int
    length: int

    @classmethod
    def at(cls, data: bytes, at: int) -> Frame:
        """Parse the header at this position."""
        high, low, kind, flags, stream = HEADER.unpack_from(data, at)
        return cls(kind, flags, stream & STREAM, high << 16 | low)

    def header(self) -> bytes:
        return HEADER.pack(self.length >> 16, self.length & 0xFFFF, self.kind, self.flags, self.stream)


class Frames:
    """Finds the frames in one direction of a connection; `skip` bytes come before the first frame.

    Keeps less than one header between two pieces, however they are cut. For those who read the payloads of DATA,
    HEADERS, SETTINGS and CONTINUATION: `rest` is the part in the last piece of a frame that began before it, `payloads`
    the parts of the piece's own frames, by their index in the list; call `empty` after reading them. `gap` is the last
    position in the piece where a frame ends, so that another one may be inserted, and the frame that begins there, if
    any.
    """

    def __init__(self, skip: int = 0) -> None:
        self._skip = skip
        self._begun = b""
        self._inside: Frame | None = None
        self.rest: tuple[Frame, memoryview] | None = None
        self.payloads: dict[int, memoryview] = {}
        self.gap: tuple[int, Frame | None] | None = None

    @property
    def between(self) -> bool:
        """Whether the last piece ended where a frame ends."""
        return not self._skip and not self._begun

    def feed(self, data: bytes) -> list[Frame]:
        """Return the frames that begin in this piece."""
        before = len(self._begun)
        if self._begun:
            data, self._begun = self._begun + data, b""
        found: list[Frame] = []
        at, end, start = self._skip, len(data), -1
        self.empty()
        if at and self._inside is not None:
            self.rest = (self._inside, memoryview(data)[:at])
        while at + HEADER.size <= end:
            frame = Frame.at(data, at)
            start, begin, at = at, at + HEADER.size, at + HEADER.size + frame.length
            self._inside = frame if frame.kind in _LOOKED_INTO else None
            if self._inside is not None:
                self.payloads[len(found)] = memoryview(data)[begin:at]
            found.append(frame)
        if at < end:
            self._begun = data[at:]
        self._skip = max(at - end, 0)
        place = (at if at <= end else start) - before
        self.gap = (place, found[-1] if at > end and found else None) if place >= 0 else None
        return found

    def empty(self) -> None:
        """Drop the references to the last piece."""
        self.rest = None
        self.payloads.clear()


def goaway(last: int, code: Code) -> bytes:
    """Pack a GOAWAY: streams above `last` were not processed, so a client may repeat them on another connection."""
    return frame(Kind.GOAWAY, 0, 0, struct.pack(">LL", last, code))


def trailers(stream: int, fields: Mapping[str, str], begun: bool) -> bytes:
    """Pack the trailers that end a gRPC reply, or, unless the reply has `begun`, a reply of trailers only.

    The fields are literals without indexing, so that neither side's dynamic table changes (RFC 7541, 6.2.2).
    """
    head = {} if begun else {"content-type": "application/grpc"}
    status = b"" if begun else _STATUS_200
    block = status + b"".join(_field(name, value) for name, value in (head | dict(fields)).items())
    return frame(Kind.HEADERS, END_STREAM | END_HEADERS, stream, block)


def _field(name: str, value: str) -> bytes:
    texts = (name.encode("ascii"), value.encode("ascii"))
    assert all(len(text) < _LONG for text in texts)
    return b"\0" + b"".join(bytes((len(text),)) + text for text in texts)
