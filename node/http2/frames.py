"""Parse and pack the frames of HTTP/2 (RFC 9113), and gRPC's messages inside DATA, however they are cut into frames."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from enum import IntEnum
from typing import NamedTuple, TypeVar

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
END_STREAM = 0x1
ACK = 0x1
END_HEADERS = 0x4
PADDED = 0x8
PRIORITY = 0x20
# Bytes of the largest payload, unless SETTINGS raise it.
LARGEST = 16_384

# The header of a frame: the high and low part of its length, kind, flags, stream.
HEADER = struct.Struct(">BHBBL")
# The prefix of a gRPC message: whether it is compressed, and its length (PROTOCOL-HTTP2.md of gRPC).
PREFIX = struct.Struct(">BL")
# One setting of a SETTINGS frame: its identifier and its value.
PAIR = struct.Struct(">HL")
_NUMBER = struct.Struct(">L")
# The bits of a stream's number; the highest one is reserved.
STREAM = 0x7FFF_FFFF
# Bytes of the priority fields of a HEADERS frame, before its block: a stream dependency and a weight.
_PRIORITY = 5

Bytes = TypeVar("Bytes", bytes, memoryview)


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


class Setting(IntEnum):
    """Identifiers of settings (RFC 9113, 6.5.2)."""

    HEADER_TABLE_SIZE = 1
    ENABLE_PUSH = 2
    MAX_CONCURRENT_STREAMS = 3
    INITIAL_WINDOW_SIZE = 4
    MAX_FRAME_SIZE = 5


class Code(IntEnum):
    """Error codes: why a connection or a stream ends (RFC 9113, 7)."""

    NO_ERROR = 0
    PROTOCOL_ERROR = 1
    CANCEL = 8
    ENHANCE_YOUR_CALM = 11


class Violation(Exception):
    """The other side broke the protocol or a limit: the connection must be ended with this code."""

    def __init__(self, text: str, code: Code = Code.PROTOCOL_ERROR) -> None:
        super().__init__(text)
        self.code = code


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


class FramePart(NamedTuple):
    """A part of a frame's payload; `begins`: the first one, which may be empty."""

    frame: Frame
    payload: memoryview
    begins: bool


class FrameScanner:
    """Finds the frames in one direction of a connection as their bytes come; `skip` bytes precede the first frame.

    Keeps less than one header between two pieces, however they are cut. `gap` is the last position in the last piece
    where a frame ends, so that another one may be inserted, and the frame that begins there, if any.
    """

    def __init__(self, skip: int = 0) -> None:
        self._skip = skip
        self._begun = b""
        self._inside: Frame | None = None
        self.gap: tuple[int, Frame | None] | None = None

    @property
    def between(self) -> bool:
        """Whether the last piece ended where a frame ends."""
        return not self._skip and not self._begun

    def feed(self, data: bytes) -> list[FramePart]:
        """Return the parts in this piece: the rest of the frame that began before it, then its own frames."""
        before = len(self._begun)
        data, self._begun = self._begun + data, b""
        at, end, start, payloads = self._skip, len(data), -1, memoryview(data)
        found = [FramePart(self._inside, payloads[:at], False)] if at and self._inside is not None else []
        while at + HEADER.size <= end:
            frame = self._inside = Frame.at(data, at)
            start, begin, at = at, at + HEADER.size, at + HEADER.size + frame.length
            found.append(FramePart(frame, payloads[begin:at], True))
        if at < end:
            self._begun = data[at:]
        self._skip = max(at - end, 0)
        place = (at if at <= end else start) - before
        self.gap = (place, self._inside if at > end else None) if place >= 0 else None
        return found


class Messages:
    """The gRPC messages in one direction of a stream: finds their prefixes, and keeps none of their content."""

    def __init__(self) -> None:
        self._prefix = b""
        # Bytes of the current message that are still to come.
        self._left = 0

    def split(self, payload: Bytes) -> Iterator[int | Bytes]:
        """Yield the length of each message whose prefix ends in these bytes, and the content that is in them."""
        while payload:
            if self._left:
                part, payload = payload[: self._left], payload[self._left :]
                self._left -= len(part)
                yield part
            else:
                missing = PREFIX.size - len(self._prefix)
                self._prefix += payload[:missing]
                payload = payload[missing:]
                if len(self._prefix) == PREFIX.size:
                    self._left, self._prefix = PREFIX.unpack(self._prefix)[1], b""
                    yield self._left


class WholeFrame(NamedTuple):
    kind: int
    flags: int
    stream: int
    payload: bytes


class WholeFrames:
    """Cuts a stream of bytes into frames. Keeps less than a frame between two pieces."""

    def __init__(self, largest: int = LARGEST) -> None:
        self._largest = largest
        self._begun = b""

    def feed(self, data: bytes) -> list[WholeFrame]:
        """Return the frames that end in this piece. Raises `Violation`."""
        data = self._begun + data if self._begun else data
        found: list[WholeFrame] = []
        at, end = 0, len(data)
        while at + HEADER.size <= end:
            high, low, kind, flags, stream = HEADER.unpack_from(data, at)
            begin = at + HEADER.size
            if (size := high << 16 | low) > self._largest:
                raise Violation(f"a frame of {size} bytes, larger than {self._largest}")
            if begin + size > end:
                break
            at = begin + size
            found.append(WholeFrame(kind, flags, stream & STREAM, data[begin:at]))
        self._begun = data[at:]
        return found


def plain(kind: int, flags: int, payload: bytes) -> bytes:
    """Return the payload of DATA or HEADERS without padding and priority fields. Raises `Violation`."""
    padding = 0
    if flags & PADDED:
        padding, payload = payload[0] if payload else 0, payload[1:]
    if kind == Kind.HEADERS and flags & PRIORITY:
        if len(payload) < _PRIORITY:
            raise Violation("a HEADERS frame is shorter than its priority fields")
        payload = payload[_PRIORITY:]
    if padding > len(payload):
        raise Violation("a frame with more padding than payload")
    return payload[: len(payload) - padding]


def pairs(payload: bytes) -> Iterator[tuple[int, int]]:
    """Parse the payload of a SETTINGS frame. Raises `Violation`."""
    if len(payload) % PAIR.size:
        raise Violation("a truncated SETTINGS frame")
    yield from PAIR.iter_unpack(payload)


def number(payload: bytes) -> int:
    """Parse the number in an RST_STREAM or WINDOW_UPDATE; of GOAWAY the last stream. Raises `Violation`."""
    if len(payload) < _NUMBER.size:
        raise Violation("a frame that is too short for its kind")
    return int(_NUMBER.unpack_from(payload)[0])


def frame(kind: Kind, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """Pack a whole frame."""
    size = len(payload)
    return HEADER.pack(size >> 16, size & 0xFFFF, kind, flags, stream) + payload


def settings(values: Mapping[Setting, int]) -> bytes:
    """Pack a SETTINGS frame."""
    return frame(Kind.SETTINGS, 0, 0, b"".join(PAIR.pack(*pair) for pair in values.items()))


def reset(stream: int, code: Code) -> bytes:
    """Pack the RST_STREAM frame that ends a stream."""
    return frame(Kind.RST_STREAM, 0, stream, _NUMBER.pack(code))


def window_update(stream: int, more: int) -> bytes:
    """Pack a WINDOW_UPDATE: the other side may send `more` bytes on this stream; 0 is the connection."""
    return frame(Kind.WINDOW_UPDATE, 0, stream, _NUMBER.pack(more))


def goaway(last: int, code: Code) -> bytes:
    """Pack a GOAWAY: streams above `last` were not processed, so a client may repeat them on another connection."""
    return frame(Kind.GOAWAY, 0, 0, _NUMBER.pack(last) + _NUMBER.pack(code))


def framed(message: bytes) -> bytes:
    """Put the prefix before a gRPC message."""
    return PREFIX.pack(0, len(message)) + message
