"""Clients of both transports that send the same bytes as the libraries of deployed controllers.

They use no code or messages of the product: field numbers and paths are literals.
"""

from __future__ import annotations

import contextlib
import http.client
import socket
import ssl
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple, Protocol

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.events import ConnectionTerminated, DataReceived, ResponseReceived, StreamEnded, StreamReset, TrailersReceived

from scripts.staging.target import Target
from scripts.staging.wait import until

PATHS = {
    "Start": "POST /start",
    "Stop": "PUT /stop",
    "GetBaseInfo": "GET /info",
    "GetLogs": "GET /logs",
    "GetBackendStats": "GET /stats/backend",
    "GetStats": "GET /stats",
    "GetUserOnlineStats": "GET /stats/user/online",
    "SyncUser": "PUT /user/sync",
    "SyncUsers": "PUT /users/sync",
    "SyncUsersChunked": "PUT /users/sync/chunked",
}
# gRPC status codes.
OK, INVALID_ARGUMENT, NOT_FOUND, UNIMPLEMENTED, INTERNAL, UNAVAILABLE, UNAUTHENTICATED = 0, 3, 5, 12, 13, 14, 16

Value = str | bytes | int | Sequence[str | bytes]


def varint(value: int) -> bytes:
    low, more = value & 0x7F, value >> 7
    return bytes([low | 0x80]) + varint(more) if more else bytes([low])


def pack(fields: Mapping[int, Value]) -> bytes:
    """Encode a protobuf message: strings with their length, integers as varints, lists as repeated fields."""
    packed = b""
    for number, value in fields.items():
        if isinstance(value, int):
            packed += varint(number << 3) + varint(value)
            continue
        for each in [value] if isinstance(value, str | bytes) else value:
            content = each.encode() if isinstance(each, str) else each
            packed += varint(number << 3 | 2) + varint(len(content)) + content
    return packed


def unpack(data: bytes) -> dict[int, list[bytes]]:
    """Decode a protobuf message; integers stay varint bytes, which `number_of` reads."""
    fields: dict[int, list[bytes]] = defaultdict(list)
    while data:
        key, data = _cut(data)
        if key & 7 == 1:  # only in fields that deployed controllers do not know
            fields[key >> 3].append(data[:8])
            data = data[8:]
            continue
        value, rest = _cut(data)
        if key & 7 == 2:
            fields[key >> 3].append(rest[:value])
            rest = rest[value:]
        else:
            assert key & 7 == 0, f"wire type {key & 7} does not occur in this interface"
            fields[key >> 3].append(varint(value))
        data = rest
    return fields


def number_of(fields: Mapping[int, list[bytes]], number: int) -> int:
    """An integer field, 0 if it is absent."""
    return _cut(fields[number][0])[0] if fields.get(number) else 0


def text_of(fields: Mapping[int, list[bytes]], number: int) -> str:
    """A string field, "" if it is absent."""
    return fields[number][0].decode() if fields.get(number) else ""


def _cut(data: bytes) -> tuple[int, bytes]:
    """Decode the varint at the begin of the data. Returns it and the rest."""
    end = next(index for index, byte in enumerate(data) if byte < 0x80) + 1
    return sum((byte & 0x7F) << 7 * index for index, byte in enumerate(data[:end])), data[end:]


class Answer(NamedTuple):
    """The result of a call: HTTP or gRPC status, the text of an error, the message of a success."""

    status: int
    text: str = ""
    body: bytes = b""

    @property
    def fine(self) -> bool:
        return self.status in (200, OK)

    def is_error(self, http: int, grpc: int) -> bool:
        return self.status in (http, grpc)


class Tail(Protocol):
    """An open log stream: the bytes received, and whether the node ended it cleanly (`done`)."""

    def read(self) -> bytes: ...
    @property
    def done(self) -> bool: ...
    def abandon(self) -> None: ...


class Wire(Protocol):
    """One transport."""

    def call(self, name: str, *messages: bytes, key: str | None = None) -> Answer: ...
    def logs(self) -> Tail: ...
    def close(self) -> None: ...


def dial(node: Target, port: int, *alpn: str) -> ssl.SSLSocket:
    """Connect with TLS, the pinned certificate and a check of the host name."""
    context = ssl.create_default_context(cadata=node.pem)
    context.set_alpn_protocols(alpn)
    return context.wrap_socket(socket.create_connection(("127.0.0.1", port), 20), server_hostname="localhost")


class RestWire:
    """REST as the newer library sends it: it offers only h2 in ALPN, and speaks HTTP/1.1 anyway."""

    def __init__(self, node: Target) -> None:
        self._node = node

    def call(self, name: str, *messages: bytes, key: str | None = None) -> Answer:
        verb, path = PATHS[name].split()
        chunked = name == "SyncUsersChunked"
        body = b"".join(varint(len(each)) + each if chunked else each for each in messages)
        return self.send(verb, path, body, key=key)

    def send(self, verb: str, path: str, body: bytes | None, key: str | None = None) -> Answer:
        """One request on its own connection; without Content-Length if `body` is None."""
        with dial(self._node, self._node.rest_port, "h2") as link:
            link.sendall(self._head(verb, path, body, key) + (body or b""))
            response = http.client.HTTPResponse(link, method=verb)
            response.begin()
            content = response.read()
            media_type = response.getheader("Content-Type", "")
        if response.status == 200:
            return Answer(200, body=content)
        assert media_type.startswith("text/plain"), media_type
        return Answer(response.status, content.decode())

    def logs(self) -> Tail:
        link = dial(self._node, self._node.rest_port, "h2")
        link.sendall(self._head("GET", "/logs", None, None))
        return _RestTail(link)

    def close(self) -> None:
        """Do nothing: no connection is kept open."""

    def _head(self, verb: str, path: str, body: bytes | None, key: str | None) -> bytes:
        lines = [f"{verb} {path} HTTP/1.1", "Host: localhost", f"x-api-key: {self._node.key if key is None else key}"]
        lines += [] if body is None else ["Content-Type: application/x-protobuf", f"Content-Length: {len(body)}"]
        return "\r\n".join([*lines, "", ""]).encode()


class _RestTail:
    def __init__(self, link: ssl.SSLSocket) -> None:
        self._link = link
        self._came = b""
        self._over = False
        until(lambda: b"\r\n\r\n" in self.read(), what="the headers of the log stream")
        assert self._came.startswith(b"HTTP/1.1 200 "), self._came

    def read(self) -> bytes:
        self._link.settimeout(0.05)
        with contextlib.suppress(TimeoutError):
            data = self._link.recv(65_536)
            self._came += data
            self._over |= not data
        return self._came

    @property
    def done(self) -> bool:
        return self._over or self._came.endswith(b"\r\n0\r\n\r\n")

    def abandon(self) -> None:
        self._link.close()


class Stream:
    """A call over gRPC, and what has been received so far."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.data = b""
        self.headers: dict[str, str] = {}
        self.over = self.reset = False

    @property
    def answer(self) -> Answer:
        return Answer(int(self.headers["grpc-status"]), self.headers.get("grpc-message", ""), self.data[5:])


class GrpcWire:
    """gRPC as both libraries send it: no deadline, one connection for all calls, lower-case headers."""

    def __init__(self, node: Target) -> None:
        self._node = node
        self._streams: dict[int, Stream] = {}
        self._http = H2Connection(H2Configuration(client_side=True))
        self._link = dial(node, node.grpc_port, "h2")
        self._link.settimeout(0.05)
        self.lost = False
        assert self._link.selected_alpn_protocol() == "h2"
        self._http.initiate_connection()
        self._flush()

    def call(self, name: str, *messages: bytes, key: str | None = None) -> Answer:
        stream = self.open(name, key)
        for message in messages or (b"",):
            self.send(stream, message)
        return self.end(stream)

    def open(self, name: str, key: str | None = None) -> Stream:
        """Send the headers of a call."""
        stream = Stream(self._http.get_next_available_stream_id())
        self._streams[stream.number] = stream
        pseudo = {":method": "POST", ":scheme": "https", ":path": f"/service.NodeService/{name}"}
        usual = {":authority": "localhost", "te": "trailers", "content-type": "application/grpc"}
        own = {"user-agent": "grpc-python-grpclib/0.4", "x-api-key": self._node.key if key is None else key}
        self._http.send_headers(stream.number, [*pseudo.items(), *usual.items(), *own.items()])
        self._flush()
        return stream

    def send(self, stream: Stream, message: bytes) -> None:
        """Send one message of a call, which stays open."""
        data = b"\0" + len(message).to_bytes(4) + message
        for start in range(0, len(data), self._http.max_outbound_frame_size):
            size = min(len(data) - start, self._http.max_outbound_frame_size)
            until(partial(self._room, stream, size), what="room in the node's window")
            self._http.send_data(stream.number, data[start : start + size])
            self._flush()

    def end(self, stream: Stream) -> Answer:
        """Half-close the call and wait for the node's reply."""
        self.half_close(stream)
        until(partial(self._is_over, stream), 30, "the call ends")
        return stream.answer

    def half_close(self, stream: Stream) -> None:
        self._http.end_stream(stream.number)
        self._flush()

    def abandon(self, stream: Stream) -> None:
        """Cancel a call as grpclib does."""
        self._http.reset_stream(stream.number, ErrorCodes.NO_ERROR)
        self._flush()

    def logs(self) -> Tail:
        return _GrpcTail(self)

    def close(self) -> None:
        self._link.close()

    def pump(self) -> None:
        """Receive and process pending bytes."""
        try:
            data = self._link.recv(65_536)
        except TimeoutError:
            return
        except OSError:
            data = b""
        self.lost |= not data
        for event in self._http.receive_data(data) if data else ():
            self._take(event)
        with contextlib.suppress(OSError):
            self._flush()

    def _take(self, event: object) -> None:
        stream = self._streams.get(getattr(event, "stream_id", None) or 0)
        if isinstance(event, ConnectionTerminated):
            self.lost = True
        elif stream is None:
            return
        elif isinstance(event, DataReceived):
            stream.data += event.data or b""
            self._http.acknowledge_received_data(event.flow_controlled_length or 0, stream.number)
        elif isinstance(event, ResponseReceived | TrailersReceived):
            pairs = event.headers or ()
            stream.headers |= {_text(name): _text(value) for name, value in pairs}
        elif isinstance(event, StreamEnded | StreamReset):
            stream.over, stream.reset = True, isinstance(event, StreamReset)

    def _is_over(self, stream: Stream) -> bool:
        self.pump()
        return stream.over

    def _room(self, stream: Stream, size: int) -> bool:
        if self._http.local_flow_control_window(stream.number) < size:
            self.pump()
        return self._http.local_flow_control_window(stream.number) >= size

    def _flush(self) -> None:
        self._link.sendall(self._http.data_to_send())


class _GrpcTail:
    def __init__(self, wire: GrpcWire) -> None:
        self._wire = wire
        self._stream = wire.open("GetLogs")
        wire.send(self._stream, b"")
        wire.half_close(self._stream)
        until(lambda: self.read() or self.done, what="the first line of the log stream")

    def read(self) -> bytes:
        self._wire.pump()
        return self._stream.data

    @property
    def done(self) -> bool:
        return "grpc-status" in self._stream.headers or (self._stream.over and not self._stream.reset)

    def abandon(self) -> None:
        self._wire.abandon(self._stream)


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
