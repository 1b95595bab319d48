"""Constants and frames of HTTP/2 (RFC 9113), and the prefix of gRPC's messages inside DATA."""

from __future__ import annotations

import struct
from enum import IntEnum

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
END_STREAM = 0x1
ACK = 0x1
END_HEADERS = 0x4
PADDED = 0x8
PRIORITY = 0x20

# The header of a frame: the high and low part of its length, kind, flags, stream.
HEADER = struct.Struct(">BHBBL")
# The prefix of a gRPC message: whether it is compressed, and its length (PROTOCOL-HTTP2.md of gRPC).
PREFIX = struct.Struct(">BL")
# One setting of a SETTINGS frame: its identifier and its value.
PAIR = struct.Struct(">HL")
# The bits of a stream's number; the highest one is reserved.
STREAM = 0x7FFF_FFFF


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


def frame(kind: Kind, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """Pack a whole frame."""
    size = len(payload)
    return HEADER.pack(size >> 16, size & 0xFFFF, kind, flags, stream) + payload


def framed(message: bytes) -> bytes:
    """Put the prefix before a gRPC message."""
    return PREFIX.pack(0, len(message)) + message


def reset(stream: int, code: Code) -> bytes:
    """Pack the RST_STREAM frame that ends a stream."""
    return frame(Kind.RST_STREAM, 0, stream, struct.pack(">L", code))


def window_update(stream: int, more: int) -> bytes:
    """Pack a WINDOW_UPDATE: the other side may send `more` bytes on this stream; 0 is the connection."""
    return frame(Kind.WINDOW_UPDATE, 0, stream, struct.pack(">L", more))
