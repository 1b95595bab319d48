"""The files of deploy/reach, each with the real daemons and a hand-over of the node in the middle: docs/reach.md."""

from __future__ import annotations

import json
import re
import signal
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from scripts.staging.cover import CoverServer
from scripts.staging.node import NodeProcess
from scripts.staging.ports import free_port
from scripts.staging.process import tied
from scripts.staging.version import Version
from scripts.staging.wait import accepts, until
from tests.harness.nodectl import Nodectl
from tests.harness.upgraded import RealNode, kept
from tests.machine.reach import NAME, ROOT, STAY, Got, Panel, certify, daemon, hand_over, written


@pytest.fixture
def version(tmp_path: Path) -> Version:
    return Version(tmp_path)


@pytest.fixture
def node(tmp_path: Path, version: Version) -> Iterator[NodeProcess]:
    node = RealNode(tmp_path, PYTHONPATH=str(version.root))
    certify(node, NAME, "localhost", "127.0.0.1")
    with node:
        kept(node)
        yield node


def served(got: Got, *versions: str) -> None:
    """No call has failed, and each stream has the lines of these versions once each."""
    print({transport: answered for transport, (answered, _, _) in got.items()}, "calls answered")
    for transport, (answered, faults, lines) in got.items():
        assert answered and not faults, (transport, faults)
        for number in versions:
            assert sum(f"txnode {number} is ready" in line for line in lines) == 1, (transport, lines)


def in_namespaces(scene: str) -> dict[str, Any]:
    """Play a scene of `tests.machine.reach`. Raises `AssertionError` with its output if it fails."""
    command = ["unshare", "--net", "--mount", sys.executable, "-m", "tests.machine.reach", scene]
    process = tied(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    output, errors = process.communicate(timeout=240 + 3 * STAY)
    assert process.returncode == 0, f"{output}\n{errors}"
    found: dict[str, Any] = json.loads(output.splitlines()[-1])
    return found


def test_ssh() -> None:
    """The documented commands make the node a port of the panel's loopback; the key is good for nothing else."""
    found = in_namespaces("ssh")
    for got, number in zip(found["got"], ("9.0.0", "9.0.1"), strict=True):
        served(got, number)
    assert "entered" not in found["shell"] and not found["inside"]
    assert "remote port forwarding failed" in found["other"]


def test_wireguard() -> None:
    """The panel calls a node by the tunnel that the node opens, also after the line was down; not the other way."""
    found = in_namespaces("wireguard")
    served(found["got"], "9.0.0", "9.0.1")
    assert found["carried"] and found["carried"] != ["0 B"]
    assert found["dialled"] == "no answer within 2 s"


@pytest.mark.parametrize("proxy", ["nginx", "haproxy"])
def test_a_front_proxy(proxy: str, node: NodeProcess, version: Version, tmp_path: Path) -> None:
    """One port has the node by its name, and the website by any other name; calls pass a hand-over, and a reload."""
    with CoverServer(tmp_path) as website:
        port = free_port()
        changes = {"127.0.0.1:62050": f"127.0.0.1:{node.grpc_port}", "127.0.0.1:8443": f"127.0.0.1:{website.port}"}
        if proxy == "nginx":
            listens = {"listen 443": f"listen 127.0.0.1:{port}", "listen [::]:443": f"listen [::1]:{port}"}
            stream = written("nginx-stream.conf", tmp_path, {**changes, **listens})
            whole = tmp_path / "nginx.conf"
            whole.write_text(
                f"load_module /usr/lib/nginx/modules/ngx_stream_module.so;\nerror_log stderr;\npid {tmp_path}/pid;\n"
                f"daemon off;\nevents {{}}\ninclude {stream};\n"
            )
            command: list[str | Path] = ["/usr/sbin/nginx", "-c", whole]
        else:
            listens = {"bind :443": f"bind 127.0.0.1:{port}", "bind [::]:443": f"bind [::1]:{port}"}
            command = ["/usr/sbin/haproxy", "-W", "-db", "-f", written("haproxy.cfg", tmp_path, {**changes, **listens})]
        with daemon(*command) as process:
            until(lambda: accepts(port), what=f"{proxy} listens")
            with Panel(node, "127.0.0.1", port, NAME) as panel:
                hand_over(node, version)
                process.send_signal(signal.SIGHUP if proxy == "nginx" else signal.SIGUSR2)  # as systemctl reload does
                until(
                    lambda: len(psutil.Process(process.pid).children()) > 1,
                    what="a second worker runs beside the first",
                )
                assert _name_of(port, "www.example.com") == website.certificate.certificate.read_text()
                assert _name_of(port, NAME) == node.pem
            served(panel.got, "9.0.0")
            assert process.poll() is None


def _name_of(port: int, name: str) -> str:
    """The certificate that a visitor with this name gets."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with (
        socket.create_connection(("127.0.0.1", port), 5) as link,
        context.wrap_socket(link, server_hostname=name) as tls,
    ):
        return ssl.DER_cert_to_PEM_cert(tls.getpeercert(binary_form=True) or b"")


@pytest.mark.parametrize(("listens", "words"), [("ssl", "HTTP/1.1 alone"), ("ssl http2", "HTTP/2, but no gRPC")])
def test_a_proxy_that_breaks_grpc(listens: str, words: str, node: NodeProcess, tmp_path: Path) -> None:
    """The doctor finds it, for a proxy that ends TLS with the node's own certificate and calls the node by HTTP/1.1."""
    port = free_port()
    (tmp_path / "nginx.conf").write_text(
        f"error_log stderr;\npid {tmp_path}/pid;\ndaemon off;\nevents {{}}\nhttp {{ access_log off; server {{\n"
        f"listen 127.0.0.1:{port} {listens}; ssl_certificate {node.certificate.certificate};\n"
        f"ssl_certificate_key {node.certificate.key};\n"
        f"location / {{ proxy_pass https://127.0.0.1:{node.rest_port}; proxy_http_version 1.1; }} }} }}\n"
    )
    ctl = Nodectl(tmp_path / "ctl")
    for transport in ("grpc", "rest"):
        ctl.add(transport, node, transport)
    ctl.file.write_text(re.sub(r"port = \d+", f"port = {port}", ctl.file.read_text()))
    with daemon("/usr/sbin/nginx", "-c", tmp_path / "nginx.conf"):
        until(lambda: accepts(port), what="nginx listens")
        [answer] = ctl("doctor", "--json", "--node", "grpc").json
        assert answer["error"]["code"] in ("unreachable", "unexpected_reply")
        failing = {each["name"]: each["found"] for each in answer["result"] if each["level"] == "fail"}
        assert [*failing] == ["http2"] and failing["http2"].startswith(words)
        assert ctl("doctor", "--node", "rest").code == 0
