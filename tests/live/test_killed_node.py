"""A killed node drops no connection: its keeper holds the cores, and the next node goes on with them."""

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
from scripts.staging.sing_box import VLESS, Door, backend, find_sing_box
from scripts.staging.users import TestUser
from scripts.staging.wait import until
from tests.conftest import Place, connection, gets_in, member, run, stays_out, talking, way
from tests.harness.box import client
from tests.harness.grounds import Ground

ANNA, BERT, CARL = (TestUser.new(f"{name}@test") for name in ("anna", "bert", "carl"))
MIB = 1024 * 1024


class RealNode(NodeProcess):
    """A node that is executed, not forked, so that its next version is executed, too."""

    child = Child


class Below:
    """A node that a test may kill."""

    def __init__(self, node: NodeProcess, controller: Controller) -> None:
        self.node, self.controller = node, controller

    def killed(self, meanwhile: Callable[[], object] = lambda: None) -> None:
        """Kill the node, do something while there is none, and wait until the next one serves."""
        keeper = psutil.Process(self.node.pid)
        keeper.suspend()
        try:
            before = self.node.kill_node()
            meanwhile()
        finally:
            keeper.resume()
        self.follows(before)

    def follows(self, before: int) -> None:
        """Wait until another node than this one serves."""
        until(lambda: self._other(before), 20, "another node runs")
        until(lambda: self.controller.info().running, 20, "the backend runs")

    def _other(self, before: int) -> bool:
        try:
            return self.node.node_pid != before
        except AssertionError:
            return False

    def upgraded(self) -> None:
        """Upgrade the node in place to the same version."""
        before = self._ready
        os.kill(self.node.pid, signal.SIGUSR2)
        until(lambda: self._ready > before, 40, "it is ready again")

    @property
    def _ready(self) -> int:
        return sum("is ready" in line for line in self.node.lines)


@pytest.fixture(params=[RestController, RpcController], ids=["rest", "grpc"])
def below(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Below]:
    with RealNode(tmp_path, ADOPT_SECONDS="60") as node, closing(request.param(node)) as controller:
        try:
            yield Below(node, controller)
        finally:
            print("\n".join(node.last_lines(80)))


@pytest.fixture
def home(all_kinds: Mapping[str, Kind], ground: Ground) -> Place:
    return Place(all_kinds["vless-raw"], "home", ground=ground)


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


@pytest.mark.slow
def test_nobody_is_dropped(below: Below, home: Place, echo: EchoServer) -> None:
    """Repeated kills drop no connection; the last user changes are in force, and the core is the same."""
    controller, node = below.controller, below.node
    run(controller, [home], [member(ANNA, home), member(BERT, home)])
    controller.sync_user(member(BERT))
    controller.sync_user(member(CARL, home))
    core = node.newest_core()
    with connection(home, ANNA, echo) as link, talking(link):
        for _ in range(2):
            below.killed()
            assert gets_in(home, CARL, echo) and stays_out(home, BERT, echo)
        controller.sync_user(member(BERT, home))
        assert gets_in(home, BERT, echo)
        controller.sync_user(member(CARL))
        assert stays_out(home, CARL, echo)
    assert core in node.core_pids()


@pytest.mark.slow
def test_a_removed_users_connection_ends(below: Below, home: Place, echo: EchoServer) -> None:
    """Also a connection that the next node has not seen before."""
    controller = below.controller
    run(controller, [home], [member(ANNA, home), member(BERT, home)])
    elsewhere = way(home, BERT, "127.0.0.9")
    with (
        connection(home, ANNA, echo) as link,
        elsewhere as port,
        transfer.connect(port, echo) as other,
        talking(other),
    ):
        below.killed()
        transfer.echo(link, b"still there")
        controller.sync_user(member(ANNA))
        until(lambda: is_closed(link), 20, "the connection of who was removed ends")


@pytest.mark.slow
def test_no_byte_is_lost_or_counted_twice(below: Below, home: Place, echo: EchoServer) -> None:
    """Bytes before, during and after the kill, on surviving connections and on those opened meanwhile."""
    controller = below.controller
    run(controller, [home], [member(ANNA, home), member(BERT, home)])

    def carry() -> None:
        with connection(home, BERT, echo) as other:
            transfer.download(other, MIB)

    with connection(home, ANNA, echo) as link:
        for _ in range(2):
            transfer.download(link, MIB)
            carry()
            below.killed(carry)
        transfer.download(link, MIB)
    want = {ANNA.email: 3 * MIB, BERT.email: 4 * MIB}

    def told() -> bool:
        rows = traffic(controller.stats(UsersStat))
        return all(0 <= rows[email]["downlink"] - bytes < 10_000 for email, bytes in want.items())

    until(told, 10, "all bytes are told once")
    until(lambda: on_disk(below.node) >= 7 * MIB, 10, "all of it is on disk")
    controller.stats(UsersStat, reset=True)
    until(lambda: not on_disk(below.node), 10, "it is on disk that they were told")
    seen = booked(below.node)
    below.killed()
    rows = traffic(controller.stats(UsersStat))
    assert all(row["downlink"] < 10_000 for row in rows.values()), (rows, seen)


@pytest.mark.slow
def test_what_the_core_says_meanwhile_is_heard(below: Below, ground: Ground, home: Place, echo: EchoServer) -> None:
    """Each line of the core arrives exactly once."""
    level = {} if ground.name == "xray" else {"log": {"level": "info"}}
    run(below.controller, [home], [member(ANNA, home)], **level)
    words = "accepted" if ground.name == "xray" else "inbound connection from"
    below.killed(lambda: [gets_in(home, ANNA, echo) for _ in range(5)])
    with below.controller.logs() as reader:
        until(lambda: sum(words in line for line in reader.lines) >= 5, 10, "the lines of all five")
        assert sum(words in line for line in reader.lines) == 5


@pytest.mark.slow
def test_a_door_that_was_closed_is_opened(below: Below, home: Place, echo: EchoServer) -> None:
    """The next node decides for itself whether an inbound that the killed node had closed stays closed."""
    run(below.controller, [home], [member(ANNA, home)])
    core, ports = below.node.newest_core(), [range(home.port, home.port + 1)]
    below.killed(lambda: connections.deafen(core, ports, True))
    assert gets_in(home, ANNA, echo)
    assert below.node.core_pids() == [core]


@pytest.mark.slow
def test_a_core_that_died_meanwhile_is_started_anew(below: Below, home: Place, echo: EchoServer) -> None:
    run(below.controller, [home], [member(ANNA, home)])
    core = below.node.newest_core()
    below.killed(lambda: os.kill(core, signal.SIGKILL))
    assert gets_in(home, ANNA, echo)
    assert core not in below.node.core_pids()


@pytest.mark.slow
def test_its_end_is_noticed(below: Below, home: Place, echo: EchoServer) -> None:
    """The node notices the end of a core that is not its child, and restarts it; a Stop ends it."""
    run(below.controller, [home], [member(ANNA, home)])
    below.killed()
    core = below.node.newest_core()
    os.kill(core, signal.SIGKILL)
    until(lambda: gets_in(home, ANNA, echo), 15, "it is served again")
    below.killed()
    below.controller.stop()
    until(lambda: not below.node.core_pids(), 10, "the core has ended")


@pytest.mark.slow
def test_killed_and_upgraded_in_turn(below: Below, home: Place, echo: EchoServer) -> None:
    """A node can be upgraded before it is killed and after it has followed a killed one."""
    run(below.controller, [home], [member(ANNA, home)])
    core = below.node.newest_core()
    with connection(home, ANNA, echo) as link, talking(link):
        for _ in range(2):
            below.upgraded()
            until(lambda: below.controller.info().running, 10, "the backend runs")
            below.killed()
            assert below.node.core_pids() == [core], "\n".join(below.node.lines)


@pytest.mark.slow
def test_a_node_that_hangs(tmp_path: Path, home: Place, echo: EchoServer) -> None:
    """The keeper kills a node that gives no sign of life, and starts the next one; no connection ends."""
    with RealNode(tmp_path, WATCHDOG_USEC="6000000") as node, closing(RestController(node)) as controller:
        below = Below(node, controller)
        run(controller, [home], [member(ANNA, home)])
        core, pid = node.newest_core(), node.node_pid
        with connection(home, ANNA, echo) as link, talking(link):
            os.kill(pid, signal.SIGSTOP)
            below.follows(pid)
            assert gets_in(home, ANNA, echo)
        assert node.core_pids() == [core]


@pytest.mark.slow
def test_no_node_comes_up(tmp_path: Path, home: Place, echo: EchoServer) -> None:
    """Cores end when no node has come up for ADOPT_SECONDS, and so does the keeper, with a failure."""
    with RealNode(tmp_path, ADOPT_SECONDS="2") as node, closing(RestController(node)) as controller:
        run(controller, [home], [member(ANNA, home)])
        core = psutil.Process(node.newest_core())
        node.certificate.key.write_text("no key")
        node.kill_node()
        assert gets_in(home, ANNA, echo)
        assert node._running.wait(40) == 1
        until(lambda: not core.is_running(), 5, "the core has ended")


@pytest.mark.slow
def test_the_keeper_is_killed(below: Below, home: Place) -> None:
    """All ends with the keeper, by the kernel's hand."""
    run(below.controller, [home], [member(ANNA, home)])
    processes = [psutil.Process(pid) for pid in (below.node.node_pid, below.node.newest_core())]
    below.node.kill()
    until(lambda: not any(map(psutil.Process.is_running, processes)), 5, "node and core have ended")


@pytest.mark.slow
def test_a_build_whose_bytes_the_node_adds_up(tmp_path: Path, echo: EchoServer) -> None:
    """A sing-box without v2ray_api goes on, too, and no byte of a connection that lives counts twice or is lost."""
    door, executable = Door(VLESS), find_sing_box("wheel")
    with (
        RealNode(tmp_path, SING_BOX_EXECUTABLE_PATH=str(executable)) as node,
        closing(RestController(node)) as controller,
    ):
        node.core = executable.resolve()
        below = Below(node, controller)
        controller.start(backend(door.inbounds, [door.user(ANNA)]))
        core = node.newest_core()
        with client((door, ANNA)) as (port,), transfer.connect(port, echo) as link:
            for _ in range(3):
                transfer.download(link, MIB)
                below.killed(lambda: transfer.download(link, MIB))
            assert node.core_pids() == [core]

            def told() -> int:
                return traffic(controller.stats(UsersStat)).get(ANNA.email, {}).get("downlink", 0)

            until(lambda: told() >= 6 * MIB, 10, "all bytes are told")
            assert told() < 6 * MIB + 10_000
