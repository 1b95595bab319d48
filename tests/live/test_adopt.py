"""With ADOPT the core outlives a killed node, and the next node adopts it: no connection is dropped."""

from __future__ import annotations

import os
import signal
import socket
import sqlite3
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from pathlib import Path

import psutil
import pytest

from drivers.sockets import connections
from protos.service_pb2 import UsersStat
from scripts.staging import transfer
from scripts.staging.controller import Controller, RestController, RpcController, traffic
from scripts.staging.echo import EchoServer
from scripts.staging.inbounds import Kind
from scripts.staging.node import NodeProcess
from scripts.staging.process import Child
from scripts.staging.users import TestUser
from scripts.staging.wait import until
from tests.conftest import Place, connection, daily, gets_in, member, run, stays_out, talking, way
from tests.harness.grounds import Ground

ANNA, BERT, CARL = (TestUser.new(f"{name}@test") for name in ("anna", "bert", "carl"))
MIB = 1024 * 1024


class RealNode(NodeProcess):
    """A node that is executed, not forked, so that it can execute itself again."""

    child = Child


class Adopting:
    """A node that a test may kill, and access to its cores without it."""

    def __init__(self, node: NodeProcess, controller: Controller) -> None:
        self.node, self.controller = node, controller

    def killed(self, meanwhile: Callable[[], object] = lambda: None) -> None:
        """Kill the node and start another one that serves."""
        self.node.kill()
        meanwhile()
        self.node.start()
        until(lambda: self.controller.info().running, 20, "the backend runs")

    def upgraded(self) -> None:
        """Upgrade the node in place to the same version."""
        before = self._ready
        os.kill(self.node.pid, signal.SIGUSR2)
        until(lambda: self._ready > before, 40, "it is ready again")

    @property
    def _ready(self) -> int:
        return sum("is ready" in line for line in self.node.lines)


@pytest.fixture(params=[RestController, RpcController], ids=["rest", "grpc"])
def adopting(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Adopting]:
    with RealNode(tmp_path, ADOPT="on", ADOPT_SECONDS="60") as node, closing(request.param(node)) as controller:
        yield Adopting(node, controller)
    until(lambda: not guards(node), 10, "nobody guards what is not there")


@pytest.fixture
def home(all_kinds: Mapping[str, Kind], ground: Ground) -> Place:
    return Place(all_kinds["vless-raw"], "home", ground=ground)


def guards(node: NodeProcess) -> list[int]:
    """The guard processes, which would end its cores."""
    there = str(node.state / "adopt")
    return [process.pid for process in psutil.process_iter() if there in " ".join(_command(process))]


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def is_closed(link: socket.socket) -> bool:
    try:
        transfer.echo(link, b"still there")
    except OSError:
        return True
    return False


def on_disk(node: NodeProcess) -> int:
    """Bytes of users on disk that no controller has read."""
    with closing(sqlite3.connect(f"file:{node.state}/state.db?mode=ro", uri=True)) as connection:
        rows = connection.execute("SELECT downlink FROM traffic WHERE scope = 'user'").fetchall()
    return sum(bytes for (bytes,) in rows if bytes > 10_000)


def booked(node: NodeProcess) -> list[tuple[str, str, int]]:
    """The counters on disk of the core that may be adopted."""
    with closing(sqlite3.connect(f"file:{node.state}/state.db?mode=ro", uri=True)) as connection:
        return connection.execute("SELECT run, counter, value FROM booked").fetchall()


def handed(node: NodeProcess) -> None:
    """Whether the files for the next node are on disk."""
    until(lambda: (node.state / "adopt" / "core").exists(), 10, "what the next node needs is on disk")


@pytest.mark.slow
def test_nobody_is_dropped(adopting: Adopting, home: Place, echo: EchoServer) -> None:
    """Repeated kills drop no connection; the last user changes are in force, and the core is the same."""
    controller, node = adopting.controller, adopting.node
    run(controller, [home], [member(ANNA, home), member(BERT, home)])
    controller.sync_user(member(BERT))
    controller.sync_user(member(CARL, home))
    handed(node)
    core = node.newest_core()
    with connection(home, ANNA, echo) as link, talking(link):
        for _ in range(2):
            adopting.killed()
            assert gets_in(home, CARL, echo) and stays_out(home, BERT, echo)
        controller.sync_user(member(BERT, home))
        assert gets_in(home, BERT, echo)
        controller.sync_user(member(CARL))
        assert stays_out(home, CARL, echo)
    assert core in node.core_pids()


@pytest.mark.slow
def test_a_removed_users_connection_ends(adopting: Adopting, home: Place, echo: EchoServer) -> None:
    """Also a connection that the next node has not seen before."""
    controller = adopting.controller
    run(controller, [home], [member(ANNA, home), member(BERT, home)])
    handed(adopting.node)
    elsewhere = way(home, BERT, "127.0.0.9")
    with (
        connection(home, ANNA, echo) as link,
        elsewhere as port,
        transfer.connect(port, echo) as other,
        talking(other),
    ):
        adopting.killed()
        transfer.echo(link, b"still there")
        controller.sync_user(member(ANNA))
        until(lambda: is_closed(link), 20, "the connection of who was removed ends")


@pytest.mark.slow
def test_no_byte_is_lost_or_counted_twice(adopting: Adopting, home: Place, echo: EchoServer) -> None:
    """Bytes before, during and after the kill, on surviving connections and on those opened meanwhile."""
    controller = adopting.controller
    run(controller, [home], [member(ANNA, home), member(BERT, home)])
    handed(adopting.node)

    def carry() -> None:
        with connection(home, BERT, echo) as other:
            transfer.download(other, MIB)

    with connection(home, ANNA, echo) as link:
        for _ in range(2):
            transfer.download(link, MIB)
            carry()
            adopting.killed(carry)
        transfer.download(link, MIB)
    want = {ANNA.email: 3 * MIB, BERT.email: 4 * MIB}

    def told() -> bool:
        rows = traffic(controller.stats(UsersStat))
        return all(0 <= rows[email]["downlink"] - bytes < 10_000 for email, bytes in want.items())

    until(told, 10, "all bytes are told once")
    until(lambda: on_disk(adopting.node) >= 7 * MIB, 10, "all of it is on disk")
    controller.stats(UsersStat, reset=True)
    until(lambda: not on_disk(adopting.node), 10, "it is on disk that they were told")
    seen = booked(adopting.node)
    adopting.killed()
    rows = traffic(controller.stats(UsersStat))
    assert all(row["downlink"] < 10_000 for row in rows.values()), (rows, seen)


@pytest.mark.slow
def test_what_the_core_says_meanwhile_is_heard(
    adopting: Adopting, ground: Ground, home: Place, echo: EchoServer
) -> None:
    """Each line of the core arrives exactly once."""
    level = {} if ground.name == "xray" else {"log": {"level": "info"}}
    run(adopting.controller, [home], [member(ANNA, home)], **level)
    handed(adopting.node)
    words = "accepted" if ground.name == "xray" else "inbound connection from"
    adopting.killed(lambda: [gets_in(home, ANNA, echo) for _ in range(5)])
    with adopting.controller.logs() as reader:
        until(lambda: sum(words in line for line in reader.lines) >= 5, 10, "the lines of all five")
        assert sum(words in line for line in reader.lines) == 5


@pytest.mark.slow
def test_a_door_that_was_closed_is_opened(adopting: Adopting, home: Place, echo: EchoServer) -> None:
    """The next node decides for itself whether an inbound that the killed node had closed stays closed."""
    run(adopting.controller, [home], [member(ANNA, home)])
    handed(adopting.node)
    core, ports = adopting.node.newest_core(), [range(home.port, home.port + 1)]
    adopting.killed(lambda: connections.deafen(core, ports, True))
    assert gets_in(home, ANNA, echo)
    assert adopting.node.core_pids() == [core]


@pytest.mark.slow
def test_a_core_that_died_meanwhile_is_started_anew(adopting: Adopting, home: Place, echo: EchoServer) -> None:
    run(adopting.controller, [home], [member(ANNA, home)])
    handed(adopting.node)
    core = adopting.node.newest_core()
    adopting.killed(lambda: os.kill(core, signal.SIGKILL))
    assert gets_in(home, ANNA, echo)
    assert core not in adopting.node.core_pids()


@pytest.mark.slow
def test_its_end_is_noticed(adopting: Adopting, home: Place, echo: EchoServer) -> None:
    """The node notices the end of a core that is not its child, and restarts it; a Stop ends it."""
    run(adopting.controller, [home], [member(ANNA, home)])
    handed(adopting.node)
    adopting.killed()
    core = adopting.node.newest_core()
    os.kill(core, signal.SIGKILL)
    until(lambda: gets_in(home, ANNA, echo), 15, "it is served again")
    handed(adopting.node)
    adopting.killed()
    adopting.controller.stop()
    until(lambda: not adopting.node.core_pids(), 10, "the core has ended")
    assert not (adopting.node.state / "adopt" / "core").exists()


@pytest.mark.slow
def test_nobody_comes_back(adopting: Adopting, home: Place, echo: EchoServer) -> None:
    """Without a next node the core ends after the configured time."""
    adopting.node.stop()
    until(lambda: not guards(adopting.node), 10, "nobody guards what is not there")
    adopting.node.environment["ADOPT_SECONDS"] = "8"
    adopting.node.start()
    run(adopting.controller, [home], [member(ANNA, home)])
    handed(adopting.node)
    core = psutil.Process(adopting.node.newest_core())
    adopting.node.kill()
    assert gets_in(home, ANNA, echo)
    until(lambda: not core.is_running(), 20, "the core ends")
    adopting.node.start()
    until(lambda: adopting.controller.info().running, 20, "the backend runs")


@pytest.mark.slow
def test_a_node_that_comes_without_it_starts_anew(adopting: Adopting, home: Place, echo: EchoServer) -> None:
    """Without ADOPT the next node starts a new core; there is only one, and no guard ends it."""
    run(adopting.controller, [home], [member(ANNA, home)])
    handed(adopting.node)
    core = adopting.node.newest_core()
    adopting.node.environment["ADOPT"] = "off"
    adopting.killed()
    assert gets_in(home, ANNA, echo)
    assert core not in adopting.node.core_pids()
    until(lambda: not guards(adopting.node), 10, "nobody guards it")
    assert gets_in(home, ANNA, echo)


@pytest.mark.slow
@pytest.mark.parametrize("content", daily([b"no message at all"], [b"", b"no message at all", b"\x08\x07"]))
def test_what_is_left_cannot_be_read(content: bytes, adopting: Adopting, home: Place, echo: EchoServer) -> None:
    """With unreadable hand-over files the node starts a new core, and the old one ends."""
    run(adopting.controller, [home], [member(ANNA, home)])
    handed(adopting.node)
    core = adopting.node.newest_core()
    adopting.killed(lambda: (adopting.node.state / "adopt" / "core").write_bytes(content))
    assert gets_in(home, ANNA, echo)
    assert core not in adopting.node.core_pids() and len(adopting.node.core_pids()) == 1


@pytest.mark.slow
def test_another_configuration_was_accepted_last(
    adopting: Adopting, ground: Ground, home: Place, echo: EchoServer
) -> None:
    """The node does not adopt a core with an earlier configuration."""
    run(adopting.controller, [home], [member(ANNA, home)])
    handed(adopting.node)
    file = adopting.node.state / "adopt" / "core"
    before = file.read_bytes()
    other = Place(home.kind, "other", ground=ground)
    run(adopting.controller, [other], [member(BERT, other)])
    until(lambda: file.exists() and file.read_bytes() != before, 10, "the other one is on disk")
    adopting.killed(lambda: file.write_bytes(before))
    assert gets_in(other, BERT, echo) and stays_out(home, ANNA, echo)


@pytest.mark.slow
def test_it_upgrades_itself_all_the_same(adopting: Adopting, home: Place, echo: EchoServer) -> None:
    """The node can be upgraded before a kill, and after it with an adopted core."""
    run(adopting.controller, [home], [member(ANNA, home)])
    handed(adopting.node)
    core = adopting.node.newest_core()
    with connection(home, ANNA, echo) as link, talking(link):
        for _ in range(2):
            adopting.upgraded()
            until(lambda: adopting.controller.info().running, 10, "the backend runs")
            handed(adopting.node)
            adopting.killed()
            assert adopting.node.core_pids() == [core], "\n".join(adopting.node.lines)
    assert len(guards(adopting.node)) == 1
