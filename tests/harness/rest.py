"""Raw REST calls to the node in either dialect, with a pinned certificate and a check of the host name."""

from __future__ import annotations

import http.client
import json
import ssl
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from google.protobuf.message import Message

from protos import service_pb2
from scripts.staging.acceptor import wake
from scripts.staging.target import Dialect, Target, credentials

M = TypeVar("M", bound=Message)


class Response(NamedTuple):
    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def text(self) -> str:
        return self.body.decode()

    def json(self) -> Any:
        return json.loads(self.body)


class Rest:
    """Calls one node; each call has its own connection, so that threads may share the object.

    `key` defaults to the node's; an empty one sends no credentials. `timeout` is in seconds, `alpn` the protocols
    offered; the client speaks HTTP/1.1 in any case.
    """

    def __init__(
        self,
        node: Target,
        key: str | None = None,
        dialect: Dialect = "bearer",
        timeout: float = 30.0,
        alpn: Sequence[str] = (),
    ) -> None:
        self._address = node.host, node.rest_port
        self._context = ssl.create_default_context(cadata=node.pem)
        if alpn:
            self._context.set_alpn_protocols(list(alpn))
        self._timeout = timeout
        self.dialect = dialect
        self.credentials = credentials(node.key if key is None else key, dialect)

    def call(
        self,
        verb: str,
        path: str,
        message: Message | bytes | Iterable[bytes] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Response:
        """One request and its reply of any status. An iterable is sent with chunked encoding, piece by piece.

        `headers` are added to the default ones. A reply that comes before the node has read the body is returned too.
        """
        connection = self.connection()
        try:
            self._request(connection, verb, path, message, headers or {})
            response = connection.getresponse()
            return Response(response.status, dict(response.getheaders()), response.read())
        finally:
            connection.close()

    def message(self, verb: str, path: str, request: Message | bytes | Iterable[bytes] | None, reply: type[M]) -> M:
        """The reply as a message. Raises `RestError` for any status except 200."""
        response = self.call(verb, path, request)
        if response.status != 200:
            raise RestError(response)
        return reply.FromString(response.body)

    def logs(self, timeout: float | None = None) -> LogStream:
        """Open `GET /logs`. Raises `RestError` if the node refuses."""
        connection = self.connection()
        self._request(connection, "GET", "/logs", None, {})
        assert connection.sock
        connection.sock.settimeout(timeout)
        return LogStream(connection, events=self.dialect == "bearer")

    def connection(self) -> http.client.HTTPSConnection:
        """A connection to the node, for tests that send their own HTTP."""
        return http.client.HTTPSConnection(*self._address, timeout=self._timeout, context=self._context)

    def _request(
        self,
        connection: http.client.HTTPSConnection,
        verb: str,
        path: str,
        message: Message | bytes | Iterable[bytes] | None,
        headers: Mapping[str, str],
    ) -> None:
        body = message.SerializeToString() if isinstance(message, Message) else message
        content = {} if body is None else {"Content-Type": "application/x-protobuf"}
        chunked = body is not None and not isinstance(body, bytes)
        if chunked:
            content["Transfer-Encoding"] = "chunked"
        try:
            connection.request(verb, path, body, {**self.credentials, **content, **headers}, encode_chunked=chunked)
        except (BrokenPipeError, ConnectionResetError, ssl.SSLEOFError):
            assert connection.sock, "the node closed the connection before the request"


class RestError(Exception):
    """A status other than 200."""

    def __init__(self, response: Response) -> None:
        super().__init__(f"{response.status}: {response.text}")
        self.response = response


class LogStream:
    """The lines of `GET /logs`, one at a time, until the node ends the stream or `close` is called, from any thread.

    In the Bearer dialect an event's `data:` is the line, and comments (the heartbeat) are skipped.
    """

    def __init__(self, connection: http.client.HTTPSConnection, events: bool) -> None:
        self._socket = connection.sock
        self._response = connection.getresponse()
        self._events = events
        self._closed = False
        if self._response.status != 200:
            body = self._response.read()
            raise RestError(Response(self._response.status, dict(self._response.getheaders()), body))

    @property
    def headers(self) -> Mapping[str, str]:
        return dict(self._response.getheaders())

    def __iter__(self) -> Iterator[str]:
        try:
            while raw := self._response.readline():
                line = raw.decode().rstrip("\r\n")
                if not self._events:
                    yield line
                elif line.startswith("data:"):
                    yield line.removeprefix("data:").removeprefix(" ")
        except (OSError, ValueError, http.client.HTTPException):
            if not self._closed:
                raise

    def close(self) -> None:
        self._closed = True
        wake(self._socket)


def delimited(messages: Iterable[service_pb2.UsersChunk]) -> Iterator[bytes]:
    """Each message after its length as a varint: the body of `PUT /users/sync/chunked`."""
    for message in messages:
        body = message.SerializeToString()
        yield _varint(len(body)) + body


def _varint(value: int) -> bytes:
    low, rest = value & 0x7F, value >> 7
    return bytes((low | 0x80,)) + _varint(rest) if rest else bytes((low,))
