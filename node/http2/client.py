"""The client's side of HTTP/2: a connection to a core's API, on the reactor, with as much as gRPC calls need.

grpcio's client runs in another thread; waking that thread and being woken by it costs more than a call.
"""

from __future__ import annotations

from typing import Any

from twisted.internet.protocol import Protocol, connectionDone
from twisted.python.failure import Failure

from node.base.sockets import Prompt
from node.http2 import headers
from node.http2.frames import (
    ACK,
    END_HEADERS,
    END_STREAM,
    HEADER,
    LARGEST,
    PREFACE,
    STREAM,
    Code,
    Kind,
    Setting,
    Violation,
    WholeFrame,
    WholeFrames,
    frame,
    framed,
    number,
    pairs,
    plain,
    reset,
    settings,
    window_update,
)
from node.http2.stream import End, Status, Stream, TooMuch, end_of

# The initial window of RFC 9113.
_WINDOW = 65_535
# Our windows, as large as possible: the core is trusted. Bytes received before a WINDOW_UPDATE for them is sent.
OPEN = 2**31 - 1
WINDOW_UPDATE_AFTER = 2**28
# Bytes of one block of headers, with the headers of its frames.
BLOCK = headers.UNPACKED
# Concurrent calls before the core's SETTINGS have come; none should allow fewer (RFC 9113, 6.5.2).
CALLS_BEFORE_SETTINGS = 100
# Bytes of the reply to a PING.
PONG = HEADER.size + 8
# A client's streams have odd numbers.
_FIRST, _STEP = 1, 2
LOST = "the core closed the connection to its API"
_SETTINGS = {Setting.HEADER_TABLE_SIZE: 0, Setting.ENABLE_PUSH: 0, Setting.INITIAL_WINDOW_SIZE: OPEN}


class ClientConnection(Protocol):
    """One connection. `usable`: new calls may begin here."""

    transport: Any

    def __init__(self) -> None:
        self._streams: dict[int, Stream] = {}
        self._frames = WholeFrames()
        self._next = _FIRST
        # Bytes that the core accepts: on the whole connection, on a new stream, and in one frame.
        self._window = self._first = _WINDOW
        self._largest = LARGEST
        self._unsent: list[Stream] = []
        # Concurrent calls that the core accepts; and by stream the headers and body of calls that wait for their turn.
        self._most = CALLS_BEFORE_SETTINGS
        self._queue: dict[int, tuple[bytes, bytes]] = {}
        self._taken = 0
        self._heard = False
        # A block of headers that is not complete, its bytes so far, and whether it ends its stream.
        self._block: headers.Block | None = None
        self._packed = bytearray()
        self._last = False
        self._touched: list[Stream] = []
        # A reply to a PING that goes out with the next call: a core in Go sends a PING with each answer.
        self._pongs = b""
        self.usable = False

    def connectionMade(self) -> None:
        self.usable = True
        self.transport.write(PREFACE + settings(_SETTINGS) + window_update(0, OPEN - _WINDOW))

    @property
    def busy(self) -> bool:
        """Whether calls are under way."""
        return bool(self._streams)

    def open(self, head: bytes, message: bytes) -> Stream:
        """Begin a call with one message. `head` is the block of its headers."""
        stream = Stream(self._next, self._first, self._left)
        self._next += _STEP
        self.usable = self._next <= STREAM
        self._streams[stream.number] = stream
        begin, body = frame(Kind.HEADERS, END_HEADERS, stream.number, head), framed(message)
        if len(self._streams) - len(self._queue) <= self._most:
            self._begin(stream, begin, body)
        else:
            self._queue[stream.number] = begin, body
        return stream

    def _begin(self, stream: Stream, begin: bytes, body: bytes) -> None:
        if len(body) <= min(self._window, stream.window, self._largest) and not self._unsent:
            self._window -= len(body)
            self._write(begin + frame(Kind.DATA, END_STREAM, stream.number, body))
        else:
            self._write(begin)
            # A view, so that the rest is not copied for each frame.
            stream.unsent = memoryview(body)
            self._unsent.append(stream)
            self._pump()

    def close(self, end: End) -> None:
        """Abort the connection, and end calls under way with `end`."""
        self.usable = False
        self.transport.abortConnection()
        self._fail(end)

    def dataReceived(self, data: bytes) -> None:
        try:
            for one in self._frames.feed(data):
                self._take(one)
        except Violation as error:
            self.close(End(Status.UNAVAILABLE, f"the core violates HTTP/2: {error}"))
        except TooMuch as error:
            self.close(End(Status.UNAVAILABLE, str(error)))
        finally:
            # Also after an error: streams whose data came before it.
            touched, self._touched = self._touched, []
            for stream in touched:
                stream.wake()
            if self._pongs and (self._streams or len(self._pongs) > PONG):
                self._write(b"")

    def flush(self) -> None:
        """Send now what begins in this turn of the reactor, so that the core can begin meanwhile."""
        if isinstance(self.transport, Prompt):
            self.transport.flush()

    def _write(self, data: bytes) -> None:
        pongs, self._pongs = self._pongs, b""
        self.transport.write(pongs + data)

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        self.usable = False
        self._fail(End(Status.UNAVAILABLE, LOST))

    def _fail(self, end: End) -> None:
        streams, self._streams, self._unsent, self._queue = [*self._streams.values()], {}, [], {}
        for stream in streams:
            stream.ended(end)
            stream.wake()

    def _left(self, stream: Stream) -> None:
        """The caller has given up this call: cancel it."""
        # Some cores accept connections before they can answer, and lose what was sent then. So after a timeout on a
        # connection without any answer, the next call takes another connection.
        late = stream.end is not None and stream.end.status == Status.DEADLINE_EXCEEDED
        self.usable = self.usable and (self._heard or not late)
        # A queued call was not begun, and cannot be reset. The reset goes out before `_gone` begins the next call.
        if stream.number in self._streams and stream.number not in self._queue:
            self.transport.write(reset(stream.number, Code.CANCEL))
        self._gone(stream.number)

    def _gone(self, number: int) -> Stream | None:
        stream = self._streams.pop(number, None)
        if stream is not None and stream.unsent:
            self._unsent.remove(stream)
        if self._queue:
            self._queue.pop(number, None)
            self._admit()
        if not (self.usable or self._streams):
            self.transport.loseConnection()
        return stream

    def _admit(self) -> None:
        """Begin queued calls, as many as the core allows."""
        while self._queue and len(self._streams) - len(self._queue) < self._most:
            number = next(iter(self._queue))
            self._begin(self._streams[number], *self._queue.pop(number))

    # Frames from the core

    def _take(self, one: WholeFrame) -> None:
        if self._block is not None:
            self._continue(self._block, one)
            return
        match one.kind:
            case Kind.DATA:
                self._take_data(one)
            case Kind.HEADERS:
                self._take_headers(one)
            case Kind.RST_STREAM:
                code = number(one.payload)
                self._end(one.stream, End(Status.UNAVAILABLE, f"the core reset the call (HTTP/2 error {code})"))
            case Kind.SETTINGS if not one.flags & ACK:
                self._set(one.payload)
            case Kind.PING if not one.flags & ACK:
                self._pongs += frame(Kind.PING, ACK, 0, one.payload)
            case Kind.GOAWAY:
                self._wind_up(number(one.payload) & STREAM)
            case Kind.WINDOW_UPDATE:
                self._widen(one.stream, number(one.payload) & STREAM)

    def _take_data(self, one: WholeFrame) -> None:
        self._taken = self._acknowledged(0, self._taken + len(one.payload))
        stream = self._streams.get(one.stream)
        if stream is None:
            return  # a call that was given up
        stream.taken = self._acknowledged(one.stream, stream.taken + len(one.payload))
        stream.received(plain(one.kind, one.flags, one.payload))
        self._touched.append(stream)
        if stream.end is not None:
            self._break_off(one.stream, stream.end)
        elif one.flags & END_STREAM:
            self._answered(one.stream, end_of({}))

    def _acknowledged(self, stream: int, taken: int) -> int:
        """Send a WINDOW_UPDATE if many bytes were received. Returns the bytes that none was sent for."""
        if taken < WINDOW_UPDATE_AFTER:
            return taken
        self.transport.write(window_update(stream, taken))
        return 0

    def _take_headers(self, one: WholeFrame) -> None:
        part = plain(one.kind, one.flags, one.payload)
        self._last = bool(one.flags & END_STREAM)
        if one.flags & END_HEADERS:
            self._take_block(one.stream, part)
        else:
            self._block, self._packed = headers.Block(one.stream, BLOCK, BLOCK), bytearray(part)
            self._block.add(one.kind, one.stream, len(part))

    def _continue(self, block: headers.Block, one: WholeFrame) -> None:
        """Take the next frame of a block of headers. Raises `Violation` if it is none, or the block is too long."""
        block.add(one.kind, one.stream, len(one.payload))
        self._packed += one.payload
        if one.flags & END_HEADERS:
            self._block = None
            self._take_block(block.stream, bytes(self._packed))

    def _take_block(self, stream: int, packed: bytes) -> None:
        fields = headers.reply(packed)
        if self._last:
            self._answered(stream, end_of(fields))
        elif (http := fields.get(":status")) != "200":
            self._break_off(stream, end_of({":status": http or ""}))

    def _answered(self, number: int, end: End) -> None:
        """The core has ended its answer, perhaps before the whole request was sent."""
        stream = self._streams.get(number)
        if stream is not None and stream.unsent:
            self._break_off(number, end)
        else:
            self._end(number, end)

    def _break_off(self, number: int, end: End) -> None:
        """End a call that is still open for the core, with a reset."""
        if number in self._streams:
            self.transport.write(reset(number, Code.CANCEL))
            self._end(number, end)

    def _end(self, number: int, end: End) -> None:
        stream = self._gone(number)
        if stream is not None:
            stream.ended(end)
            self._touched.append(stream)

    def _set(self, payload: bytes) -> None:
        if not self._heard:
            # Without MAX_CONCURRENT_STREAMS there is no limit.
            self._heard, self._most = True, STREAM
        for name, value in pairs(payload):
            if name == Setting.INITIAL_WINDOW_SIZE:
                for stream in self._streams.values():
                    stream.window += value - self._first
                self._first = value
            elif name == Setting.MAX_FRAME_SIZE:
                self._largest = value
            elif name == Setting.MAX_CONCURRENT_STREAMS:
                self._most = value
        self.transport.write(frame(Kind.SETTINGS, ACK, 0))
        self._admit()
        self._pump()

    def _wind_up(self, last: int) -> None:
        """Handle GOAWAY: calls up to stream `last` go on, later ones end, and new ones need another connection."""
        self.usable = False
        later_ones = [stream for stream in self._streams if stream > last or stream in self._queue]
        self._queue.clear()
        for later in later_ones:
            self._end(later, End(Status.UNAVAILABLE, LOST))
        if not self._streams:
            self.transport.loseConnection()

    def _widen(self, number: int, more: int) -> None:
        if number == 0:
            self._window += more
        elif (stream := self._streams.get(number)) is not None:
            stream.window += more
        self._pump()

    def _pump(self) -> None:
        """Send as much of the unsent bodies as the windows allow."""
        for stream in tuple(self._unsent):
            while stream.unsent and (room := min(self._window, stream.window, self._largest)) > 0:
                part, stream.unsent = stream.unsent[:room], stream.unsent[room:]
                self._window -= len(part)
                stream.window -= len(part)
                self.transport.write(frame(Kind.DATA, 0 if stream.unsent else END_STREAM, stream.number, bytes(part)))
            if not stream.unsent:
                stream.unsent = b""
                self._unsent.remove(stream)
