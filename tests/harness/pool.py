"""A REST client that keeps one connection, as the connection pools of common libraries do."""

from __future__ import annotations

import select
import ssl
from http.client import HTTPSConnection

from scripts.staging.target import Target, credentials


class Pool:
    """Checks before each call for unsolicited data or an end of the connection, and then reconnects."""

    def __init__(self, node: Target) -> None:
        self._link = HTTPSConnection(
            node.host, node.rest_port, timeout=30, context=ssl.create_default_context(cadata=node.pem)
        )
        self._headers = dict(credentials(node.key, "bearer"))

    def get(self, path: str) -> int:
        """GET the path. Returns the status; raises `OSError`, `HTTPException`."""
        if self.ended:
            self._link.close()
        try:
            self._link.request("GET", path, headers=self._headers)
            reply = self._link.getresponse()
            reply.read()
        except BaseException:
            self._link.close()
            raise
        return reply.status

    @property
    def ended(self) -> bool:
        """Whether the idle connection is readable: its end, or unsolicited data."""
        sock = self._link.sock
        return sock is not None and bool(select.select([sock], [], [], 0)[0])

    def close(self) -> None:
        self._link.close()
