"""`python -m node.ready`: a node that is ready, one that is missing, one that reports that it is not ready."""

from __future__ import annotations

import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from node import ready
from node.certificate import ensure
from scripts.staging.node import NodeProcess
from scripts.staging.ports import free_port


@contextmanager
def _answering(status: int, directory: Path) -> Iterator[int]:
    """The port of a server, with the pair of this directory, that answers `/readyz` with this status."""

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status if self.path == "/readyz" else 500)
            self.end_headers()
            self.wfile.write(b"the core is away")

    pair = ensure(directory)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pair.certificate, pair.key)
    with HTTPServer(("127.0.0.1", 0), Answer) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Settings of a node in this directory, without another node's in the environment."""
    (tmp_path / "node").mkdir()
    ensure(tmp_path / "node")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    found = {"API_KEY": "a key of some length", "STATE_DIR": "node", "SERVICE_PROTOCOL": "rest"}
    for name, value in found.items():
        monkeypatch.setenv(name, value)
    return found


@pytest.mark.core
def test_a_node_that_serves(own_node: NodeProcess, settings: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """It is ready if both ports accept; with one that does not, it is not."""
    monkeypatch.delenv("SERVICE_PROTOCOL")
    monkeypatch.setenv("REST_PORT", str(own_node.rest_port))
    monkeypatch.setenv("GRPC_PORT", str(own_node.grpc_port))
    assert ready.main([]) == 0
    monkeypatch.setenv("GRPC_PORT", str(free_port()))
    with pytest.raises(SystemExit) as ended:
        ready.main([])
    assert ended.value.code == 1


@pytest.mark.parametrize(("status", "serves"), [(200, True), (404, True), (503, False)])
def test_the_answer_of_readyz(
    status: int,
    serves: bool,
    settings: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """503 is not ready, with its text as the reason; an older node does not have the path."""
    with _answering(status, tmp_path / "node") as port:
        monkeypatch.setenv("SERVICE_PORT", str(port))
        if serves:
            assert ready.main([]) == 0
            return
        with pytest.raises(SystemExit):
            ready.main(["--wait", "0.3"])
    assert "the core is away" in capsys.readouterr().err


def test_bad_settings(settings: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """They are an error like any other, and it names the setting."""
    monkeypatch.setenv("SERVICE_PORT", "0")
    with pytest.raises(SystemExit) as ended:
        ready.main([])
    assert ended.value.code == 1
