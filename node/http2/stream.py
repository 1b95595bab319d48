"""One call under way: the messages that were received, and how it ended."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from urllib.parse import unquote

from twisted.internet.defer import Deferred

from node.http2.frames import PREFIX

# Bytes that may wait for the reader of a call, and bytes that each message counts in addition to its own. The counters
# of 250,000 users with the longest names take some 150 MB.
MOST, EACH = 256 * 1024 * 1024, 64


class Status(IntEnum):
    """The gRPC status codes that matter here."""

    OK = 0
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14


class TooMuch(Exception):
    """The core sends more than the node has room for."""


@dataclass(frozen=True)
class End:
    """How a call ended: the gRPC status, None without one, and the core's text or ours."""

    status: int | None
    text: str = ""


def end_of(fields: Mapping[str, str]) -> End:
    """Read the end of a call from its trailers."""
    status, http = fields.get("grpc-status", ""), fields.get(":status", "200")
    if status.isascii() and status.isdigit():
        return End(int(status), unquote(fields.get("grpc-message", "")))
    return End(Status.UNAVAILABLE, f"the core answered without a gRPC status (HTTP {http})")


class Stream:
    """The state of one call. `wake` wakes its reader once for all that came in one piece."""

    def __init__(self, number: int, window: int, leave: Callable[[Stream], None]) -> None:
        self.number = number
        # Bytes that the core accepts now, and the body that is not sent yet.
        self.window = window
        self.unsent: bytes | memoryview = b""
        # Bytes received since the last WINDOW_UPDATE.
        self.taken = 0
        self.messages: deque[bytes] = deque()
        self.end: End | None = None
        self._leave = leave
        self._begun = bytearray()
        # The bytes that the waiting messages count.
        self._held = 0
        self._waiting: Deferred[None] | None = None

    def progress(self) -> Deferred[None]:
        """Wait for the next message, or the end. One reader waits at a time."""
        self._waiting = Deferred()
        return self._waiting

    def close(self, end: End = End(None, "given up")) -> None:
        """End the call on this side: its caller wants no more messages."""
        if self.end is None:
            self.end = end
            self._leave(self)
            self.wake()

    def take(self) -> bytes:
        """Take the oldest message."""
        message = self.messages.popleft()
        self._held -= EACH + len(message)
        return message

    def received(self, data: bytes) -> None:
        """Take the next bytes of the messages. Raises `TooMuch` at the prefix of one that there is no room for."""
        self._begun += data
        while len(self._begun) >= PREFIX.size:
            compressed, size = PREFIX.unpack_from(self._begun)
            after = PREFIX.size + size
            if compressed:
                self.ended(End(Status.INTERNAL, "the core sent a compressed message, which was not requested"))
                return
            if self._held + EACH + size > MOST:
                raise TooMuch(f"the core's answer is larger than {MOST} bytes")
            if len(self._begun) < after:
                return
            self._held += EACH + size
            self.messages.append(bytes(memoryview(self._begun)[PREFIX.size : after]))
            del self._begun[:after]

    def ended(self, end: End) -> None:
        """Note the end of the call; the first one counts."""
        self.end = self.end or end

    def wake(self) -> None:
        waiting, self._waiting = self._waiting, None
        if waiting is not None and not waiting.called:
            waiting.callback(None)
