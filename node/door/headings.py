"""The headers of a stranger's requests, read before gRPC hears of them.

gRPC's server reads a path outside any of its guards: one that is no text ends the loop that serves everybody. Who has
shown the key is trusted with that much; reading on would cost as much as a small call.
"""

from __future__ import annotations

from hpack import Decoder, HPACKError

from node.door.frames import Frame
from node.http2 import END_HEADERS, PRIORITY, Kind

# Bytes of a block, unpacked; gRPC takes less.
UNPACKED = 64 * 1024
# Bytes before the block itself: a stream that it depends on, and a weight.
_PRIORITY = 5


class BadHeadings(Exception):
    """They cannot be read, or what gRPC takes for text is none."""


class Headings:
    """Reads the blocks of one connection, all from the first one on: each builds on those before it."""

    def __init__(self) -> None:
        self._decoder = Decoder(UNPACKED)
        self._payload = b""
        self._block = b""

    def read(self, frame: Frame, payload: memoryview) -> None:
        """More of a frame of HEADERS or CONTINUATION. Raises `BadHeadings`."""
        self._payload += payload
        if len(self._payload) < frame.length:
            return
        whole, self._payload = self._payload, b""
        self._block += _stripped(whole, frame.flags) if frame.kind == Kind.HEADERS else whole
        if frame.flags & END_HEADERS:
            block, self._block = self._block, b""
            self._judge(block)

    def _judge(self, block: bytes) -> None:
        try:
            fields = self._decoder.decode(block, raw=True)
        except HPACKError as error:
            raise BadHeadings(f"headers that cannot be read: {error}") from error
        for name, value in fields:
            if name.startswith(b":") and not value.isascii():
                raise BadHeadings("a request whose path is no text")


def _stripped(payload: bytes, flags: int) -> bytes:
    """Without what stands before the block in the frame that begins it; nobody may pad it: see `manners`."""
    begin = _PRIORITY if flags & PRIORITY else 0
    if begin > len(payload):
        raise BadHeadings("headers shorter than what stands before them")
    return payload[begin:]
