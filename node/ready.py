"""Whether the node of this machine serves: `python -m node.ready [--wait SECONDS]`, for installers and containers.

It has the node's own settings, from the environment and `.env`, and calls it as everybody does: by TLS on its ports.
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

_DESCRIPTION = "Ends with 0 when the node of this machine serves; else says what it lacks, and ends with 1."
# Of one connection.
_SECONDS = 5.0
_PAUSE = 0.2
_ANY = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - an address to call, none to listen on


class NotReady(Exception):
    """What is missing."""


def require_ready(settings: Settings) -> None:
    """Raises `NotReady` unless all ports accept, and `/readyz` does not say otherwise."""
    host = _ANY.get(settings.host, settings.host)
    try:
        for port in filter(None, (settings.rest_port, settings.grpc_port)):
            socket.create_connection((host, port), _SECONDS).close()
        # Where clients need certificates, there is none for this one.
        if settings.rest_port and settings.client_ca is None:
            _ask(host, settings.rest_port)
    except (OSError, http.client.HTTPException) as error:
        raise NotReady(f"{host}: {error}") from error


def _ask(host: str, port: int) -> None:
    """What is asked and answered is no secret, so that the certificate may be for other names."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with closing(http.client.HTTPSConnection(host, port, timeout=_SECONDS, context=context)) as connection:
        connection.request("GET", "/readyz")
        answer = connection.getresponse()
        if answer.status == http.client.SERVICE_UNAVAILABLE:
            raise NotReady(answer.read(1000).decode(errors="replace").strip())


def wait(settings: Settings, seconds: float) -> None:
    """Ask until the node serves. Raises `NotReady` when it does not within this time."""
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
    parser.add_argument("--wait", type=float, default=0, metavar="SECONDS", help="ask until it does, for so long")
    options = parser.parse_args(arguments)
    try:
        wait(load({}, Path.cwd(), drivers=()), options.wait)
    except (BadSettings, NotReady) as error:
        parser.exit(1, f"{parser.prog}: {error}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
