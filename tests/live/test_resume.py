"""The node resumes its backend without a controller: after its end, with a bad disk, and when no calls come."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path

import psutil
import pytest

from protos.service_pb2 import Backend, UsersStat
from scripts.staging import transfer
from scripts.staging.controller import Controller, RestController, traffic
from scripts.staging.echo import EchoServer
from scripts.staging.inbounds import Kind
from scripts.staging.node import NodeProcess
from scripts.staging.process import freeze
from scripts.staging.users import TestUser
from scripts.staging.wait import accepts, until
from tests.conftest import Place, connection, control, gets_in, member, run, stays_out
from tests.harness.warned import warned

ANNA, BERT, CARL = (TestUser.new(f"{name}@test") for name in ("anna", "bert", "carl"))


@pytest.fixture
def node(own_node: NodeProcess) -> NodeProcess:
    """A node for one test, as each test ends it."""
    return own_node


def core(node: NodeProcess) -> int:
    [pid] = node.core_pids()
    return pid


def again(node: NodeProcess, how: str = "kill") -> None:
    """Restart the node."""
    {"kill": node.kill, "stop": node.stop}[how]()
    node.start()


def in_state(controller: Controller, state: str) -> str:
    """Wait for a state. Returns its reason."""
    until(lambda: controller.info().state == state, what=f"it is {state}")
    return controller.info().reason


@pytest.mark.parametrize("how", ["stop", "kill"])
def test_it_comes_back_by_itself(node: NodeProcess, home: Place, echo: EchoServer, how: str) -> None:
    """With the last users, before any controller calls; an identical Start changes nothing then."""
    with control(node, "grpc") as controller:
        run(controller, [home], [member(ANNA, home), member(BERT, home)])
        controller.sync_user(member(CARL, home), member(BERT))
    again(node, how)
    until(lambda: gets_in(home, CARL, echo), what="who was added last is in")
    assert gets_in(home, ANNA, echo)
    assert stays_out(home, BERT, echo)
    before = core(node)
    with control(node, "rest") as controller, connection(home, ANNA, echo) as link:
        assert run(controller, [home], [member(ANNA, home), member(CARL, home)]).running
        transfer.echo(link, b"still there")
    assert core(node) == before


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["rest", "grpc"])
def test_what_was_answered_is_on_disk(node: NodeProcess, home: Place, echo: EchoServer, transport: str) -> None:
    """A confirmed change of users survives an immediate kill of node and core."""
    with control(node, transport) as controller:
        run(controller, [home], [member(ANNA, home)])
    for number in range(3):
        newcomer = TestUser.new(f"{number}@test")
        with control(node, transport) as controller:
            controller.sync_users([member(ANNA, home), member(newcomer, home)])
            controller.sync_user(member(BERT, home))
            node.kill()
        node.start()
        for person in (newcomer, ANNA, BERT):
            until(lambda: gets_in(home, person, echo), what="he is in")  # noqa: B023


@pytest.mark.parametrize("dialect", ["bearer", "x-api-key"])
def test_what_was_stopped_stays_away(node: NodeProcess, home: Place, dialect: str) -> None:
    """A Stop forgets the backend at once, also within a panel's grace."""
    with closing(RestController(node, dialect="bearer" if dialect == "bearer" else "x-api-key")) as controller:
        run(controller, [home], [member(ANNA, home)])
        controller.stop()
        again(node)
        assert in_state(controller, "stopped") == ""
        assert not node.core_pids()


def test_what_was_refused_is_not_resumed(node: NodeProcess, home: Place, echo: EchoServer) -> None:
    """After a failed Start the previous backend remains, also for the next node."""
    with control(node, "rest") as controller:
        run(controller, [home], [member(ANNA, home)])
        with pytest.raises(Exception, match="400"):
            controller.start(Backend(config="{", users=[member(BERT, home)]))
        again(node)
    until(lambda: gets_in(home, ANNA, echo), what="she is in")


def test_no_resume(tmp_path: Path, home: Place) -> None:
    """RESUME=off: the node waits for a controller, and still has the unread traffic."""
    with NodeProcess(tmp_path, RESUME="off") as node, control(node, "grpc") as controller:
        run(controller, [home], [member(ANNA, home)])
        again(node)
        assert in_state(controller, "stopped") == ""
        assert not node.core_pids()


@contextmanager
def bereft(directory: Path, home: Place) -> Iterator[tuple[NodeProcess, RestController, Path]]:
    """A node with Anna to resume whose core is missing; and the core's path."""
    executable = directory / "core"
    executable.symlink_to(home.ground.executable())
    with (
        NodeProcess(directory, **{home.ground.variable: str(executable)}) as node,
        closing(RestController(node)) as controller,
    ):
        run(controller, [home], [member(ANNA, home)])
        node.kill()
        executable.unlink()
        node.start()
        yield node, controller, executable


def test_a_resume_that_fails_is_tried_again(tmp_path: Path, home: Place, echo: EchoServer) -> None:
    """A core that is missing at the node's start is retried; `info` and the log name what is missing."""
    with bereft(tmp_path, home) as (_, controller, executable):
        assert str(executable) in in_state(controller, "failed")
        with controller.logs() as logs:
            logs.find("not resumed")
        with pytest.raises(Exception, match="core is down"):
            controller.sync_users([member(BERT, home)])
        executable.symlink_to(home.ground.executable())
        in_state(controller, "running")
        assert gets_in(home, ANNA, echo)


@pytest.mark.slow
def test_a_start_while_it_is_tried(tmp_path: Path, home: Place, all_kinds: Mapping[str, Kind]) -> None:
    """A controller's Start works meanwhile, and the failed resume is not retried any more."""
    work = Place(all_kinds["trojan-tls"], "work", ground=home.ground)
    with bereft(tmp_path, home) as (node, controller, executable):
        in_state(controller, "failed")
        executable.symlink_to(home.ground.executable())
        run(controller, [work], [member(BERT, work)])
        before = core(node)
        over = time.monotonic() + 5
        until(lambda: time.monotonic() > over, what="another try would have come")
        assert core(node) == before


# Keep-alive


def test_keep_alive_ends_it_for_good(node: NodeProcess, home: Place, echo: EchoServer) -> None:
    """After keep-alive expires the counters are read, the core ends, and the next node does not resume it."""
    with control(node, "rest") as controller:
        run(controller, [home], [member(ANNA, home)], keep_alive=1)
        with connection(home, ANNA, echo) as link:
            transfer.download(link, 100_000)
        until(lambda: not node.core_pids(), what="the core ends")
        again(node)
        assert not node.core_pids()
        assert controller.info().state == "stopped"
        assert traffic(controller.stats(UsersStat))[ANNA.email]["downlink"] >= 100_000


def test_keep_alive_that_keeps(tmp_path: Path, home: Place, echo: EchoServer) -> None:
    """KEEP_ALIVE_ACTION=keep: without calls the node warns, and the backend runs on, also after a restart."""
    with NodeProcess(tmp_path, KEEP_ALIVE_ACTION="keep") as node, control(node, "rest") as controller:
        with controller.logs() as logs:
            run(controller, [home], [member(ANNA, home)], keep_alive=1)
            before = core(node)
            logs.find("no controller has called for 1 s; the backend keeps running")
        assert core(node) == before
        assert gets_in(home, ANNA, echo)
        again(node)
        until(lambda: gets_in(home, ANNA, echo), what="she is in")


@pytest.mark.slow
def test_keep_alive_goes_on_where_it_was(node: NodeProcess, home: Place) -> None:
    """After a kill the keep-alive's remaining time is unchanged."""
    with control(node, "grpc") as controller:
        run(controller, [home], [member(ANNA, home)], keep_alive=8)
    half = time.monotonic() + 5
    until(lambda: time.monotonic() > half, what="some of the time is over")
    again(node)
    until(lambda: accepts(home.port), what="it is resumed")
    resumed = time.monotonic()
    until(lambda: not node.core_pids(), 7, "the core ends")
    assert 1.5 < time.monotonic() - resumed < 6


# Bad disks


@pytest.fixture
def small_disk(node: NodeProcess, home: Place) -> Iterator[psutil.Process]:
    """A node whose file size limit is smaller than a core's configuration."""
    with control(node, "rest") as controller:
        run(controller, [home], [member(ANNA, home)])
    process = psutil.Process(node.node_pid)
    process.rlimit(psutil.RLIMIT_FSIZE, (500_000, psutil.Process().rlimit(psutil.RLIMIT_FSIZE)[1]))
    yield process


@pytest.mark.slow
def test_a_full_disk(small_disk: psutil.Process, node: NodeProcess, home: Place, echo: EchoServer) -> None:
    """The node refuses no call, `info` warns, and once there is room everything is written."""
    with control(node, "grpc") as controller, control(node, "rest") as other:
        for _ in range(4):
            crowd = [member(TestUser.new(f"{number}@test"), home) for number in range(2500)]
            controller.sync_users([member(ANNA, home), member(BERT, home), *crowd])
        until(lambda: any("cannot be written" in text for text in controller.info().warnings), what="it warns")
        with connection(home, BERT, echo) as link:
            transfer.download(link, 100_000)
        other.sync_user(member(CARL, home))
        assert gets_in(home, CARL, echo)
        assert traffic(other.stats(UsersStat))[BERT.email]["downlink"] >= 100_000
        assert sum("NOT ON DISK" in line for line in node.lines) == 1
        small_disk.rlimit(psutil.RLIMIT_FSIZE, (-1, -1))
        until(lambda: not warned(controller.info()), 20, "it is written")
        again(node)
        until(lambda: gets_in(home, CARL, echo), what="who was added meanwhile is in")
        assert traffic(other.stats(UsersStat))[BERT.email]["downlink"] >= 100_000


def test_a_damaged_file(node: NodeProcess, home: Place, echo: EchoServer) -> None:
    """The node moves it aside, starts, warns, and works normally."""
    with control(node, "rest") as controller:
        run(controller, [home], [member(ANNA, home)])
        node.kill()
        (node.state / "state.db").write_bytes(os.urandom(10_000))
        for suffix in ("-wal", "-shm"):
            (node.state / f"state.db{suffix}").unlink()
        node.start()
        [warning] = warned(controller.info())
        assert "state.db.damaged-" in warning
        assert list(node.state.glob("state.db.damaged-*"))
        run(controller, [home], [member(BERT, home)])
        again(node)
        until(lambda: gets_in(home, BERT, echo), what="he is in")
        assert not warned(controller.info())


def test_files_are_private(node: NodeProcess, home: Place) -> None:
    """Users' secrets are in a directory and files that only the node can read."""
    with control(node, "rest") as controller:
        run(controller, [home], [member(ANNA, home)])
    assert node.state.stat().st_mode & 0o777 == 0o700
    files = list(node.state.glob("state.db*"))
    assert len(files) == 3
    assert {path.stat().st_mode & 0o777 for path in files} == {0o600}


def test_the_node_ends_with_its_core_stopped(node: NodeProcess, home: Place, echo: EchoServer) -> None:
    """A suspended core delays neither the node's end nor the next one's start."""
    with control(node, "rest") as controller:
        run(controller, [home], [member(ANNA, home)])
    freeze(core(node))
    node.stop()
    node.start()
    until(lambda: gets_in(home, ANNA, echo), what="she is in")
