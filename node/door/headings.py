"""Check the request headers of clients without a key, before gRPC's server gets them.

gRPC's server decodes the path outside any error handling: a path that is not text ends the loop that serves all
clients. The door also checks the key here: a controller may begin with hundreds of calls, and gRPC's server starts the
first one only after many have come. Once a client has shown a key, its headers are not read any more: that would cost
as much as a call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

from hpack import Decoder

from node.http2.frames import END_HEADERS, Frame, Kind, Violation, plain
from node.http2.headers import decode

# Bytes of a block, unpacked; gRPC accepts fewer.
UNPACKED = 64 * 1024
# Keys of one request that are compared here; clients send one or two. With more, only gRPC's server checks them.
_KEYS = 4
Knows: TypeAlias = Callable[[Sequence[str], Sequence[str]], bool]


class Headings:
    """Decodes the header blocks of one connection, from the first one on: each builds on the table of those before it.

    `knows` checks the values of `authorization` and of `x-api-key`. `shown`: a request had a valid key.
    """

    def __init__(self, knows: Knows) -> None:
        self._knows = knows
        self.shown = False
        self._decoder = Decoder(UNPACKED)
        self._payload = b""
        self._block = b""

    def read(self, frame: Frame, payload: memoryview) -> None:
        """Take the next part of a HEADERS or CONTINUATION frame. Raises `Violation`."""
        self._payload += payload
        if len(self._payload) < frame.length:
            return
        whole, self._payload = self._payload, b""
        self._block += plain(frame.kind, frame.flags, whole) if frame.kind == Kind.HEADERS else whole
        if frame.flags & END_HEADERS:
            block, self._block = self._block, b""
            self._judge(decode(self._decoder, block))

    def _judge(self, fields: Sequence[tuple[bytes, bytes]]) -> None:
        """Raises `Violation` if a field that gRPC takes for text is not text."""
        for name, value in fields:
            if name.startswith(b":") and not value.isascii():
                raise Violation("a pseudo-header of the request is not ASCII")
        authorization, keys = _values(fields, b"authorization"), _values(fields, b"x-api-key")
        self.shown = len(authorization) + len(keys) <= _KEYS and self._knows(authorization, keys)


def _values(fields: Iterable[tuple[bytes, bytes]], wanted: bytes) -> list[str]:
    return [value.decode("utf-8", "surrogateescape") for name, value in fields if name == wanted]
