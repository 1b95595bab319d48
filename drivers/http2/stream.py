"""One call under way: the messages that came, and how it ended."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from urllib.parse import unquote

from twisted.internet.defer import Deferred

from node.http2 import PREFIX


class Status(IntEnum):
    """Those of gRPC's that make a difference here."""

    OK = 0
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14


@dataclass(frozen=True)
class End:
    """How a call ended: the status, None if there is none, and the other side's words, or ours."""

    status: int | None
    text: str = ""


def end_of(fields: Mapping[str, str]) -> End:
    """What trailers say."""
    status, http = fields.get("grpc-status", ""), fields.get(":status", "200")
    if status.isascii() and status.isdigit():
        return End(int(status), unquote(fields.get("grpc-message", "")))
    return End(Status.UNAVAILABLE, f"the core answered without a status of gRPC's (HTTP {http})")


class Stream:
    """Who waits is waked once for all that came in one piece, by `wake`."""

    def __init__(self, number: int, window: int, leave: Callable[[Stream], None]) -> None:
        self.number = number
        # Bytes that the other side takes now, and what there is for it.
        self.window = window
        self.unsent: bytes | memoryview = b""
        # Bytes that came since it was told that it may send more.
        self.taken = 0
        self.messages: deque[bytes] = deque()
        self.end: End | None = None
        self._leave = leave
        self._begun = bytearray()
        self._waiting: Deferred[None] | None = None

    async def progress(self) -> None:
        """Wait until there is a message more, or the end. For one at a time."""
        self._waiting = Deferred()
        await self._waiting

    def close(self, end: End = End(None, "given up")) -> None:
        """Nobody wants to know any more."""
        if self.end is None:
            self.end = end
            self._leave(self)
            self.wake()

    def received(self, data: bytes) -> None:
        """A part of the messages."""
        self._begun += data
        while len(self._begun) >= PREFIX.size:
            compressed, size = PREFIX.unpack_from(self._begun)
            after = PREFIX.size + size
            if compressed:
                self.ended(End(Status.INTERNAL, "the core compresses what it was not asked to"))
                return
            if len(self._begun) < after:
                return
            self.messages.append(bytes(memoryview(self._begun)[PREFIX.size : after]))
            del self._begun[:after]

    def ended(self, end: End) -> None:
        """No more comes."""
        self.end = self.end or end

    def wake(self) -> None:
        waiting, self._waiting = self._waiting, None
        if waiting is not None and not waiting.called:
            waiting.callback(None)
