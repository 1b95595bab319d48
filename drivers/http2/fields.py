"""Header blocks without a table that both sides keep, so that each stands for itself. Bytes in, fields out."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

from hpack import Decoder, Encoder, HPACKError
from hpack.struct import NeverIndexedHeaderTuple

# Bytes of a block, unpacked: the core's words, of its users' names too, can be long.
UNPACKED = 1024 * 1024


class BadFields(Exception):
    """A block that cannot be read, or that builds on others."""


@lru_cache(maxsize=256)
def request(path: str, metadata: tuple[tuple[str, str], ...]) -> bytes:
    """What begins a call."""
    fields = (
        *((":method", "POST"), (":scheme", "http"), (":path", path), (":authority", "localhost")),
        *(("content-type", "application/grpc"), ("te", "trailers")),
        *metadata,
    )
    # What is never indexed changes no table.
    return Encoder().encode([NeverIndexedHeaderTuple(name, value) for name, value in fields], huffman=False)


@lru_cache(maxsize=256)
def reply(block: bytes) -> Mapping[str, str]:
    """What begins or ends a reply of a core that was told to keep no table. Raises `BadFields`."""
    decoder = Decoder(UNPACKED)
    decoder.max_allowed_table_size = decoder.header_table_size = 0
    try:
        fields = decoder.decode(block, raw=True)
    except HPACKError as error:
        raise BadFields(f"headers that cannot be read: {error}") from error
    return {name.decode("latin-1"): value.decode("utf-8", "replace") for name, value in fields}
