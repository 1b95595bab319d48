"""Limits for what a client may do on an HTTP/2 connection. Pure: frames in both directions and the time in.

The request headers of clients without a key are checked here, before gRPC's server gets them, as some could end the
loop that serves all clients. The key is checked here, too: a controller may begin with hundreds of calls, and gRPC's
server starts the first one only after many have come. Once a client has shown a key, its headers are not read any
more: that would cost as much as a call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

from hpack import Decoder

from node.api.methods import SERVICE
from node.door.bodies import Bodies, Requests
from node.door.bucket import Bucket, Rate
from node.door.bundles import LEAST, Bundles
from node.http2.frames import (
    ACK,
    END_HEADERS,
    END_STREAM,
    PADDED,
    PAIR,
    PREFACE,
    Code,
    Frame,
    FramePart,
    FrameScanner,
    Kind,
    Setting,
    Violation,
    plain,
)
from node.http2.headers import Block, decode

# Bytes of one block of headers with its CONTINUATIONs, and how many of those; gRPC accepts 16 KiB unpacked.
BLOCK = 32 * 1024
CONTINUATIONS = 8
# Bytes of a SETTINGS frame that is read: clients send fewer than ten settings, of six bytes each.
LONGEST = 600
# Bytes of a block, unpacked; gRPC accepts fewer.
UNPACKED = 64 * 1024
# Keys of one request that are compared here; clients send one or two. With more, only gRPC's server checks them.
_KEYS = 4
# The services of gRPC's server.
_OFFICIAL = "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"
_SERVICES = tuple(f"/{name}/".encode() for name in (SERVICE.full_name, *_OFFICIAL))
# Frames of each kind: how many at once, and how many more each second.
PINGS = Rate(100, 10.0)
SETTINGS = Rate(100, 5.0)
RESETS = Rate(1000, 100.0)
# For a client that has not shown a key: requests, and frames of any kind.
STRANGERS_REQUESTS = Rate(256, 10.0)
STRANGERS_FRAMES = Rate(10_000, 100.0)

# Whether a key is valid, by the values of `authorization` and of `x-api-key`.
Knows: TypeAlias = Callable[[Sequence[str], Sequence[str]], bool]


class Headings:
    """Decodes the header blocks of one connection, from the first one on: each builds on the table of those before it.

    `knows` checks the values of `authorization` and of `x-api-key`. `shown`: a request had a valid key. `astray`: one
    had no key, and the path of no service.
    """

    def __init__(self, knows: Knows) -> None:
        self._knows = knows
        self.shown = False
        self.astray = False
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
        """Raises `Violation` if a pseudo-header is not ASCII."""
        for name, value in fields:
            if name.startswith(b":") and not value.isascii():
                raise Violation("a pseudo-header of the request is not ASCII")
        authorization, keys = _values(fields, b"authorization"), _values(fields, b"x-api-key")
        self.shown = len(authorization) + len(keys) <= _KEYS and self._knows(authorization, keys)
        paths = [value for name, value in fields if name == b":path"]
        self.astray |= not (self.shown or authorization or keys or any(path.startswith(_SERVICES) for path in paths))


class Manners:
    """Tracks one connection from its preface on, and enforces the limits.

    `open` are the unanswered streams, `last` is the newest one. `begun` are the open streams whose answer has begun,
    `whole` those whose request is complete. `asked`: one block of headers is complete. `shown`: a request had a valid
    key, by `knows`. `astray` is the stream of the first request that had no key, and the path of no service; 0 if
    there is none.
    """

    def __init__(self, now: float, knows: Knows, bodies: Bodies) -> None:
        self.open: set[int] = set()
        self.begun: set[int] = set()
        self.whole: set[int] = set()
        self.requests = Requests(bodies)
        self.bundles = Bundles(self.open)
        self.last = 0
        self.asked = False
        self.shown = False
        self.astray = 0
        self._block: Block | None = None
        # None once a key was shown.
        self._headings: Headings | None = Headings(knows)
        # The received part of a SETTINGS frame, until the first call.
        self._set = b""
        self._received = FrameScanner(skip=len(PREFACE))
        # The server's block of headers continues in a CONTINUATION.
        self._sent_block = False
        self._pings = Bucket(PINGS, now)
        self._settings = Bucket(SETTINGS, now)
        self._resets = Bucket(RESETS, now)
        self._calls = Bucket(STRANGERS_REQUESTS, now)
        self._frames = Bucket(STRANGERS_FRAMES, now)

    def received(self, data: bytes, now: float, known: bool) -> None:
        """Check bytes from the client. Raises `Violation` if it may not send them; then none of them are passed on."""
        parts = self._received.feed(data)
        known = known or self.shown
        if known:
            self._headings = None
        elif parts:
            empty = sum(part.begins and not self._carries(part.frame) for part in parts)
            _require(self._frames.take(empty, now), "too many frames without the key")
        for part in parts:
            if part.begins:
                self._look_at(part.frame, now, known or self.shown)
            self._look_inside(part)

    def _look_at(self, frame: Frame, now: float, known: bool) -> None:
        if self._block is not None:
            self._continued(self._block, frame)
        elif frame.kind == Kind.CONTINUATION:
            raise Violation("a CONTINUATION without HEADERS before it")
        elif frame.kind == Kind.HEADERS:
            self._headers(frame, now, known)
        elif frame.kind == Kind.DATA:
            # With padding, the beginning of a message could not be found.
            _require(not frame.flags & PADDED, "a padded frame")
            self._note_end(frame)
        elif frame.kind == Kind.RST_STREAM:
            _require(self._resets.take(1, now), "too many RST_STREAMs")
            self.close(frame.stream)
        elif frame.kind == Kind.SETTINGS:
            _require(self._settings.take(1, now), "too many SETTINGS")
        elif frame.kind == Kind.PING:
            _require(self._pings.take(1, now), "too many PINGs")

    def _look_inside(self, part: FramePart) -> None:
        frame = part.frame
        if frame.kind == Kind.DATA:
            if frame.stream in self.open:
                self.requests.data(frame.stream, part.payload)
        elif frame.kind == Kind.SETTINGS:
            self._look_at_windows(frame, part.payload)
        elif self._headings is not None and frame.kind in (Kind.HEADERS, Kind.CONTINUATION):
            self._headings.read(frame, part.payload)
            if self._headings.astray and not self.astray:
                self.astray = frame.stream
            if self._headings.shown:
                self.shown, self._headings = True, None

    def _look_at_windows(self, frame: Frame, payload: memoryview) -> None:
        """Read the initial window of new streams, if the client set it before its first call."""
        if self.last or frame.flags & ACK or frame.length > LONGEST:
            return
        self._set += payload
        if len(self._set) >= frame.length:
            whole, self._set = self._set, b""
            for name, value in PAIR.iter_unpack(whole[: len(whole) // PAIR.size * PAIR.size]):
                if name == Setting.INITIAL_WINDOW_SIZE:
                    self.bundles.wanted = value >= LEAST

    def _carries(self, frame: Frame) -> bool:
        """Whether the frame has a part of a message, on an open stream.

        A call without a key is refused at its headers, so its stream is not open.
        """
        return frame.kind == Kind.DATA and frame.length > 0 and frame.stream in self.open

    def sent(self, data: bytes) -> tuple[bytes, bool]:
        """Take bytes of the server's. Returns what the client gets, and whether any of it belongs to a reply."""
        replies = not self.bundles.between
        data = self.bundles.feed(data)
        for frame in self.bundles.frames:
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
        return data, replies

    def close(self, stream: int) -> None:
        """The stream is answered, or was reset."""
        self.open.discard(stream)
        self.begun.discard(stream)
        self.whole.discard(stream)
        self.requests.over(stream)
        self.bundles.over(stream)

    @property
    def unanswered(self) -> bool:
        """Whether a call is complete, and the server has not begun to answer it."""
        return not self.whole <= self.begun

    @property
    def interruptible(self) -> bool:
        """Whether a frame of the door's own may be sent to the client now."""
        return self.bundles.between and not self._sent_block

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
        _require(not frame.flags & PADDED, "a padded frame")
        if frame.stream > self.last:
            self.last = frame.stream
            self.open.add(frame.stream)
            if not known:
                _require(self._calls.take(1, now), "too many requests without the key")
        self._note_end(frame)
        self._continued(Block(frame.stream, BLOCK, 1 + CONTINUATIONS), frame)

    def _note_end(self, frame: Frame) -> None:
        if frame.flags & END_STREAM and frame.stream in self.open:
            self.whole.add(frame.stream)

    def _continued(self, block: Block, frame: Frame) -> None:
        block.add(frame.kind, frame.stream, frame.length)
        whole = bool(frame.flags & END_HEADERS)
        self.asked = self.asked or whole
        self._block = None if whole else block


def _require(holds: bool, otherwise: str) -> None:
    """Raise `Violation` unless the client keeps to this limit."""
    if not holds:
        raise Violation(otherwise, Code.ENHANCE_YOUR_CALM)


def _values(fields: Iterable[tuple[bytes, bytes]], wanted: bytes) -> list[str]:
    return [value.decode("utf-8", "surrogateescape") for name, value in fields if name == wanted]
