"""The website that REALITY impersonates: a TLS 1.3 server for another host name."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

from scripts.staging import certs
from scripts.staging.acceptor import Acceptor
from scripts.staging.ports import free_port
from scripts.staging.wait import until

NAME = "cover.test"

# Once for each of three ALPN offers (record_detect.go of xtls/reality, 2026-03; other visits end without an alert).
_LOOKS = 3
_PAGE = b"HTTP/1.1 204 No Content\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


class CoverServer:
    """Serves `cover.test` on a port of 127.0.0.1 inside its `with` block; offers h2 and http/1.1, as websites do.

    REALITY forwards visitors without its key to this server, which sends them an empty page.
    """

    def __init__(self, directory: Path) -> None:
        self.port = free_port()
        self.certificate = certs.make(directory, [NAME])
        self._context = _context(self.certificate)
        self._lock = threading.Lock()
        self._refused = 0
        self._tcp = Acceptor("127.0.0.1", self.port, self._serve)

    def __enter__(self) -> Self:
        self._tcp.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._tcp.__exit__(kind, error, trace)

    @contextlib.contextmanager
    def looked_at(self) -> Iterator[None]:
        """Start a core with a REALITY inbound inside; the block's end waits until the core has probed the website.

        A core probes at its start, and makes users who connect during the probe wait 5 s. It refuses the certificate
        with a TLS alert, which distinguishes its visits from others.
        """
        before = self._refused
        yield
        until(lambda: self._refused >= before + _LOOKS, what="the core has probed REALITY's website")

    def _serve(self, connection: socket.socket) -> None:
        """Serve one visit. TLS runs on a duplicate socket, so that the acceptor can close even during a handshake."""
        try:
            with self._context.wrap_socket(connection.dup(), server_side=True) as tls:
                if tls.recv(16 * 1024):
                    tls.sendall(_PAGE)
        except ssl.SSLError as error:
            with self._lock:
                self._refused += "ALERT" in (error.reason or "")


def _context(certificate: certs.Certificate) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_cert_chain(certificate.certificate, certificate.key)
    context.set_alpn_protocols(["h2", "http/1.1"])
    return context
