"""nodectl against real nodes: its output, exit status, and screens."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from google.protobuf.json_format import MessageToDict

from scripts.staging import transfer
from scripts.staging.backend import backend_config
from scripts.staging.echo import EchoServer
from scripts.staging.inbounds import Kind
from scripts.staging.node import NodeProcess
from scripts.staging.process import Child, tied
from scripts.staging.protocols import vless
from scripts.staging.transports import raw
from scripts.staging.users import TestUser
from scripts.staging.wait import until
from tests.conftest import SOURCE, Place, member, way
from tests.harness.nodectl import Nodectl

HOME = Place(Kind("vless-raw", vless(), raw()), "home")
ANNA, BERT = TestUser.new("anna"), TestUser.new("bert")
SIZE = 300_000
RUNNING = "[node] backend running"

each_transport = pytest.mark.parametrize("transport", ["rest", "grpc"])


@pytest.fixture(scope="module")
def nodectl(tmp_path_factory: pytest.TempPathFactory, node: NodeProcess) -> Nodectl:
    """nodectl with the module's node over both transports, and a node that does not run."""
    made = Nodectl(tmp_path_factory.mktemp("nodectl"))
    for transport in ("rest", "grpc"):
        made.add(transport, node, transport)
    made.add_dead("dead")
    return made


@pytest.fixture
def config(nodectl: Nodectl) -> Path:
    path = nodectl.directory / "config.json"
    path.write_text(backend_config([HOME.inbound]))
    return path


@pytest.fixture
def users(nodectl: Nodectl) -> Path:
    path = nodectl.directory / "users.json"
    path.write_text(json.dumps([MessageToDict(member(person, HOME)) for person in (ANNA, BERT)]))
    return path


@pytest.fixture
def started(nodectl: Nodectl, config: Path, users: Path) -> None:
    """A backend started by nodectl."""
    done = nodectl("start", config, "--users", users, "--node", "rest")
    assert done.code == 0, done.err


@pytest.fixture
def traffic(started: None, echo: EchoServer) -> Iterator[None]:
    """Anna is connected, and has downloaded at least `SIZE` bytes."""
    with way(HOME, ANNA) as port, transfer.connect(port, echo) as link:
        transfer.download(link, SIZE)
        yield


@pytest.mark.slow
@each_transport
def test_a_backend_from_start_to_stop(transport: str, nodectl: Nodectl, config: Path, users: Path) -> None:
    """A backend started with its users is shown by each command; after a stop it is gone; exit statuses agree."""
    begun = nodectl("start", config, "--users", users, "--node", transport, "--json")
    [answer] = begun.json
    assert (begun.code, answer["node"], answer["result"]["info"]["state"]) == (0, transport, "running")
    stopped = nodectl("stop", "--node", transport)
    assert (stopped.code, stopped.rows[1][0]) == (0, "stopped")
    refused = nodectl("stats", "backend", "--node", transport)
    assert refused.code == 5
    assert "nodectl start" in refused.err


def test_the_bill(nodectl: Nodectl, traffic: None) -> None:
    """What users and the machine have carried, as a table with notes, or as JSON; a bad date is refused."""
    shown = nodectl("bill", "--month", "--node", "rest")
    assert shown.code == 0 and shown.rows[0] == ["bytes", "received", "sent", "both"]
    users = {row[0]: row[1:] for row in shown.rows}["users"]
    assert int(users[1]) >= SIZE and int(users[2]) == int(users[0]) + int(users[1])
    assert shown.err.startswith("rest: from ")
    [answer] = nodectl("bill", "--since", "2026-01-01", "--node", "grpc", "--json").json
    assert answer["result"]["users"]["sent"] >= SIZE and answer["result"]["timezone"] == "UTC"
    assert nodectl("bill", "--since", "2026-01-01", "--month").code == 2
    refused = nodectl("bill", "--since", "today", "--node", "grpc")
    assert refused.code == 1 and "is not a date: write YYYY-MM-DD" in refused.err


def test_users_who_are_refused(nodectl: Nodectl, config: Path) -> None:
    """The others are applied; refused users are named with the reason, and by the exit status."""
    bad = [{"email": "cora", "inbounds": ["home"], "proxies": {"vless": {"id": "no id " * 10}}}]
    users = nodectl.directory / "bad.json"
    users.write_text(json.dumps([MessageToDict(member(ANNA, HOME)), *bad]))
    done = nodectl("start", config, "--users", users, "--node", "rest", "--json")
    assert done.code == 6
    assert done.err.startswith("rest: cora was refused: ")
    assert [user["name"] for user in done.json[0]["result"]["refused"]] == ["cora"]


def test_a_configuration_that_is_refused(nodectl: Nodectl) -> None:
    """The core's message is on stderr, with exit status failure; a configuration for no known core is not sent."""
    bad = '{"inbounds": [{"protocol": "no such protocol", "port": 1}]}'
    refused = nodectl("start", "-", "--node", "rest", stdin=bad)
    assert (refused.code, refused.out) == (1, "")
    assert "no such protocol" in refused.err
    unknown = nodectl("start", "-", "--node", "rest", stdin="{}")
    assert unknown.code == 2
    assert "--core" in unknown.err


@pytest.mark.slow
@each_transport
def test_figures_of_real_traffic(transport: str, nodectl: Nodectl, traffic: None) -> None:
    """Bytes are integers in JSON and columns in a pipe; online users have their address; a reset begins at zero."""

    def bytes_of(*arguments: str) -> dict[tuple[str, str], int]:
        [answer] = nodectl("stats", *arguments, "--node", transport, "--json").json
        return {(row["name"], row["type"]): row["value"] for row in answer["result"]["stats"]}

    until(lambda: bytes_of("users")["anna", "downlink"] >= SIZE, what="the bytes are counted")
    [[_, _, downlink]] = [row for row in nodectl("stats", "--node", transport).rows if row[0] == "anna"]
    assert int(downlink) >= SIZE
    assert nodectl("online", "anna", "--node", transport).rows[1][:2] == ["anna", SOURCE]
    assert nodectl("stats", "--reset", "--node", transport).code == 0
    assert bytes_of("users").get(("anna", "downlink"), 0) < SIZE
    assert nodectl("online", "--node", transport).rows[1:] == [["anna", "1"]]
    assert [row[:2] for row in nodectl("online", "--addresses", "--node", transport).rows[1:]] == [["anna", SOURCE]]


def test_figures_of_everything_else(nodectl: Nodectl, started: None) -> None:
    """Figures of the machine, the core and the outbounds."""
    [system] = nodectl("stats", "system", "--node", "rest", "--json").json
    assert isinstance(system["result"]["mem_total"], int)
    assert [row[0] for row in nodectl("stats", "backend", "--node", "grpc").rows[2::8]] == ["num_gc", "uptime"]
    assert "direct" in [row[0] for row in nodectl("stats", "outbounds", "--node", "grpc").rows]


def test_nodes_that_do_not_answer(nodectl: Nodectl, started: None) -> None:
    """Nodes that run are shown; the others are named on stderr, and by the exit status."""
    some = nodectl("info", "--all")
    assert some.code == 1
    assert [row[:2] for row in some.rows] == [["node", "state"], ["rest", "running"], ["grpc", "running"]]
    assert some.err.startswith("dead: no answer")
    document = nodectl("info", "--all", "--json").json
    assert [list(answer) for answer in document] == [["node", "result"], ["node", "result"], ["node", "error"]]
    assert document[2]["error"]["code"] == "unreachable"
    assert nodectl("info", "--node", "dead").code == 3


def test_the_wrong_key(tmp_path: Path, node: NodeProcess) -> None:
    """A wrong key is refused by the node, and one that others can read is not even sent."""
    nodectl = Nodectl(tmp_path / "ctl")
    nodectl.add("one", node, "rest")
    (nodectl.directory / "one.key").write_text("somebody else's key")
    assert nodectl("info", "--node", "one").code == 4
    (nodectl.directory / "one.key").chmod(0o644)
    refused = nodectl("info", "--node", "one")
    assert refused.code == 2
    assert "chmod 600" in refused.err


class RealNode(NodeProcess):
    """A node that is executed, not forked: nodectl reads the environment of its process."""

    child = Child


def test_the_node_of_this_machine(tmp_path: Path) -> None:
    """In a node's directory nodectl needs no file: it takes address and key from the node's settings."""
    with RealNode(tmp_path) as node:
        (tmp_path / ".env").write_text(
            f"API_KEY={node.key}\nREST_PORT={node.rest_port}\nGRPC_PORT={node.grpc_port}\nSTATE_DIR={node.state}\n"
            f"SSL_CERT_FILE={node.certificate.certificate}\nSSL_KEY_FILE={node.certificate.key}\n"
        )
        here = Nodectl(tmp_path, NODECTL_NODES="")
        done = here("info")
        assert (done.code, done.rows[1:] and done.rows[1][0]) == (0, "stopped"), done.err


@pytest.mark.slow
@each_transport
def test_logs_over_a_crash_of_the_core(transport: str, tmp_path: Path, own_node: NodeProcess, config: Path) -> None:
    """Lines of the killed core and of the next one are in one stream, none missing and none twice."""
    nodectl = Nodectl(tmp_path / "nodectl")
    nodectl.add("one", own_node, transport)
    assert nodectl("start", config, "--node", "one").code == 0
    with nodectl.following("logs", "-f", "--node", "one") as logs:
        logs.ready(lambda: RUNNING in logs.lines, 40, "the log is there")
        os.kill(own_node.newest_core(), signal.SIGKILL)
        logs.ready(lambda: logs.lines.count(RUNNING) == 2, 40, "it runs again")
        with nodectl.following("logs", "-f", "--node", "one", "--source", "node", "--json") as others:
            others.ready(lambda: others.output.count(RUNNING) == 2, 40, "the same lines")
            said = [json.loads(line)["line"] for line in others.lines]
        assert [line for line in logs.lines if line.startswith("[node] ")] == said
        dated = [line for line in logs.lines if line.startswith("20")]
        assert len(dated) == len(set(dated))
        os.kill(logs.pid, signal.SIGINT)
        assert logs.wait() == 130


def test_a_live_table(nodectl: Nodectl, traffic: None) -> None:
    """On a terminal the traffic is a table that is updated, and the earlier screen is restored at the end."""
    with nodectl.terminal("stats", "--watch", "0.2", "--node", "rest,dead") as terminal:
        screen = terminal.find("anna", "dead: no answer", "q quits")
        assert screen.splitlines()[0].split() == ["node", "name", "uplink", "downlink", "up", "down"]
        terminal.type("q")
        assert terminal.wait() == 0
        assert terminal.raw.rstrip().endswith(b"\x1b[?25h") or b"\x1b[?1049l" in terminal.raw


@pytest.mark.parametrize("end", ["q", "\x03"], ids=["q", "Ctrl-C"])
def test_top(end: str, nodectl: Nodectl, traffic: None) -> None:
    """The screen has the machine, and the busiest user first; both ways to quit restore the terminal."""
    with nodectl.terminal("top", "--every", "0.2", "--node", "grpc") as terminal:
        before = terminal.modes
        lines = terminal.find("anna", "q quits").splitlines()
        assert lines[0].startswith("grpc: running, xray")
        assert [line.split()[0] for line in lines[1:4]] == ["CPU", "memory", "network"]
        assert next(line.split()[0] for line in lines if line.startswith(("anna", "bert"))) == "anna"
        terminal.type(end)
        assert terminal.wait() == 0
        assert b"\x1b[?1049l" in terminal.raw
        assert terminal.modes == before


def test_watching_in_a_pipe(nodectl: Nodectl, traffic: None) -> None:
    """Each reading is a line of JSON, or rows with the node's name; nodectl ends when the pipe's reader is gone."""
    with nodectl.following("stats", "--watch", "0.2", "--node", "rest,dead") as watching:
        watching.ready(lambda: "KiB/s" in watching.output or "B/s" in watching.output, 20, "a reading")
        assert any(line.split()[:2] == ["node", "name"] for line in watching.lines)
        watching.ready(lambda: any(line.startswith("dead: no answer") for line in watching.lines), 20, "an error")
    argv = [sys.executable, "-m", "node.nodectl", "stats", "--watch", "60", "--json", "--node", "rest"]
    with tied(
        argv, env=nodectl.environment, cwd=nodectl.directory, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as process:
        assert process.stdout is not None
        reading = json.loads(process.stdout.readline())
        assert reading["node"] == "rest" and "anna" in {row["name"] for row in reading["result"]["stats"]}
        process.stdout.close()
        assert process.wait(20) == 1


def test_logs_of_several_nodes(nodectl: Nodectl, started: None) -> None:
    """Each line has its node's name; the error of one node does not end the lines of another."""
    done = nodectl("logs", "--source", "node", "--node", "rest,dead")
    assert f"rest: {RUNNING}" in done.out.splitlines()
    assert done.err.startswith("dead: no answer") and done.code == 1
    assert nodectl("logs", "--node", "dead").code == 3
