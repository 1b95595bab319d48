"""Header blocks without HPACK's dynamic table, so that each can be read alone. Bytes in, fields out."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

from hpack import Decoder, Encoder, HPACKError
from hpack.struct import NeverIndexedHeaderTuple

# Bytes of a block, unpacked: the core's error texts, which may have names of users, can be long.
UNPACKED = 1024 * 1024
# Bytes of blocks that are cached: frequent ones are short.
SHORT = 1024


class BadFields(Exception):
    """A block that cannot be decoded, or that needs the dynamic table."""


@lru_cache(maxsize=256)
def request(path: str, metadata: tuple[tuple[str, str], ...]) -> bytes:
    """Pack the headers that begin a call."""
    fields = (
        *((":method", "POST"), (":scheme", "http"), (":path", path), (":authority", "localhost")),
        *(("content-type", "application/grpc"), ("te", "trailers")),
        *metadata,
    )
    # Fields that are never indexed do not change the dynamic table.
    return Encoder().encode([NeverIndexedHeaderTuple(name, value) for name, value in fields], huffman=False)


def reply(block: bytes) -> Mapping[str, str]:
    """Parse the headers or trailers of a reply; our SETTINGS forbid the core a dynamic table. Raises `BadFields`."""
    return _short(block) if len(block) <= SHORT else _read(block)


def _read(block: bytes) -> Mapping[str, str]:
    decoder = Decoder(UNPACKED)
    decoder.max_allowed_table_size = decoder.header_table_size = 0
    try:
        fields = decoder.decode(block, raw=True)
    except HPACKError as error:
        raise BadFields(f"unreadable headers: {error}") from error
    return {name.decode("latin-1"): value.decode("utf-8", "replace") for name, value in fields}


_short = lru_cache(maxsize=256)(_read)
