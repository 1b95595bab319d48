"""The node is killed: its keeper holds the cores for the next one. test_next_node.py has what happens to users."""

from __future__ import annotations

import fcntl
import os
import signal
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import psutil
import pytest

from drivers.sockets import connections
from protos.service_pb2 import UsersStat
from scripts.staging import transfer
from scripts.staging.controller import RestController, RpcController, traffic
from scripts.staging.echo import EchoServer
from scripts.staging.inbounds import Kind
from scripts.staging.sing_box import VLESS, Door, backend, find_sing_box
from scripts.staging.users import TestUser
from scripts.staging.version import Version
from scripts.staging.wait import until
from tests.conftest import Place, connection, gets_in, member, run, talking
from tests.harness.box import client
from tests.harness.grounds import Ground
from tests.harness.upgraded import RealNode, said, upgrade
from tests.live.test_next_node import House, Killed
from tests.live.test_overlap import runs

ANNA, BERT, CARL = (TestUser.new(f"{name}@test") for name in ("anna", "bert", "carl"))
MIB = 1024 * 1024


@pytest.fixture(params=[RestController, RpcController], ids=["rest", "grpc"])
def killed(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Killed]:
    with RealNode(tmp_path, ADOPT_SECONDS="60") as node, closing(request.param(node)) as controller:
        try:
            yield Killed(node, controller)
        finally:
            print("\n".join(node.last_lines(80)))


@pytest.mark.slow
def test_no_line_of_the_core_is_lost(killed: Killed, ground: Ground, home: Place, echo: EchoServer) -> None:
    """Each line of the core arrives exactly once."""
    level = {} if ground.name == "xray" else {"log": {"level": "info"}}
    run(killed.controller, [home], [member(ANNA, home)], **level)
    words = "accepted" if ground.name == "xray" else "inbound connection from"
    killed.happens(lambda: [gets_in(home, ANNA, echo) for _ in range(5)])
    with killed.controller.logs() as reader:
        until(lambda: sum(words in line for line in reader.lines) >= 5, 10, "the lines of all five")
        assert sum(words in line for line in reader.lines) == 5


@pytest.mark.slow
def test_a_door_that_was_closed_is_opened(killed: Killed, home: Place, echo: EchoServer) -> None:
    """The next node decides for itself whether an inbound that the killed node had closed stays closed."""
    run(killed.controller, [home], [member(ANNA, home)])
    core, ports = killed.node.newest_core(), [range(home.port, home.port + 1)]
    killed.happens(lambda: connections.deafen(core, ports, True))
    assert gets_in(home, ANNA, echo)
    assert killed.node.core_pids() == [core]


@pytest.mark.slow
def test_its_end_is_noticed(killed: Killed, home: Place, echo: EchoServer) -> None:
    """The node notices the end of a core that is not its child, and restarts it; a Stop ends it."""
    run(killed.controller, [home], [member(ANNA, home)])
    killed.happens()
    core = killed.node.newest_core()
    os.kill(core, signal.SIGKILL)
    until(lambda: gets_in(home, ANNA, echo), 15, "it is served again")
    killed.happens()
    killed.controller.stop()
    until(lambda: not killed.node.core_pids(), 10, "the core has ended")


@pytest.mark.slow
def test_no_environment_shows_the_key(killed: Killed, home: Place) -> None:
    """Neither the keeper's nor a node's, be it the first one or after a kill or an upgrade; each has it."""
    node = killed.node

    def shown() -> list[int]:
        pids = node.pid, node.node_pid
        return [pid for pid in pids if node.key.encode() in Path(f"/proc/{pid}/environ").read_bytes()]

    assert node.environment["API_KEY"] == node.key and not shown()
    run(killed.controller, [home])
    killed.happens()
    assert not shown()
    upgrade(node)
    assert killed.controller.info().running and not shown()


@pytest.mark.slow
def test_a_node_beside_an_ending_one(tmp_path: Path, home: Place) -> None:
    """The keeper is killed, and a node is started while the lock is held still: it waits, and resumes the backend."""
    with RealNode(tmp_path) as node, closing(RestController(node)) as controller:
        run(controller, [home])
        node.kill()
        with (node.state / "lock").open() as lock, ThreadPoolExecutor(1) as pool:
            # Held in place of processes that end slowly.
            fcntl.flock(lock, fcntl.LOCK_EX)
            started = pool.submit(node.start)
            until(lambda: said(node, "the node waits up to 5 s"), 20, "it waits")
            lock.close()
            started.result()
        until(lambda: controller.info().running, 20, "the backend is resumed")


@pytest.mark.slow
def test_killed_and_upgraded_in_turn(killed: Killed, home: Place, echo: EchoServer) -> None:
    """A node can be upgraded before it is killed and after it has followed a killed one."""
    run(killed.controller, [home], [member(ANNA, home)])
    core = killed.node.newest_core()
    with connection(home, ANNA, echo) as link, talking(link):
        for _ in range(2):
            upgrade(killed.node)
            until(lambda: killed.controller.info().running, 10, "the backend runs")
            killed.happens()
            assert killed.node.core_pids() == [core], "\n".join(killed.node.lines)


@pytest.mark.slow
def test_a_node_that_hangs(tmp_path: Path, home: Place, echo: EchoServer) -> None:
    """The keeper kills a node that gives no sign of life, and starts the next one; no connection ends."""
    with RealNode(tmp_path, WATCHDOG_USEC="6000000") as node, closing(RestController(node)) as controller:
        killed = Killed(node, controller)
        run(controller, [home], [member(ANNA, home)])
        core, pid = node.newest_core(), node.node_pid
        with connection(home, ANNA, echo) as link, talking(link):
            os.kill(pid, signal.SIGSTOP)
            killed.follows(pid)
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
def test_the_keeper_is_killed(killed: Killed, home: Place) -> None:
    """All ends with the keeper, by the kernel's hand."""
    run(killed.controller, [home], [member(ANNA, home)])
    processes = [psutil.Process(pid) for pid in (killed.node.node_pid, killed.node.newest_core())]
    killed.node.kill()
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
        killed = Killed(node, controller)
        controller.start(backend(door.inbounds, [door.user(ANNA)]))
        core = node.newest_core()
        with client((door, ANNA)) as (port,), transfer.connect(port, echo) as link:
            for _ in range(3):
                transfer.download(link, MIB)
                killed.happens(lambda: transfer.download(link, MIB))
            assert node.core_pids() == [core]

            def counted() -> int:
                return traffic(controller.stats(UsersStat)).get(ANNA.email, {}).get("downlink", 0)

            until(lambda: counted() >= 6 * MIB, 10, "all bytes are counted")
            assert counted() < 6 * MIB + 10_000


# A short probation, whose end a test can wait for.
_SHORT = """
SECONDS = 0.5
_end = Probation.end
def _report(self):
    if self.under_way:
        print("the probation is over", flush=True)
    _end(self)
Probation.end = _report
"""


@pytest.mark.slow
def test_while_a_core_waits_for_its_restart(
    tmp_path: Path, all_kinds: Mapping[str, Kind], ground: Ground, echo: EchoServer
) -> None:
    """It crashes again and again: those that drain stay, with their bytes, and another one starts beside them."""
    version = Version(tmp_path)
    version.add("node/backend/probation.py", _SHORT)
    with RealNode(tmp_path, PYTHONPATH=str(version.root)) as node, closing(RestController(node)) as controller:
        house, killed = House(node, controller, all_kinds, ground), Killed(node, controller)

        def counted() -> int:
            return traffic(controller.stats(UsersStat)).get(ANNA.email, {}).get("downlink", 0)

        old = house.start(ANNA)
        with connection(house.home, ANNA, echo) as link:
            transfer.download(link, MIB)
            house.start(ANNA, BERT)
            until(lambda: said(node, "the probation is over"), 20, "the probation is over")
            until(lambda: counted() >= MIB, 10, "the first bytes are counted")
            for _ in range(3):
                core = until(lambda: controller.info().state == "running" and runs(node) - {old}, 10, "a core serves")
                for pid in core or ():
                    os.kill(pid, signal.SIGKILL)
                until(lambda core=core: not core & runs(node), 10, "it has ended")  # type: ignore[misc]
            until(lambda: controller.info().state == "restarting", 10, "the node waits to restart it")
            killed.happens()
            assert old in runs(node) and gets_in(house.home, BERT, echo)
            transfer.download(link, MIB)
        until(lambda: counted() >= 2 * MIB, 10, "all bytes are counted")
        assert counted() < 2 * MIB + 10_000
