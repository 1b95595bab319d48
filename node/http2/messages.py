"""Follow the gRPC messages in the DATA of a stream, however it is cut into frames."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

from node.http2.frames import PREFIX

Bytes = TypeVar("Bytes", bytes, memoryview)


class Messages:
    """The messages in one direction of a stream: finds their prefixes, and keeps none of their content."""

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
