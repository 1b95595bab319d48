"""The node is killed: with ADOPT its core lives on, and the next node goes on with it. Nobody is dropped."""

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
from tests.conftest import Place, connection, gets_in, member, run, stays_out, talking, way
from tests.harness.grounds import Ground

ANNA, BERT, CARL = (TestUser.new(f"{name}@test") for name in ("anna", "bert", "carl"))
MIB = 1024 * 1024


class RealNode(NodeProcess):
    """Not a copy of an interpreter: what it was run as it can be run as again."""

    child = Child


class Adopting:
    """A node that may be killed, and what there is of its cores without it."""

    def __init__(self, node: NodeProcess, controller: Controller) -> None:
        self.node, self.controller = node, controller

    def killed(self, meanwhile: Callable[[], object] = lambda: None) -> None:
        """It is killed, and another one comes up and serves."""
        self.node.kill()
        meanwhile()
        self.node.start()
        until(lambda: self.controller.info().running, 20, "the backend runs")

    def upgraded(self) -> None:
        """It becomes itself again, in place."""
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
    """The processes that would end its cores."""
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
    """Bytes of users that nobody has been told."""
    with closing(sqlite3.connect(f"file:{node.state}/state.db?mode=ro", uri=True)) as connection:
        rows = connection.execute("SELECT downlink FROM traffic WHERE scope = 'user'").fetchall()
    return sum(bytes for (bytes,) in rows if bytes > 10_000)


def booked(node: NodeProcess) -> list[tuple[str, str, int]]:
    """What is known on disk of the counters of the core that may be gone on with."""
    with closing(sqlite3.connect(f"file:{node.state}/state.db?mode=ro", uri=True)) as connection:
        return connection.execute("SELECT run, counter, value FROM booked").fetchall()


def handed(node: NodeProcess) -> None:
    """What the next node needs is on disk."""
    until(lambda: (node.state / "adopt" / "core").exists(), 10, "what the next node needs is on disk")


def test_nobody_is_dropped(adopting: Adopting, home: Place, echo: EchoServer) -> None:
    """By a kill, nor by the next: users who came, went or changed last are as they should be, the core is the same."""
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


def test_a_removed_users_connection_ends(adopting: Adopting, home: Place, echo: EchoServer) -> None:
    """Also one of which the next node has never heard."""
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


def test_no_byte_is_lost_or_counted_twice(adopting: Adopting, home: Place, echo: EchoServer) -> None:
    """What was carried before, in between and after, by connections that live on and by those that came meanwhile."""
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


def test_what_the_core_says_meanwhile_is_heard(
    adopting: Adopting, ground: Ground, home: Place, echo: EchoServer
) -> None:
    """Each line once."""
    level = {} if ground.name == "xray" else {"log": {"level": "info"}}
    run(adopting.controller, [home], [member(ANNA, home)], **level)
    handed(adopting.node)
    words = "accepted" if ground.name == "xray" else "inbound connection from"
    adopting.killed(lambda: [gets_in(home, ANNA, echo) for _ in range(5)])
    with adopting.controller.logs() as reader:
        until(lambda: sum(words in line for line in reader.lines) >= 5, 10, "the lines of all five")
        assert sum(words in line for line in reader.lines) == 5


def test_a_door_that_was_closed_is_opened(adopting: Adopting, home: Place, echo: EchoServer) -> None:
    """By the node that was killed: whether it is to be closed is for the next one to say."""
    run(adopting.controller, [home], [member(ANNA, home)])
    handed(adopting.node)
    core, ports = adopting.node.newest_core(), [range(home.port, home.port + 1)]
    adopting.killed(lambda: connections.deafen(core, ports, True))
    assert gets_in(home, ANNA, echo)
    assert adopting.node.core_pids() == [core]


def test_a_core_that_died_meanwhile_is_started_anew(adopting: Adopting, home: Place, echo: EchoServer) -> None:
    run(adopting.controller, [home], [member(ANNA, home)])
    handed(adopting.node)
    core = adopting.node.newest_core()
    adopting.killed(lambda: os.kill(core, signal.SIGKILL))
    assert gets_in(home, ANNA, echo)
    assert core not in adopting.node.core_pids()


def test_its_end_is_noticed(adopting: Adopting, home: Place, echo: EchoServer) -> None:
    """Of a core that is nobody's child, too; it comes again, and a Stop ends it."""
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


def test_nobody_comes_back(adopting: Adopting, home: Place, echo: EchoServer) -> None:
    """Then the core ends, after a time that is set."""
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


def test_a_node_that_comes_without_it_starts_anew(adopting: Adopting, home: Place, echo: EchoServer) -> None:
    """There is one core, and no guard ends it."""
    run(adopting.controller, [home], [member(ANNA, home)])
    handed(adopting.node)
    core = adopting.node.newest_core()
    adopting.node.environment["ADOPT"] = "off"
    adopting.killed()
    assert gets_in(home, ANNA, echo)
    assert core not in adopting.node.core_pids()
    until(lambda: not guards(adopting.node), 10, "nobody guards it")
    assert gets_in(home, ANNA, echo)


@pytest.mark.parametrize("content", [b"", b"no message at all", b"\x08\x07"])
def test_what_is_left_cannot_be_read(content: bytes, adopting: Adopting, home: Place, echo: EchoServer) -> None:
    """Then the core is started anew, and the one before is gone."""
    run(adopting.controller, [home], [member(ANNA, home)])
    handed(adopting.node)
    core = adopting.node.newest_core()
    adopting.killed(lambda: (adopting.node.state / "adopt" / "core").write_bytes(content))
    assert gets_in(home, ANNA, echo)
    assert core not in adopting.node.core_pids() and len(adopting.node.core_pids()) == 1


def test_another_configuration_was_accepted_last(
    adopting: Adopting, ground: Ground, home: Place, echo: EchoServer
) -> None:
    """What is left of the core is of an earlier one: nobody goes on with that."""
    run(adopting.controller, [home], [member(ANNA, home)])
    handed(adopting.node)
    file = adopting.node.state / "adopt" / "core"
    before = file.read_bytes()
    other = Place(home.kind, "other", ground=ground)
    run(adopting.controller, [other], [member(BERT, other)])
    until(lambda: file.exists() and file.read_bytes() != before, 10, "the other one is on disk")
    adopting.killed(lambda: file.write_bytes(before))
    assert gets_in(other, BERT, echo) and stays_out(home, ANNA, echo)


def test_it_upgrades_itself_all_the_same(adopting: Adopting, home: Place, echo: EchoServer) -> None:
    """Before a kill, and after it, with a core that is not its child."""
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
