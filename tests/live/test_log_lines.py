"""The real node's own log: always JSON, users named only on request, few lines for any number of strangers."""

from __future__ import annotations

import json
import os
import signal
import socket
import ssl
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from scripts.staging.controller import ControllerError
from scripts.staging.inbounds import Kind
from scripts.staging.node import NodeProcess
from scripts.staging.users import TestUser
from scripts.staging.wait import until
from tests.conftest import Place, control, member, run

ANNA, BERT = (TestUser.new(f"{name}@test") for name in ("anna", "bert"))
HANDSHAKES, KEYS, FRAMES = 3_000, 400, 100
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


def lines(node: NodeProcess) -> list[dict[str, Any]]:
    """The node's output, stdout and stderr: each line must be JSON."""
    return [json.loads(line) for line in node.lines]


def knock(node: NodeProcess) -> None:
    with suppress(OSError), socket.create_connection((node.host, node.rest_port), 10) as link:
        link.sendall(b"this is no handshake\r\n\r\n")
        link.recv(100)


def shaken(node: NodeProcess, port: int, said: bytes) -> None:
    """Complete a TLS handshake, send this, and wait briefly for the first bytes of a reply."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with suppress(OSError), socket.create_connection((node.host, port), 10) as link, context.wrap_socket(link) as tls:
        tls.sendall(said)
        tls.settimeout(0.05)
        tls.recv(100)


@pytest.mark.slow
def test_a_flood_of_strangers(tmp_path: Path) -> None:
    """Thousands of bad handshakes and keys are a handful of lines, with the number that each stands for."""
    with NodeProcess(tmp_path, LOG_FORMAT="json") as node:
        request = b"GET /info HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer wrong-wrong-wrong-wrong\r\n\r\n"
        before = len(node.lines)
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda _: knock(node), range(HANDSHAKES)))
            list(pool.map(lambda _: shaken(node, node.rest_port, request), range(KEYS)))
            list(pool.map(lambda _: shaken(node, node.grpc_port, PREFACE + b"\xff" * 40), range(FRAMES)))
        with control(node, "grpc") as controller:
            assert controller.info().state == "stopped"
        said = lines(node)[before:]
        assert len(said) < 10, said
        node.stop()
        said = lines(node)[before:]
        assert len(said) < 20, said
    counted = {line["fields"]["what"]: line["fields"]["count"] for line in said if "count" in line.get("fields", {})}
    assert counted["a TLS handshake failed"] >= HANDSHAKES - 1
    # A busy node may find that the client has closed the connection, and with it the request.
    assert counted["a request with a wrong key or none"] >= KEYS // 10


def test_a_log_file(tmp_path: Path) -> None:
    """The log goes as JSON to the file that twistd names, also after a rotation."""
    file = tmp_path / "node.log"
    with NodeProcess(tmp_path, twistd=[f"--logfile={file}"], LOG_FORMAT="json") as node:
        until(lambda: "is ready" in file.read_text(), 30, "it is ready")
        assert node.lines == []
        os.kill(node.pid, signal.SIGUSR1)
        until(lambda: file.with_name("node.log.1").exists(), what="the file is turned over")
        os.kill(node.pid, signal.SIGHUP)
        until(lambda: "serving" in file.read_text(), what="the new one is written")
    for each in (file, file.with_name("node.log.1")):
        assert all(json.loads(line)["logger"] for line in each.read_text().splitlines())


@pytest.mark.parametrize("asked", ["on", "off"])
@pytest.mark.parametrize("form", ["text", "json"])
def test_users_by_name(tmp_path: Path, all_kinds: Mapping[str, Kind], asked: str, form: str) -> None:
    """The node's own log names refused users if the operator has asked for it."""
    home = Place(all_kinds["vless-raw"], "home")
    with NodeProcess(tmp_path, LOG_FORMAT=form, LOG_USERS=asked) as node, control(node, "grpc") as controller:
        run(controller, [home], [member(ANNA, home)])
        twin = member(BERT, home)
        twin.proxies.CopyFrom(member(ANNA, home).proxies)
        with pytest.raises(ControllerError, match=BERT.email):
            controller.sync_user(twin)
        until(lambda: any("was refused" in line for line in node.lines), what="the line")
        named = [line for line in node.lines if BERT.email in line or ANNA.email in line]
        assert bool(named) is (asked == "on")
