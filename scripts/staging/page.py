"""A web page with which cores measure the latency of outbounds."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class _Page(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(204)
        self.end_headers()

    do_HEAD = do_GET  # noqa: N815

    def log_message(self, *_: object) -> None:
        """Log nothing: cores request the page every second."""


@contextmanager
def page(host: str) -> Iterator[str]:
    """Serve a page that answers every request with 204. Yields its URL."""
    with ThreadingHTTPServer((host, 0), _Page) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://{host}:{server.server_port}/"
        server.shutdown()
