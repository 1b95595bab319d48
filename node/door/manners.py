"""Limits for what a client may do on an HTTP/2 connection. Pure: frames in both directions and the time in."""

from __future__ import annotations

from collections.abc import Callable

from node.door.bodies import Bodies, Messages
from node.door.bundles import LEAST, Bundles
from node.door.frames import Frame, Frames
from node.door.headings import BadHeadings, Headings, Knows
from node.http2 import ACK, END_HEADERS, END_STREAM, PADDED, PAIR, PREFACE, Code, Kind, Setting

# Bytes of one block of headers with its CONTINUATIONs, and how many of those; gRPC accepts 16 KiB unpacked.
BLOCK = 32 * 1024
CONTINUATIONS = 8
# Bytes of a SETTINGS frame that is read: clients send fewer than ten settings, of six bytes each.
LONGEST = 600
# Frames of each kind: how many at once, and how many more each second.
PINGS = (100, 10.0)
SETTINGS = (100, 5.0)
RESETS = (1000, 100.0)
# For a client that has not shown a key: requests, and frames of any kind.
STRANGERS_REQUESTS = (256, 10.0)
STRANGERS_FRAMES = (10_000, 100.0)


class Unmannerly(Exception):
    """The client broke a limit or the protocol: the connection must be ended with this code."""

    def __init__(self, text: str, code: Code = Code.ENHANCE_YOUR_CALM) -> None:
        super().__init__(text)
        self.code = code


class Budget:
    """A token bucket: so many at once, and so many a second."""

    def __init__(self, what: str, limit: tuple[int, float], now: float) -> None:
        self._what = what
        self._size, self._rate = limit
        self._left: float = self._size
        self._at = now

    def take(self, count: int, now: float) -> None:
        """Take this many tokens. Raises `Unmannerly` if there are not enough."""
        self._left = min(self._size, self._left + (now - self._at) * self._rate) - count
        self._at = now
        if self._left < 0:
            raise Unmannerly(f"too many {self._what}")

    def fill(self) -> None:
        self._left = self._size


class Manners:
    """Tracks one connection from its preface on, and enforces the limits.

    `open` are the unanswered streams, `last` is the newest one. `begun` are the open streams whose answer has begun,
    `whole` those whose request is complete. `asked`: one block of headers is complete. `shown`: a request had a valid
    key, by `knows`.
    """

    def __init__(self, now: float, knows: Knows, messages: Messages | None = None) -> None:
        self.open: set[int] = set()
        self.begun: set[int] = set()
        self.whole: set[int] = set()
        self.messages = messages or Messages(Bodies())
        self.bundles = Bundles(self.open)
        self.last = 0
        self.asked = False
        self.shown = False
        self._block: _Block | None = None
        # None once a key was shown.
        self._headings: Headings | None = Headings(knows)
        # The received part of a SETTINGS frame, until the first call.
        self._set = b""
        self._received = Frames(skip=len(PREFACE))
        self._sent = Frames()
        # The server's block of headers continues in a CONTINUATION.
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
        """Check bytes from the client. Raises `Unmannerly` if it may not send them; then none of them are passed on."""
        frames = self._received.feed(data)
        known = known or self.shown
        if not known and frames:
            self._frames.take(sum(not self._carries(frame) for frame in frames), now)
        if known:
            self._headings = None
        if self._received.rest is not None:
            self._look_inside(*self._received.rest)
        for place, frame in enumerate(frames):
            self._look_at(frame, now, known or self.shown)
            if (payload := self._received.payloads.get(place)) is not None:
                self._look_inside(frame, payload)
        self._received.empty()

    def _look_at(self, frame: Frame, now: float, known: bool) -> None:
        if self._block is not None:
            self._continued(self._block, frame)
        elif frame.kind == Kind.CONTINUATION:
            raise Unmannerly("a CONTINUATION without HEADERS before it", Code.PROTOCOL_ERROR)
        elif (rule := self._rules.get(frame.kind)) is not None:
            rule(frame, now, known)

    def _look_inside(self, frame: Frame, payload: memoryview) -> None:
        if frame.kind == Kind.DATA:
            if frame.stream in self.open:
                self.messages.data(frame.stream, payload)
        elif frame.kind == Kind.SETTINGS:
            self._look_at_windows(frame, payload)
        elif self._headings is not None:
            try:
                self._headings.read(frame, payload)
            except BadHeadings as error:
                raise Unmannerly(str(error), Code.PROTOCOL_ERROR) from error
            if self._headings.shown:
                self.shown, self._headings = True, None

    def _look_at_windows(self, frame: Frame, payload: memoryview) -> None:
        """Read the initial window of new streams, if the client set it before its first call."""
        if self.last or frame.flags & ACK or frame.length > LONGEST:
            return
        self._set += payload
        if len(self._set) >= frame.length:
            whole, self._set = self._set, b""
            for at in range(0, len(whole) - PAIR.size + 1, PAIR.size):
                name, value = PAIR.unpack_from(whole, at)
                if name == Setting.INITIAL_WINDOW_SIZE:
                    self.bundles.wanted = value >= LEAST

    def _carries(self, frame: Frame) -> bool:
        """Whether the frame has a part of a message, on an open stream.

        A call without a key is refused at its headers, so its stream is not open.
        """
        return frame.kind == Kind.DATA and frame.length > 0 and frame.stream in self.open

    def sent(self, data: bytes) -> bool:
        """Take note of bytes sent to the client. Returns whether any of them belong to a reply."""
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
            # Clients send a PING to measure the line whenever data comes, and answer the server's PINGs.
            if kind in (Kind.DATA, Kind.HEADERS) or (kind == Kind.PING and not flags & ACK):
                self._pings.fill()
        self._sent.empty()
        return replies

    def close(self, stream: int) -> None:
        """The stream is answered, or was reset."""
        self.open.discard(stream)
        self.begun.discard(stream)
        self.whole.discard(stream)
        self.messages.over(stream)
        self.bundles.over(stream)

    @property
    def unanswered(self) -> bool:
        """Whether a call is complete, and the server has not begun to answer it."""
        return not self.whole <= self.begun

    @property
    def interruptible(self) -> bool:
        """Whether a frame of the door's own may be sent to the client now."""
        return self._sent.between and not self._sent_block

    @property
    def paused(self) -> bool:
        """Whether a frame of the door's own may be sent to the server: the client is not inside a frame or a block."""
        return self._received.between and self._block is None

    @property
    def gap(self) -> int | None:
        """The position in the last received piece where a frame of the door's own may be inserted, if there is one."""
        if self._received.gap is None:
            return None
        place, following = self._received.gap
        inside = self._block is not None if following is None else following.kind == Kind.CONTINUATION
        return None if inside else place

    def _headers(self, frame: Frame, now: float, known: bool) -> None:
        # gRPC's server takes padding for headers: it would decode other ones than were checked here.
        _require_no_padding(frame)
        if frame.stream > self.last:
            self.last = frame.stream
            self.open.add(frame.stream)
            if not known:
                self._requests.take(1, now)
        self._note_end(frame)
        self._continued(_Block(frame.stream), frame)

    def _data(self, frame: Frame, _: float, __: bool) -> None:
        # With padding, the beginning of a message could not be found.
        _require_no_padding(frame)
        self._note_end(frame)

    def _note_end(self, frame: Frame) -> None:
        if frame.flags & END_STREAM and frame.stream in self.open:
            self.whole.add(frame.stream)

    def _reset(self, frame: Frame, now: float, _: bool) -> None:
        self._resets.take(1, now)
        self.close(frame.stream)

    def _continued(self, block: _Block, frame: Frame) -> None:
        block.add(frame)
        whole = bool(frame.flags & END_HEADERS)
        self.asked = self.asked or whole
        self._block = None if whole else block


def _require_no_padding(frame: Frame) -> None:
    """Raise `Unmannerly` for a padded frame: no gRPC client sends one."""
    if frame.flags & PADDED:
        raise Unmannerly("a padded frame")


class _Block:
    """One block of headers: HEADERS, and CONTINUATIONs without other frames between them."""

    def __init__(self, stream: int) -> None:
        self._stream = stream
        self._size = 0
        self._frames = 0

    def add(self, frame: Frame) -> None:
        if frame.stream != self._stream or (self._frames and frame.kind != Kind.CONTINUATION):
            raise Unmannerly("another frame inside a block of headers", Code.PROTOCOL_ERROR)
        self._size += frame.length
        self._frames += 1
        if self._size > BLOCK or self._frames > 1 + CONTINUATIONS:
            raise Unmannerly("a block of headers that is too long")
