"""Cost of counting Vision's bytes in the core instead of moving them with the kernel's splice.

`python -m scripts.bench.splice [MB]` prints processor seconds of the core per GB (10⁹ bytes) with XRAY_SPLICE off and
on, alternating, for a download and an upload of so many MB (default 1,000): medians of five rounds. TLS 1.3 runs
inside VLESS with Vision over REALITY, as only then a core splices a connection; the share of the bytes that it counts
while the connection is open shows whether it did.
"""

from __future__ import annotations

import socket
import ssl
import statistics
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from scripts.bench.stage import machine, stage, timed
from scripts.bench.stats import core_asking, used
from scripts.staging import certs, socks
from scripts.staging.acceptor import Acceptor
from scripts.staging.backend import backend, user
from scripts.staging.certs import Certificate
from scripts.staging.core import XrayClient
from scripts.staging.cover import CoverServer
from scripts.staging.inbounds import Kind
from scripts.staging.ports import free_port
from scripts.staging.protocols import VISION, vless
from scripts.staging.transports import reality
from scripts.staging.users import TestUser

ROUNDS = 5
MB = 1_000_000
_BLOCK = bytes(256 * 1024)
_COMMAND = 20
_INNER = "inner.test"
# Seconds between the node's readings of counters: seldom, as they would be work of the core too.
_SELDOM = "600"


class Way(NamedTuple):
    """A setting of XRAY_SPLICE: the core's pid, its counters, and the proxy port that leads through it."""

    splice: str
    core: int
    counted: Counted
    proxy: int


class Counted:
    """Bytes of all users, counted by the core."""

    def __init__(self, ask: object) -> None:
        assert callable(ask)
        self._ask = ask

    def __call__(self) -> int:
        return sum(stat.value for stat in self._ask().stat)


def main(size: int) -> None:
    print(machine())
    print(f"{size // MB} MB, {ROUNDS} rounds; processor seconds of the core per GB, seconds of the transfer")
    with TemporaryDirectory() as work, ExitStack() as stack:
        inner = certs.make(Path(work), [_INNER])
        source = stack.enter_context(tls_server(inner))
        cover = stack.enter_context(CoverServer(Path(work)))
        ways = [stack.enter_context(way(splice, cover)) for splice in ("off", "on")]
        context = ssl.create_default_context(cafile=inner.certificate)
        for name, command in (("download", b"give"), ("upload", b"take")):
            rows = [[transfer(at, source, context, command, size) for at in ways] for _ in range(ROUNDS)]
            for at, column in zip(ways, zip(*rows, strict=True), strict=True):
                cpu, wall, seen = (statistics.median(values) for values in zip(*column, strict=True))
                figures = f"{cpu * 1000 * MB / size:6.2f} s/GB {wall:7.2f} s, {seen / size:4.0%} counted live"
                print(f"  {name:9} splice {at.splice:4} {figures}", flush=True)
    print(machine())


@contextmanager
def way(splice: str, cover: CoverServer) -> Iterator[Way]:
    kind, person = Kind("vless-reality-vision", vless(VISION), reality(cover.port)), TestUser.new("live")
    port, proxy = free_port(), free_port()
    with stage(XRAY_SPLICE=splice, TRAFFIC_INTERVAL=_SELDOM) as on:
        with cover.looked_at():
            on.controller.start(backend([kind.inbound(port, "in")], [user(person, {"in": kind})]))
        with XrayClient({proxy: kind.outbound(port, person)}), core_asking(on) as ask:
            yield Way(splice, on.core, Counted(ask), proxy)


def transfer(at: Way, source: int, context: ssl.SSLContext, command: bytes, size: int) -> tuple[float, ...]:
    """Processor seconds of the core, elapsed seconds, and bytes that were counted before the connection ended."""
    with (
        socks.connect(at.proxy, "127.0.0.1", source, timeout=60) as link,
        context.wrap_socket(link, server_hostname=_INNER) as inner,
    ):
        before, counted = used(at.core), at.counted()
        wall = timed(lambda: move(inner, command, size))
        return used(at.core) - before, wall, at.counted() - counted


def move(link: ssl.SSLSocket, command: bytes, size: int) -> None:
    link.sendall((b"%b %d" % (command, size)).ljust(_COMMAND))
    if command == b"give":
        receive(link, size)
    else:
        send(link, size)
        assert link.recv(1), "the server did not confirm the upload"


@contextmanager
def tls_server(certificate: Certificate) -> Iterator[int]:
    """Run a TLS 1.3 server with the commands `give N` and `take N`. Yields its port."""
    port, context = free_port(), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate.certificate, certificate.key)

    def serve(connection: socket.socket) -> None:
        with context.wrap_socket(connection.dup(), server_side=True) as link:
            while command := link.recv(_COMMAND):
                word, size = command.split()
                if word == b"give":
                    send(link, int(size))
                else:
                    receive(link, int(size))
                    link.sendall(b".")

    with Acceptor("127.0.0.1", port, serve):
        yield port


def send(link: ssl.SSLSocket, size: int) -> None:
    for start in range(0, size, len(_BLOCK)):
        link.sendall(_BLOCK[: size - start])


def receive(link: ssl.SSLSocket, size: int) -> None:
    buffer = bytearray(len(_BLOCK))
    while size:
        got = link.recv_into(buffer, min(size, len(buffer)))
        if not got:
            raise ConnectionResetError(f"the connection ended {size} bytes early")
        size -= got


if __name__ == "__main__":
    main(MB * int(sys.argv[1]) if len(sys.argv) > 1 else 1000 * MB)
