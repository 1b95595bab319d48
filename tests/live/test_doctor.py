"""nodectl doctor against a real node, on its machine and remotely, with deliberate faults."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts.staging.inbounds import Kind
from scripts.staging.node import NodeProcess
from scripts.staging.process import freeze
from scripts.staging.protocols import vless
from scripts.staging.transports import raw
from scripts.staging.users import TestUser
from scripts.staging.wait import until
from tests.conftest import Place, control, member, run
from tests.harness.listening import Listener
from tests.harness.nodectl import Nodectl

ANNA = TestUser.new("anna")


@pytest.fixture
def home() -> Place:
    return Place(Kind("vless-raw", vless(), raw()), "home")


@pytest.fixture
def nodectl(tmp_path: Path, own_node: NodeProcess) -> Iterator[Nodectl]:
    """nodectl in a directory with the node's settings."""
    ctl = Nodectl(tmp_path / "ctl")
    names = ("API_KEY", "STATE_DIR", "NODE_HOST", "REST_PORT", "GRPC_PORT", "SSL_CERT_FILE", "SSL_KEY_FILE")
    settings = own_node._settings()
    lines = [f"{name}={settings[name]}" for name in (*names, "XRAY_EXECUTABLE_PATH")]
    (ctl.directory / ".env").write_text("\n".join(lines) + "\n")
    ctl.add("there", own_node, "grpc")
    yield ctl


def found(ctl: Nodectl, *arguments: str) -> dict[str, list[tuple[str, str]]]:
    """Level and finding of each check."""
    done = ctl("doctor", "--json", *arguments)
    [answer] = done.json
    told: dict[str, list[tuple[str, str]]] = {}
    for finding in answer["result"]:
        assert bool(finding["remedy"]) is (finding["level"] != "ok")
        told.setdefault(finding["name"], []).append((finding["level"], finding["found"]))
    failing = any(level == "fail" for findings in told.values() for level, _ in findings)
    assert done.code == (1 if failing else 0), done
    return told


@pytest.mark.slow
def test_on_the_machine(nodectl: Nodectl, own_node: NodeProcess, home: Place) -> None:
    """A healthy node, and faults: an inbound without its port, a readable key, a key of another certificate."""
    with control(own_node, "grpc") as controller:
        run(controller, [home], [member(ANNA, home)])
    told = found(nodectl)
    assert told["node"] == [("ok", f"process {own_node.node_pid}")]
    assert {level for level, _ in told["ports"]} == {"ok"}
    assert told["inbounds"] == [("ok", "home")]
    assert told["state"] == [("ok", "running")]
    assert told["certificate"][0][0] == told["certificate-names"][0][0] == "ok"
    own_node.certificate.key.chmod(0o644)
    assert found(nodectl)["key-files"][0][0] == "fail"
    own_node.certificate.key.write_text("no key")
    assert found(nodectl)["certificate"][0][0] == "fail"
    freeze(own_node.node_pid)
    try:
        os.kill(own_node.newest_core(), signal.SIGKILL)
        told = found(nodectl, "--timeout", "1")
    finally:
        os.kill(own_node.node_pid, signal.SIGCONT)
    assert told["inbounds"] == [("fail", f"home: no program listens on port {home.port}")]
    assert "does not answer" in told["node"][1][1]
    own_node.stop()
    told = found(nodectl)
    assert told["node"][0][0] == "warn"
    assert {words for _, words in told["ports"]} == {f"{own_node.rest_port}: free", f"{own_node.grpc_port}: free"}


def test_from_elsewhere(nodectl: Nodectl, own_node: NodeProcess, home: Place) -> None:
    """The node's own report: state, warnings, and that its core has crashed."""
    told = found(nodectl, "--node", "there")
    assert (told["state"], told["crashes"][0][0]) == ([("ok", "stopped")], "ok")
    with control(own_node, "grpc") as controller, Listener(controller) as listener:
        run(controller, [home])
        os.kill(own_node.newest_core(), signal.SIGKILL)
        listener.find("core.exited")
        until(lambda: controller.info().running, what="it runs again")
    told = found(nodectl, "--node", "there")
    assert told["crashes"][0][0] == "warn"
    assert "signal 9" in told["crashes"][0][1]
    done = nodectl("doctor", "--node", "there")
    assert "A newer core may help" in done.out


@pytest.mark.parametrize("transport", ["rest", "grpc"])
def test_the_way_to_a_node(nodectl: Nodectl, own_node: NodeProcess, transport: str) -> None:
    """A node that answers, one that does not know the key, and one that does not run: findings, and the usual codes."""
    nodectl.add("here", own_node, transport)
    nodectl.add("stranger", own_node, transport)
    (nodectl.directory / "stranger.key").write_text("0123456789abcdef")
    nodectl.add_dead("dead")
    told = found(nodectl, "--node", "here")
    for name in ("reach", "trust", "name", "clock-difference", "http2"):
        assert [level for level, _ in told[name]] == ["ok"], (name, told)
    for name, code, check in (("stranger", 4, "key"), ("dead", 3, "reach")):
        done = nodectl("doctor", "--json", "--node", name)
        [answer] = done.json
        assert done.code == code and answer["error"]["text"]
        assert [each["name"] for each in answer["result"] if each["level"] == "fail"] == [check]
        assert check in nodectl("doctor", "--node", name).out
