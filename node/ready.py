"""Check that the node of this machine is ready: `python -m node.ready [--wait SECONDS]`, for installers and containers.

It reads the node's own settings, from the environment and `.env`, and calls the node over TLS on its ports, as any
client does.
"""

from __future__ import annotations

import argparse
import http.client
import socket
import ssl
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from node.settings import BadSettings, Settings, load

_DESCRIPTION = "Exit with 0 if the node of this machine is ready; otherwise print the reason and exit with 1."
# Seconds for one connection, and between two attempts.
_SECONDS = 5.0
_PAUSE = 0.2


class NotReady(Exception):
    """The node is not ready. The text is the reason."""


def require_ready(settings: Settings) -> None:
    """Raise `NotReady` if a port does not accept, or `/readyz` answers 503."""
    host = settings.door.own_address
    try:
        for port in filter(None, (settings.door.rest_port, settings.door.grpc_port)):
            socket.create_connection((host, port), _SECONDS).close()
        # Where clients need certificates, this program has none.
        if settings.door.rest_port and settings.door.client_ca is None:
            _ask(host, settings.door.rest_port, "" if settings.door.strangers == "answer" else settings.door.name)
    except (OSError, http.client.HTTPException) as error:
        raise NotReady(f"{host}: {error}") from error


def _ask(host: str, port: int, name: str) -> None:
    """Ask `/readyz`, by this name if there is one. The certificate is not verified: nothing here is secret but that."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with closing(http.client.HTTPSConnection(host, port, timeout=_SECONDS, context=context)) as connection:
        if name:
            link = socket.create_connection((host, port), _SECONDS)
            connection.sock = context.wrap_socket(link, server_hostname=name)
        connection.request("GET", "/readyz")
        answer = connection.getresponse()
        if answer.status == http.client.SERVICE_UNAVAILABLE:
            raise NotReady(answer.read(1000).decode(errors="replace").strip())


def wait(settings: Settings, seconds: float) -> None:
    """Wait until the node is ready. Raises `NotReady` after this many seconds."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            return require_ready(settings)
        except NotReady:
            if time.monotonic() >= deadline:
                raise
        time.sleep(_PAUSE)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m node.ready", description=_DESCRIPTION)
    parser.add_argument("--wait", type=float, default=0, metavar="SECONDS", help="how long to wait for it (default: 0)")
    options = parser.parse_args(arguments)
    try:
        wait(load({}, Path.cwd(), drivers=()), options.wait)
    except (BadSettings, NotReady) as error:
        parser.exit(1, f"{parser.prog}: {error}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
