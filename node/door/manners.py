"""What a client may do on an HTTP/2 connection: pure, from the frames' headers in both directions and the time."""

from __future__ import annotations

from collections.abc import Callable

from node.door.bodies import Bodies, Messages
from node.door.bundles import Bundles
from node.door.frames import Frame, Frames
from node.door.headings import BadHeadings, Headings
from node.http2 import ACK, END_HEADERS, END_STREAM, PADDED, PREFACE, Code, Kind

# Bytes of one block of headers, its CONTINUATIONs included, and how many of those; gRPC itself takes 16 KiB unpacked.
BLOCK = 32 * 1024
CONTINUATIONS = 8
# At once, and more a second.
PINGS = (100, 10.0)
SETTINGS = (100, 5.0)
RESETS = (1000, 100.0)
# Of a client that has not shown the key: requests, and frames of any kind.
STRANGERS_REQUESTS = (256, 10.0)
STRANGERS_FRAMES = (10_000, 100.0)


class Unmannerly(Exception):
    """The connection is to end with this code."""

    def __init__(self, text: str, code: Code = Code.ENHANCE_YOUR_CALM) -> None:
        super().__init__(text)
        self.code = code


class Budget:
    """So many at once, and so many a second."""

    def __init__(self, what: str, limit: tuple[int, float], now: float) -> None:
        self._what = what
        self._size, self._rate = limit
        self._left: float = self._size
        self._at = now

    def take(self, count: int, now: float) -> None:
        """Raises `Unmannerly` if there is not that much left."""
        self._left = min(self._size, self._left + (now - self._at) * self._rate) - count
        self._at = now
        if self._left < 0:
            raise Unmannerly(f"too many {self._what}")

    def fill(self) -> None:
        self._left = self._size


class Manners:
    """One connection, from its preface on. `open` are the streams that are not answered, `last` is the newest one.

    `asked`: one block of headers is whole. `begun` are the open streams whose answer has begun.
    """

    def __init__(self, now: float, messages: Messages | None = None) -> None:
        self.open: set[int] = set()
        self.begun: set[int] = set()
        self.messages = messages or Messages(Bodies())
        self.bundles = Bundles(self.open)
        self.last = 0
        self.asked = False
        self._block: _Block | None = None
        # Until the key is shown.
        self._headings: Headings | None = Headings()
        self._received = Frames(skip=len(PREFACE))
        self._sent = Frames()
        # The server's headers that were sent go on in a CONTINUATION.
        self._sent_block = False
        self._pings = Budget("PINGs", PINGS, now)
        self._settings = Budget("SETTINGS", SETTINGS, now)
        self._resets = Budget("RST_STREAMs", RESETS, now)
        self._requests = Budget("requests without the key", STRANGERS_REQUESTS, now)
        self._frames = Budget("frames without the key", STRANGERS_FRAMES, now)
        self._rules: dict[int, Callable[[Frame, float, bool], None]] = {
            Kind.HEADERS: self._headers,
            Kind.RST_STREAM: self._reset,
            Kind.SETTINGS: lambda _, now, __: self._settings.take(1, now),
            Kind.PING: lambda _, now, __: self._pings.take(1, now),
            Kind.DATA: self._data,
        }

    def received(self, data: bytes, now: float, known: bool) -> None:
        """The client sends this. Raises `Unmannerly` if it may not; then none of it is to be passed on."""
        frames = self._received.feed(data)
        if not known and frames:
            self._frames.take(sum(not self._carries(frame) for frame in frames), now)
        if known:
            self._headings = None
        if self._received.rest is not None:
            self._look_inside(*self._received.rest)
        for place, frame in enumerate(frames):
            self._look_at(frame, now, known)
            if (payload := self._received.payloads.get(place)) is not None:
                self._look_inside(frame, payload)
        self._received.empty()

    def _look_at(self, frame: Frame, now: float, known: bool) -> None:
        if self._block is not None:
            self._continued(self._block, frame)
        elif frame.kind == Kind.CONTINUATION:
            raise Unmannerly("a CONTINUATION of nothing", Code.PROTOCOL_ERROR)
        elif (rule := self._rules.get(frame.kind)) is not None:
            rule(frame, now, known)

    def _look_inside(self, frame: Frame, payload: memoryview) -> None:
        if frame.kind == Kind.DATA:
            if frame.stream in self.open:
                self.messages.data(frame.stream, payload)
        elif self._headings is not None:
            try:
                self._headings.read(frame, payload)
            except BadHeadings as error:
                raise Unmannerly(str(error), Code.PROTOCOL_ERROR) from error

    def _carries(self, frame: Frame) -> bool:
        """It is of the message of a call that was not refused at its headers, as a stranger's is."""
        return frame.kind == Kind.DATA and frame.length > 0 and frame.stream in self.open

    def sent(self, data: bytes) -> bool:
        """The client is sent this. Returns whether anything of it belongs to a reply."""
        replies = not self._sent.between
        for frame in self._sent.feed(data):
            kind, flags = frame.kind, frame.flags
            replies = replies or kind in (Kind.DATA, Kind.HEADERS, Kind.CONTINUATION)
            if kind in (Kind.HEADERS, Kind.CONTINUATION):
                self._sent_block = not flags & END_HEADERS
            if kind == Kind.RST_STREAM or (flags & END_STREAM and kind in (Kind.DATA, Kind.HEADERS)):
                self.close(frame.stream)
            elif kind == Kind.HEADERS and frame.stream in self.open:
                self.begun.add(frame.stream)
            # Clients measure the line by a PING whenever something comes, and answer ours.
            if kind in (Kind.DATA, Kind.HEADERS) or (kind == Kind.PING and not flags & ACK):
                self._pings.fill()
        self._sent.empty()
        return replies

    def close(self, stream: int) -> None:
        """It is answered, or given up."""
        self.open.discard(stream)
        self.begun.discard(stream)
        self.messages.over(stream)
        self.bundles.over(stream)

    @property
    def interruptible(self) -> bool:
        """A frame of our own may be sent now."""
        return self._sent.between and not self._sent_block

    @property
    def paused(self) -> bool:
        """The client is not in the middle of a frame, nor of a block of headers."""
        return self._received.between and self._block is None

    @property
    def gap(self) -> int | None:
        """Where in the last piece received a frame of ours may be put: between frames, in no block of headers."""
        if self._received.gap is None:
            return None
        place, following = self._received.gap
        inside = self._block is not None if following is None else following.kind == Kind.CONTINUATION
        return None if inside else place

    def _headers(self, frame: Frame, now: float, known: bool) -> None:
        # gRPC takes the padding for headers: it would read others than were looked at.
        _require_no_padding(frame)
        if frame.stream > self.last:
            self.last = frame.stream
            self.open.add(frame.stream)
            if not known:
                self._requests.take(1, now)
        self._continued(_Block(frame.stream), frame)

    def _data(self, frame: Frame, _: float, __: bool) -> None:
        # Where a message begins could not be seen.
        _require_no_padding(frame)

    def _reset(self, frame: Frame, now: float, _: bool) -> None:
        self._resets.take(1, now)
        self.close(frame.stream)

    def _continued(self, block: _Block, frame: Frame) -> None:
        block.add(frame)
        whole = bool(frame.flags & END_HEADERS)
        self.asked = self.asked or whole
        self._block = None if whole else block


def _require_no_padding(frame: Frame) -> None:
    """No client of gRPC's sends any."""
    if frame.flags & PADDED:
        raise Unmannerly("padding")


class _Block:
    """One block of headers: HEADERS, and CONTINUATIONs with nothing in between."""

    def __init__(self, stream: int) -> None:
        self._stream = stream
        self._size = 0
        self._frames = 0

    def add(self, frame: Frame) -> None:
        if frame.stream != self._stream or (self._frames and frame.kind != Kind.CONTINUATION):
            raise Unmannerly("something else between two pieces of headers", Code.PROTOCOL_ERROR)
        self._size += frame.length
        self._frames += 1
        if self._size > BLOCK or self._frames > 1 + CONTINUATIONS:
            raise Unmannerly("headers without an end")
