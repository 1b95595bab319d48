"""Clients of the node that read replies as slowly as a test wants, and leave at any time."""

from __future__ import annotations

import contextlib
import http.client
import socket
import ssl
import struct
import time

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.events import DataReceived
from h2.settings import SettingCodes


class Wire:
    """A TLS client that reads only on demand. Blocking: for threads.

    `receive` is the size of the kernel's receive buffer in bytes; 0 for the default.
    """

    def __init__(self, port: int, pem: str, *alpn: str, receive: int = 0) -> None:
        context = ssl.create_default_context(cadata=pem)
        context.set_alpn_protocols(alpn)
        link = socket.socket()
        if receive:
            link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive)
        link.settimeout(10)
        link.connect(("127.0.0.1", port))
        self.link = context.wrap_socket(link, server_hostname="localhost")

    def send(self, *parts: bytes) -> None:
        self.link.sendall(b"".join(parts))

    def read(self, size: int) -> int:
        """Read until so many bytes have arrived, or the connection ends. Returns their number."""
        got = 0
        with contextlib.suppress(ssl.SSLEOFError, ConnectionResetError):
            while got < size and (data := self.link.recv(min(65_536, size - got))):
                got += len(data)
        return got

    def take(self) -> bytes:
        """Read exactly one response. Returns its body."""
        response = http.client.HTTPResponse(self.link)
        response.begin()
        return response.read()

    def reset(self) -> None:
        self.link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.link.close()

    def close(self) -> None:
        self.link.close()


class GrpcWire(Wire):
    """A gRPC client with a given flow-control window."""

    def __init__(self, port: int, pem: str, window: int = 65_535, receive: int = 0) -> None:
        super().__init__(port, pem, "h2", receive=receive)
        self.http = H2Connection(H2Configuration(client_side=True))
        self.http.initiate_connection()
        if window > 65_535:
            self.http.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: window})
            self.http.increment_flow_control_window(window - 65_535)

    def ask(self, path: str, key: str, message: bytes = b"", deadline: str = "60S") -> None:
        """Send a complete request."""
        basic = {":method": "POST", ":scheme": "https", ":path": path, ":authority": "localhost", "te": "trailers"}
        more = {"content-type": "application/grpc", "x-api-key": key, "grpc-timeout": deadline}
        self.http.send_headers(1, [*basic.items(), *more.items()])
        self.http.send_data(1, b"\0" + len(message).to_bytes(4) + message, end_stream=True)
        self.send(self.http.data_to_send())

    def read(self, size: int) -> int:
        """Read until so many bytes of the message have arrived. Returns their number."""
        got, end = 0, time.monotonic() + 10
        while got < size and time.monotonic() < end:
            events = self.http.receive_data(self.link.recv(65_536))
            got += sum(len(event.data or b"") for event in events if isinstance(event, DataReceived))
            self.send(self.http.data_to_send())
        return got

    def cancel(self) -> None:
        self.http.reset_stream(1, ErrorCodes.CANCEL)
        self.send(self.http.data_to_send())
