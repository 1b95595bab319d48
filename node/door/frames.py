"""HTTP/2's frames by their headers alone (RFC 9113, 4.1): bytes in, headers out. What they carry passes unread."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import NamedTuple

from node.http2 import END_HEADERS, END_STREAM, HEADER, STREAM, Code, Kind, frame

# HPACK: `:status: 200` is the eighth of the fields that everybody knows; a length that fits into one byte.
_STATUS_200 = b"\x88"
_LONG = 127


_LOOKED_INTO = {Kind.DATA, Kind.HEADERS, Kind.CONTINUATION}


class Frame(NamedTuple):
    """The header of a frame. `kind` may be one that nobody knows."""

    kind: int
    flags: int
    stream: int
    length: int

    @classmethod
    def at(cls, data: bytes, at: int) -> Frame:
        """The one whose header is there."""
        high, low, kind, flags, stream = HEADER.unpack_from(data, at)
        return cls(kind, flags, stream & STREAM, high << 16 | low)

    def header(self) -> bytes:
        return HEADER.pack(self.length >> 16, self.length & 0xFFFF, self.kind, self.flags, self.stream)


class Frames:
    """Cuts one direction of a connection; `skip` bytes stand before the first frame.

    Keeps less than one header between two pieces, however they are cut. For whoever looks into DATA, HEADERS and
    CONTINUATION: `rest` is what the last piece has of a frame that began before it, `payloads` what it has of its own
    ones, by their places in the list; to be emptied then. `gap` is the last place in the piece where a frame ends and
    another one may be put, and the frame that begins there, if any.
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
        """The last piece ended where a frame ends."""
        return not self._skip and not self._begun

    def feed(self, data: bytes) -> list[Frame]:
        """The frames that begin in this piece."""
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
        """Let go of the last piece."""
        self.rest = None
        self.payloads.clear()


def goaway(last: int, code: Code) -> bytes:
    """The frame that says goodbye: streams above `last` were not looked at, so a client may repeat them elsewhere."""
    return frame(Kind.GOAWAY, 0, 0, struct.pack(">LL", last, code))


def trailers(stream: int, fields: Mapping[str, str], begun: bool) -> bytes:
    """The end of a reply, or a reply that is no more than that where none was `begun`: what gRPC's clients read.

    The fields are spelled out, so that neither side's table of them changes (RFC 7541, 6.2.2).
    """
    head = {} if begun else {"content-type": "application/grpc"}
    status = b"" if begun else _STATUS_200
    block = status + b"".join(_field(name, value) for name, value in (head | dict(fields)).items())
    return frame(Kind.HEADERS, END_STREAM | END_HEADERS, stream, block)


def _field(name: str, value: str) -> bytes:
    texts = (name.encode("ascii"), value.encode("ascii"))
    assert all(len(text) < _LONG for text in texts)
    return b"\0" + b"".join(bytes((len(text),)) + text for text in texts)
