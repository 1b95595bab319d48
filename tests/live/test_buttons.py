"""The buttons of a deployed panel, with the bytes of its client library: each one good and bad, on both ports."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from drivers.install.releases import CORES, cpu
from node import __version__
from node.updates.program import NO_SERVICE
from protos import service_pb2 as pb
from scripts.staging.controller import RestController
from scripts.staging.echo import EchoServer
from scripts.staging.mirror import Mirror, listing, renamed
from scripts.staging.node import NodeProcess
from scripts.staging.process import Child
from scripts.staging.users import TestUser
from scripts.staging.wait import until
from tests.conftest import Place, connection, member, run, talking
from tests.harness.deployed import dial
from tests.harness.grounds import Ground
from tests.live.test_updates import known

ANNA = TestUser.new("anna@test")


class RealNode(NodeProcess):
    """Not a copy of an interpreter: a fresh process runs the same command."""

    child = Child


@pytest.fixture
def mirror() -> Iterator[Mirror]:
    with Mirror() as mirror:
        for name in ("geoip.dat", "geosite.dat"):
            digest = mirror.put(f"/geo/{name}", listing(private="10.0.0.0/8") if name == "geoip.dat" else b"")
            mirror.put(f"/geo/{name}.sha256sum", f"{digest}  {name}\n".encode())
        yield mirror


@pytest.fixture
def node(tmp_path: Path, mirror: Mirror) -> Iterator[NodeProcess]:
    urls = {"GEO_URL": f"{mirror.url}/geo", "XRAY_DOWNLOAD_URL": mirror.url}
    with RealNode(tmp_path, UPDATES="on", **urls) as node:
        yield node


def press(
    node: NodeProcess, path: str, body: object = None, verb: str = "POST", port: int = 0, key: str = ""
) -> tuple[int, str]:
    """The status of a request and the `detail` of its JSON, which the panel shows."""
    content = b"" if body is None else json.dumps(body).encode()
    head = f"{verb} {path} HTTP/1.1\r\nHost: localhost\r\nx-api-key: {key or node.key}\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    with dial(node, port or node.rest_port, "http/1.1") as link:
        link.settimeout(60)
        link.sendall(head.encode() + content)
        reply = http.client.HTTPResponse(link, method=verb)
        reply.begin()
        return reply.status, json.loads(reply.read())["detail"]


def test_reachable(node: NodeProcess) -> None:
    """The panel asks first, on the port that it calls the API's; a stranger learns nothing."""
    for port in (node.rest_port, node.grpc_port):
        assert press(node, "/", verb="GET", port=port) == (200, "ok")
        with dial(node, port, "http/1.1") as link:
            link.sendall(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
            assert link.recv(100).startswith(b"HTTP/1.1 404")


@pytest.mark.slow
def test_geo_files(node: NodeProcess, mirror: Mirror) -> None:
    """The files of a region come from the operator's server, if there is one. A wrong digest changes nothing."""
    status, detail = press(node, "/node/geofiles", {"region": "iran"}, port=node.grpc_port)
    assert (status, detail.startswith("the core reads the geo files")) == (200, True), detail
    mirror.put("/geo/geoip.dat.sha256sum", b"0" * 64)
    status, detail = press(node, "/node/geofiles", {"region": "russia"})
    assert (status, "SHA-256" in detail) == (500, True), detail
    assert press(node, "/node/geofiles", {"region": "mars"}) == (
        400,
        "'mars' is none of the regions china, iran, russia",
    )


@pytest.mark.slow
def test_core(node: NodeProcess, ground: Ground, home: Place, echo: EchoServer) -> None:
    """A known release takes over beside the old core. An unknown one is refused, with what to do."""
    name, version = ground.name, known(ground)
    [release] = [core for core in CORES[name] if core.version == version and cpu() in core.archives]
    place = node.state / "updates" / "cores" / f"{name}-{version}-{release.archives[cpu()].sha256[:8]}"
    place.mkdir(parents=True)
    # It has been downloaded already.
    (place / name).write_bytes(renamed(ground.executable(), version, version))
    (place / name).chmod(0o755)
    with closing(RestController(node)) as controller:
        run(controller, [home], [member(ANNA, home)])
        with connection(home, ANNA, echo) as link, talking(link):
            [before] = node.core_pids()
            assert press(node, "/node/core_update", {"core_version": f"v{version}"}) == (200, f"{version} runs")
            assert node.newest_core() != before
    status, detail = press(node, "/node/core_update", {"core_version": "v1.2.3"})
    assert (status, f"nodectl update core {name} 1.2.3 --sha256" in detail) == (500, True), detail
    status, detail = press(node, "/node/core_update", {"core_version": "newest"})
    assert (status, "core_version" in detail) == (400, True), detail


@pytest.mark.slow
def test_update_and_reset(node: NodeProcess, home: Place, echo: EchoServer) -> None:
    """Without a service the panel shows what to do. A reset makes a fresh core and process; no connection ends."""
    # The machine has no service for it: see tests/machine/test_updates.py.
    assert press(node, "/node/update") == (500, NO_SERVICE)
    with closing(RestController(node)) as controller:
        run(controller, [home], [member(ANNA, home)])
        [core], process = node.core_pids(), node.node_pid
        with connection(home, ANNA, echo) as link, talking(link):
            status, detail = press(node, "/node/hard_reset")
            assert (status, "the next process of the node takes over" in detail) == (200, True), detail
            until(lambda: node.node_pid != process and controller.info().running, 30, "the next process serves")
            assert node.newest_core() != core
            [done] = [job for job in controller.call("GetJob", pb.Jobs, pb.JobRequest()).jobs if job.kind == "reset"]
            assert (done.state, done.text) == ("done", f"{__version__} runs")


def test_not_allowed(tmp_path: Path) -> None:
    """The panel shows why not, and how to allow it."""
    keys = tmp_path / "keys"
    keys.write_text(f"reader read {'a' * 36}\n")
    keys.chmod(0o600)
    with NodeProcess(tmp_path, GEO_UPDATES="off", API_KEYS_FILE=str(keys)) as node:
        for path, words in (
            ("/node/update", "UPDATES=on"),
            ("/node/core_update", "UPDATES=on"),
            ("/node/geofiles", "GEO_UPDATES=off"),
        ):
            status, detail = press(node, path, {"core_version": "latest", "region": "china"})
            assert (status, words in detail) == (403, True), (path, detail)
            assert press(node, path, key="a" * 36)[0] == 403
        assert press(node, "/node/hard_reset", key="a" * 36)[0] == 403
        assert press(node, "/node/geofiles", ["china"]) == (400, "the body is not a JSON object")
