"""Blocks of headers (HPACK, RFC 7541). Ours do without the dynamic table, so that each can be read alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache

from hpack import Decoder, Encoder, HPACKError
from hpack.struct import NeverIndexedHeaderTuple

from node.http2.frames import END_HEADERS, END_STREAM, HEADER, Code, Kind, Violation, frame

# Bytes of a reply's block, unpacked: the core's error texts, which may have names of users, can be long.
UNPACKED = 1024 * 1024
# Bytes of blocks that are cached: frequent ones are short.
SHORT = 1024


class Block:
    """A block of headers under way: HEADERS, and CONTINUATIONs without other frames between them.

    It may have this many bytes, with the headers of its frames, and this many frames.
    """

    def __init__(self, stream: int, largest: int, frames: int) -> None:
        self.stream = stream
        self._largest = largest
        self._frames = frames
        self._size = self._count = 0

    def add(self, kind: int, stream: int, length: int) -> None:
        """Take note of the next frame on the connection. Raises `Violation`."""
        if stream != self.stream or (self._count and kind != Kind.CONTINUATION):
            raise Violation("another frame inside a block of headers")
        self._size += HEADER.size + length
        self._count += 1
        if self._size > self._largest:
            raise Violation(f"headers of more than {self._largest} bytes", Code.ENHANCE_YOUR_CALM)
        if self._count > self._frames:
            raise Violation(f"headers in more than {self._frames} frames", Code.ENHANCE_YOUR_CALM)


def decode(decoder: Decoder, block: bytes) -> Sequence[tuple[bytes, bytes]]:
    """Unpack a block. Raises `Violation` if it cannot be decoded, or is larger than the decoder allows."""
    try:
        return list(decoder.decode(block, raw=True))
    except HPACKError as error:
        raise Violation(f"the headers cannot be decoded: {error}") from error


@lru_cache(maxsize=256)
def request(path: str, metadata: tuple[tuple[str, str], ...]) -> bytes:
    """Pack the headers that begin a call."""
    return _packed(
        (
            *((":method", "POST"), (":scheme", "http"), (":path", path), (":authority", "localhost")),
            *(("content-type", "application/grpc"), ("te", "trailers")),
            *metadata,
        )
    )


def reply(block: bytes) -> Mapping[str, str]:
    """Parse the headers or trailers of a reply; our SETTINGS forbid the core a dynamic table. Raises `Violation`."""
    return _short(block) if len(block) <= SHORT else _read(block)


def trailers(stream: int, fields: Mapping[str, str], begun: bool) -> bytes:
    """Pack the frame with the trailers that end a gRPC reply, or, unless it has `begun`, a reply of trailers only."""
    head = {} if begun else {":status": "200", "content-type": "application/grpc"}
    return frame(Kind.HEADERS, END_STREAM | END_HEADERS, stream, _packed((head | dict(fields)).items()))


def response(stream: int, status: int) -> bytes:
    """Pack the frame with a response of HTTP that has no body."""
    fields = ((":status", str(status)), ("content-length", "0"))
    return frame(Kind.HEADERS, END_STREAM | END_HEADERS, stream, _packed(fields))


def _packed(fields: Iterable[tuple[str, str]]) -> bytes:
    """Pack a block of fields that are never indexed: they do not change the dynamic table."""
    return Encoder().encode([NeverIndexedHeaderTuple(name, value) for name, value in fields], huffman=False)


def _read(block: bytes) -> Mapping[str, str]:
    decoder = Decoder(UNPACKED)
    decoder.max_allowed_table_size = decoder.header_table_size = 0
    return {name.decode("latin-1"): value.decode("utf-8", "replace") for name, value in decode(decoder, block)}


_short = lru_cache(maxsize=256)(_read)
