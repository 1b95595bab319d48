"""A faulty node: a REST proxy in front of a real one that changes replies."""

from __future__ import annotations

import http.client
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from scripts.staging.node import NodeProcess
from scripts.staging.target import Address
from tests.harness.rest import Response, Rest

# Takes verb, path and response; returns the changed response.
Spoil = Callable[[str, str, Response], Response]
Headers = dict[str, str]
_DROPPED = ("host", "connection", "transfer-encoding", "content-length")


@contextmanager
def broken(node: NodeProcess, spoil: Spoil, mend: Callable[[Headers], Headers] = dict) -> Iterator[Address]:
    """Run the proxy. `spoil` changes the node's responses; `mend` changes the request's headers before the node.

    A log stream is silent and stays open until the client leaves; it ends at once if `spoil` adds headers to it.
    """

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def pass_on(self) -> None:
            headers = {name.lower(): value for name, value in self.headers.items() if name.lower() not in _DROPPED}
            response = spoil(
                self.command, self.path, _asked(node, self.command, self.path, self._body(), mend(headers))
            )
            held = self.path == "/logs" and response.status == http.client.OK and not response.headers
            self.send_response(response.status)
            if not held:
                self.send_header("Content-Length", str(len(response.body)))
            self.end_headers()
            self.wfile.write(response.body)
            if held:
                self.rfile.read()

        do_GET = do_PUT = do_POST = do_DELETE = pass_on  # noqa: N815

        def _body(self) -> bytes:
            if self.headers.get("Transfer-Encoding") != "chunked":
                return self.rfile.read(int(self.headers.get("Content-Length", 0)))
            return b"".join(iter(self._chunk, b""))

        def _chunk(self) -> bytes:
            data = self.rfile.read(int(self.rfile.readline(), 16))
            self.rfile.readline()
            return data

        def log_message(self, *_: object) -> None:
            """Log nothing."""

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(node.certificate.certificate, node.certificate.key)
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield Address(node.host, server.server_port, node.grpc_port, node.key, node.pem)
        server.shutdown()


def _asked(node: NodeProcess, verb: str, path: str, body: bytes, headers: Headers) -> Response:
    connection = Rest(node).connection()
    try:
        connection.request(verb, path, body or None, headers)
        response = connection.getresponse()
        whole = b"" if path == "/logs" and response.status == http.client.OK else response.read()
        return Response(response.status, {}, whole)
    finally:
        connection.close()
