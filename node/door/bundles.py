"""Many messages of a stream in one of gRPC's: for each, whatever is in it, its server takes a tenth of a millisecond.

A handler writes BUNDLED first. Each message that follows is around others, which have prefixes of their own; what is
around them is taken away here, before the client sees it. Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from node.door.frames import Frame
from node.http2 import HEADER, PREFIX, Kind, framed, window_update

# No message of protobuf's is like it: a field without a number.
BUNDLED = b"\0"
_FIRST = framed(BUNDLED)
_CONNECTION = 0
# Bytes taken away after which the server is told at once; else it is when the client says something, which it may not
# do before it has seen half of its window.
MUCH = 64


def bundle(messages: Iterable[bytes]) -> bytes:
    """One message for gRPC's server, around these."""
    return b"".join(map(framed, messages))


class Bundles:
    """What gRPC's server writes to one connection; `passed` bytes of it are done with. `open` are not answered."""

    def __init__(self, open: AbstractSet[int]) -> None:
        self.passed = 0
        self._open = open
        self._skip = 0
        self._held = b""
        # Streams of which the server has sent no more than what BUNDLED begins with, and those with bundles. A window
        # that is all but full cuts anything, so what may be the sign waits until it is known.
        self._fresh: dict[int, bytes] = {}
        self._streams: dict[int, _Bundled] = {}
        # Bytes that the client never sees, so the server would wait in vain for it to have taken them.
        self._taken: Counter[int] = Counter()

    def feed(self, data: bytes) -> bytes:
        """What the client is to have now. A frame that may have to be another one is held until it is whole."""
        data = self._held + data
        parts, begin, at, end = list[bytes](), 0, self._skip, len(data)
        while at + HEADER.size <= end:
            frame = Frame.at(data, at)
            after = at + HEADER.size + frame.length
            if self._concerns(frame):
                if after > end:
                    break
                parts += data[begin:at], self._inside(frame, data[at + HEADER.size : after])
                begin = after
            at = after
        whole = min(at, end)
        self._held, self._skip = data[whole:], max(at - end, 0)
        self.passed += whole
        return b"".join((*parts, data[begin:whole]))

    def over(self, stream: int) -> None:
        """The stream is answered, or given up."""
        if begun := self._fresh.pop(stream, b""):
            self._taken[_CONNECTION] += len(begun)
        self._streams.pop(stream, None)
        self._taken.pop(stream, None)

    @property
    def much(self) -> bool:
        """So much was taken away that the server may wait for a client that has not seen enough to let it go on."""
        return self._taken[_CONNECTION] >= MUCH

    def give_back(self) -> bytes:
        """Frames that let the server send as much again as was taken away."""
        frames = b"".join(window_update(stream, size) for stream, size in self._taken.items())
        self._taken.clear()
        return frames

    def _concerns(self, frame: Frame) -> bool:
        """Whether this may be another frame for the client."""
        if frame.kind == Kind.HEADERS and frame.stream in self._open:
            self._fresh.setdefault(frame.stream, b"")
        return frame.kind == Kind.DATA and (frame.stream in self._streams or self._may_tell(frame))

    def _may_tell(self, frame: Frame) -> bool:
        """It may be the sign, or a part of it: of most streams' first one its length tells that it is not."""
        begun = self._fresh.get(frame.stream)
        if not begun and begun is not None and frame.length > len(_FIRST):
            del self._fresh[frame.stream]
            return False
        return begun is not None

    def _inside(self, frame: Frame, payload: bytes) -> bytes:
        """The frame as it is for the client."""
        bundled = self._streams.get(frame.stream)
        if bundled is None:
            return self._first(frame, payload)
        inside = bundled.inside(payload)
        self._take(frame.stream, len(payload) - len(inside))
        return frame._replace(length=len(inside)).header() + inside if inside or frame.flags else b""

    def _first(self, frame: Frame, payload: bytes) -> bytes:
        """Of a stream of which it is not known whether it has bundles."""
        begun = self._fresh.pop(frame.stream)
        sign = begun + payload
        if sign == _FIRST:
            self._streams[frame.stream] = _Bundled()
            self._take(frame.stream, len(sign))
        elif _FIRST.startswith(sign) and not frame.flags:
            self._fresh[frame.stream] = sign
        else:
            before = frame._replace(flags=0, length=len(begun)).header() + begun if begun else b""
            return before + frame.header() + payload
        return b""

    def _take(self, stream: int, size: int) -> None:
        for place in (_CONNECTION, stream) if size else ():
            self._taken[place] += size


@dataclass
class _Bundled:
    """Of the message that is around others: what is here of its prefix, and what is to come behind that."""

    prefix: bytes = b""
    left: int = 0

    def inside(self, payload: bytes) -> bytes:
        """What of these bytes is in it."""
        kept = []
        while payload:
            if self.left:
                size = min(self.left, len(payload))
                kept.append(payload[:size])
                self.left -= size
            else:
                size = PREFIX.size - len(self.prefix)
                self.prefix += payload[:size]
                if len(self.prefix) == PREFIX.size:
                    self.prefix, self.left = b"", PREFIX.unpack(self.prefix)[1]
            payload = payload[size:]
        return b"".join(kept)
