"""The website that REALITY hides behind: a TLS 1.3 server of another name."""

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

# Once for each of three ALPN offers (record_detect.go of xtls/reality, 2026-03; other visits end otherwise).
_LOOKS = 3
_PAGE = b"HTTP/1.1 204 No Content\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


class CoverServer:
    """Serves `cover.test` on a port of 127.0.0.1 inside its `with` block; offers h2 and http/1.1, as websites do.

    A visitor without the REALITY key is passed on to it, and gets an empty page.
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
        """For starting a core with a REALITY inbound: goes on when the core has looked at the website.

        A core does so at its start, and makes a user who comes before the end of it wait 5 s. It does not accept the
        certificate, which is how its visits are told from others.
        """
        before = self._refused
        yield
        until(lambda: self._refused >= before + _LOOKS, what="the core looks at REALITY's website")

    def _serve(self, connection: socket.socket) -> None:
        """TLS runs on a duplicate: the acceptor can then still end the connection, inside a handshake too."""
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
