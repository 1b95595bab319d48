"""What the doctor says of the way to a node, with a small server for each fault."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path

import pytest

from node.doctor import network, running
from node.doctor.findings import Check, Finding, Level
from scripts.staging.acceptor import Acceptor
from scripts.staging.ports import free_port
from tests.node.doctor.test_checks import made

DAY = timedelta(days=1)
SECONDS = 1.0


@contextmanager
def server(
    directory: Path, life: tuple[timedelta, timedelta], protocols: Sequence[str], ahead: timedelta
) -> Iterator[tuple[int, bytes]]:
    """Speak TLS as `box`, with a certificate of this life, and answer with the time. Yields the port and the PEM."""
    now = datetime.now(UTC)
    pem, key = made(now + life[1], ["box"], now + life[0])
    file = directory / "pair.pem"
    file.write_bytes(pem + key)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(file)
    context.set_alpn_protocols(protocols)

    def serve(connection: socket.socket) -> None:
        with context.wrap_socket(connection.dup(), server_side=True) as tls:
            if tls.recv(4096):
                date = format_datetime(datetime.now(UTC) + ahead, usegmt=True)
                tls.sendall(f"HTTP/1.1 404 Not Found\r\nDate: {date}\r\n\r\n".encode())

    port = free_port()
    with Acceptor("127.0.0.1", port, serve):
        yield port, pem


def found(
    directory: Path,
    name: str = "box",
    life: tuple[timedelta, timedelta] = (-DAY, DAY),
    protocols: Sequence[str] = ("h2", "http/1.1"),
    ahead: timedelta = timedelta(),
    trust: bytes = b"",
) -> list[Finding]:
    """The findings of a node over gRPC behind such a server."""
    with server(directory, life, protocols, ahead) as (port, pem):
        return list(running.way(network.way("127.0.0.1", port, name, trust or pem, SECONDS), name, grpc=True))


def faults(findings: Sequence[Finding]) -> list[tuple[Check, str]]:
    return [(each.check, each.found) for each in findings if each.level is Level.FAIL]


def test_a_way_without_faults(tmp_path: Path) -> None:
    """Every check is ok."""
    every = [Check.REACH, Check.TRUST, Check.NAME, Check.DIFFERENCE, Check.HTTP2]
    assert [(each.check, each.level) for each in found(tmp_path)] == [(check, Level.OK) for check in every]


def test_a_wrong_name(tmp_path: Path) -> None:
    """The finding has both names, and nothing else is wrong."""
    assert faults(found(tmp_path, "berlin")) == [(Check.NAME, "the certificate is for box, not for berlin")]


def test_another_certificate(tmp_path: Path) -> None:
    """As of a proxy that ends TLS."""
    other, _ = made(datetime.now(UTC) + DAY, ["box"])
    [(check, _)] = faults(found(tmp_path, trust=other))
    assert check is Check.TRUST


@pytest.mark.parametrize(
    ("life", "words"), [((-3 * DAY, -DAY), "expired"), ((DAY, 3 * DAY), "not yet valid")], ids=["expired", "early"]
)
def test_a_certificate_out_of_its_time(tmp_path: Path, life: tuple[timedelta, timedelta], words: str) -> None:
    """The finding has the days, to be compared with the clocks."""
    [(check, text)] = faults(found(tmp_path, life=life))
    assert check is Check.TRUST and words in text
    assert f"valid from {datetime.now(UTC) + life[0]:%Y-%m-%d} to " in text


@pytest.mark.parametrize(("hours", "words"), [(1, "3600 s ahead"), (-1, "s behind")])
def test_a_clock_that_is_off(tmp_path: Path, hours: int, words: str) -> None:
    """The finding has the difference; also together with a certificate that is thereby not valid."""
    [(check, text)] = faults(found(tmp_path, ahead=timedelta(hours=hours, milliseconds=500)))
    assert check is Check.DIFFERENCE and text.startswith("the node's clock is ") and words in text
    both = faults(found(tmp_path, life=(DAY, 3 * DAY), ahead=timedelta(days=2)))
    assert [check for check, _ in both] == [Check.TRUST, Check.DIFFERENCE]


def test_a_proxy_without_http2(tmp_path: Path) -> None:
    """It matters to gRPC; for REST it is a warning."""
    [(check, text)] = faults(found(tmp_path, protocols=["http/1.1"]))
    assert check is Check.HTTP2 and "HTTP/1.1 alone" in text
    [last] = list(running.way(network.Way(http2=False), "box", grpc=False))[-1:]
    assert (last.check, last.level) == (Check.HTTP2, Level.WARN)


def test_a_blocked_port() -> None:
    """One that drops, one that refuses, and one where another program listens."""
    with ExitStack() as stack:
        full = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        port = full.getsockname()[1]
        for _ in range(3):  # the kernel drops further ones
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(("127.0.0.1", port))
        dropped = network.way("127.0.0.1", port, "box", None, 0.3)
    refused = network.way("127.0.0.1", free_port(), "box", None, SECONDS)
    with Acceptor("127.0.0.1", closing := free_port(), lambda connection: connection.sendall(b"SSH-2.0-x\r\n")):
        strange = network.way("127.0.0.1", closing, "box", None, SECONDS)
    told = [faults(list(running.way(seen, "box", grpc=False))) for seen in (dropped, refused, strange)]
    assert [[check for check, _ in each] for each in told] == [[Check.REACH]] * 3
    texts = [text for ((_, text),) in told]
    assert texts[:2] == ["no answer within 0.3 s", "Connection refused"]
    assert texts[2].startswith("the port is open, but TLS fails: ")
