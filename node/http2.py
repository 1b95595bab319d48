"""HTTP/2's words (RFC 9113): kinds of frames, their flags and their header; and gRPC's messages inside DATA."""

from __future__ import annotations

import struct
from enum import IntEnum

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
END_STREAM = 0x1
ACK = 0x1
END_HEADERS = 0x4
PADDED = 0x8
PRIORITY = 0x20

# The length's high and low part, kind, flags, stream.
HEADER = struct.Struct(">BHBBL")
# Before each message of gRPC's: whether it is compressed, and how long it is (PROTOCOL-HTTP2.md of gRPC).
PREFIX = struct.Struct(">BL")
# The highest bit of a stream's number means nothing.
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


class Code(IntEnum):
    """Why a connection or a stream ends (RFC 9113, 7)."""

    NO_ERROR = 0
    PROTOCOL_ERROR = 1
    CANCEL = 8
    ENHANCE_YOUR_CALM = 11


def frame(kind: Kind, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """A whole frame."""
    size = len(payload)
    return HEADER.pack(size >> 16, size & 0xFFFF, kind, flags, stream) + payload


def framed(message: bytes) -> bytes:
    """A message of gRPC's, behind its prefix."""
    return PREFIX.pack(0, len(message)) + message


def reset(stream: int, code: Code) -> bytes:
    """The frame that ends a stream."""
    return frame(Kind.RST_STREAM, 0, stream, struct.pack(">L", code))


def window_update(stream: int, more: int) -> bytes:
    """The frame that lets the other side send so many bytes more: of the connection, which is stream 0, or of one."""
    return frame(Kind.WINDOW_UPDATE, 0, stream, struct.pack(">L", more))
