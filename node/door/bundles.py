"""Bundles: many messages of a stream in one gRPC message, because gRPC's server takes 0.1 ms for each, of any size.

A handler writes BUNDLED first. Each message after it is a bundle, of messages with prefixes of their own. The door
removes the prefix of the bundle, so that the client gets the single messages. Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from collections.abc import Set as AbstractSet

from node.http2.frames import HEADER, Frame, Kind, Messages, framed, window_update

# The mark of a stream with bundles. No protobuf message is like it: it would be a field without a number.
BUNDLED = b"\0"
_FIRST = framed(BUNDLED)
_CONNECTION = 0
# Removed bytes after which the server gets a WINDOW_UPDATE for them at once. Fewer wait until the client sends
# something, which it may not do before it has seen half of its window.
MUCH = 64
# Bytes of the smallest window with which a client sends something before MUCH of it is removed.
LEAST = 2 * MUCH


def bundle(messages: Iterable[bytes]) -> bytes:
    """Join messages into one, for gRPC's server."""
    return b"".join(map(framed, messages))


class Bundles:
    """Takes bundles apart in what gRPC's server writes to one connection. `open` are the unanswered streams.

    `frames` are those that begin in the last piece, as the client gets them. `between`: the client has whole frames
    only. `passed`: bytes of the server's that are done with. `wanted`: the server may write bundles. It may not if the
    client's windows are smaller than `LEAST`: held and removed bytes could fill one, and the client, which never sees
    them, would not widen it.
    """

    def __init__(self, open: AbstractSet[int]) -> None:
        self.wanted = True
        self.passed = 0
        self.frames: list[Frame] = []
        self._open = open
        # Bytes of the last frame that are still to come.
        self._skip = 0
        self._held = b""
        # Streams of which the server has sent at most a beginning of BUNDLED, with that beginning; and those with
        # bundles. A nearly full window cuts messages anywhere, so a possible beginning of the mark waits for its rest.
        self._fresh: dict[int, bytes] = {}
        self._streams: dict[int, Messages] = {}
        # Removed bytes by stream: the client never sees them, so it does not widen the server's window for them.
        self._taken: Counter[int] = Counter()

    def feed(self, data: bytes) -> bytes:
        """Return what the client gets now. A frame that may have to be changed is held until it is whole."""
        data, self.frames = self._held + data, []
        parts, begin, at, end = list[bytes](), 0, self._skip, len(data)
        while at + HEADER.size <= end:
            frame = Frame.at(data, at)
            after = at + HEADER.size + frame.length
            if not self._concerns(frame):
                self.frames.append(frame)
            elif after > end:
                break
            else:
                changed = self._inside(frame, data[at + HEADER.size : after])
                self.frames += [frame] if changed else []
                parts += data[begin:at], changed
                begin = after
            at = after
        whole = min(at, end)
        self._held, self._skip = data[whole:], max(at - end, 0)
        self.passed += whole
        return b"".join((*parts, data[begin:whole]))

    @property
    def between(self) -> bool:
        return not self._skip

    def over(self, stream: int) -> None:
        """The stream is answered, or given up."""
        if begun := self._fresh.pop(stream, b""):
            self._taken[_CONNECTION] += len(begun)
        self._streams.pop(stream, None)
        self._taken.pop(stream, None)

    @property
    def much(self) -> bool:
        """Whether so much was removed that the server may wait for a WINDOW_UPDATE that the client will not send."""
        return self._taken[_CONNECTION] >= MUCH

    def give_back(self) -> bytes:
        """Return the WINDOW_UPDATE frames for the removed bytes."""
        frames = b"".join(window_update(stream, size) for stream, size in self._taken.items())
        self._taken.clear()
        return frames

    def _concerns(self, frame: Frame) -> bool:
        """Whether this frame may have to be changed for the client."""
        if not self.wanted:
            return False
        if frame.kind == Kind.HEADERS and frame.stream in self._open:
            self._fresh.setdefault(frame.stream, b"")
        return frame.kind == Kind.DATA and (frame.stream in self._streams or self._may_begin(frame))

    def _may_begin(self, frame: Frame) -> bool:
        """Whether the frame may be the mark, or a part of it: most streams' first frame is longer than that."""
        begun = self._fresh.get(frame.stream)
        if not begun and begun is not None and frame.length > len(_FIRST):
            del self._fresh[frame.stream]
            return False
        return begun is not None

    def _inside(self, frame: Frame, payload: bytes) -> bytes:
        """Return the frame as the client gets it."""
        bundled = self._streams.get(frame.stream)
        if bundled is None:
            return self._first(frame, payload)
        inside = b"".join(part for part in bundled.split(payload) if isinstance(part, bytes))
        self._take(frame.stream, len(payload) - len(inside))
        return frame._replace(length=len(inside)).header() + inside if inside or frame.flags else b""

    def _first(self, frame: Frame, payload: bytes) -> bytes:
        """Decide by a stream's first DATA frames whether it has bundles; return what the client gets now."""
        begun = self._fresh.pop(frame.stream)
        mark = begun + payload
        if mark == _FIRST:
            self._streams[frame.stream] = Messages()
            self._take(frame.stream, len(mark))
        elif _FIRST.startswith(mark) and not frame.flags:
            self._fresh[frame.stream] = mark
        else:
            before = frame._replace(flags=0, length=len(begun)).header() + begun if begun else b""
            return before + frame.header() + payload
        return b""

    def _take(self, stream: int, size: int) -> None:
        for place in (_CONNECTION, stream) if size else ():
            self._taken[place] += size
