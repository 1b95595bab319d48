"""The node upgrades itself in place while users are connected: no connection is dropped, and nothing is lost."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from http.client import HTTPException
from pathlib import Path

import grpc
import psutil
import pytest

from node.base.errors import NodeError
from node.doctor.kernel import node_of
from protos.service_pb2 import Limits, Quota, User
from scripts.staging import transfer
from scripts.staging.controller import Controller, ControllerError, LogReader, RestController, RpcController
from scripts.staging.core import XrayClient
from scripts.staging.echo import EchoServer
from scripts.staging.inbounds import Kind
from scripts.staging.node import NodeProcess
from scripts.staging.ports import free_port
from scripts.staging.rpc import Rpc
from scripts.staging.users import TestUser
from scripts.staging.version import Version
from scripts.staging.wait import until
from tests.conftest import Place, connection, gets_in, member, run, stays_out, talking
from tests.harness.grounds import Ground
from tests.harness.pool import Pool
from tests.harness.upgraded import READY, RealNode, kept, said, upgrade
from tests.live.test_next_node import House, running
from tests.live.test_overlap import core, listens, only, runs

ANNA, BERT, CARL = (TestUser.new(f"{name}@test") for name in ("anna", "bert", "carl"))
MIB = 1024 * 1024


@pytest.fixture
def version(tmp_path: Path) -> Version:
    return Version(tmp_path)


@pytest.fixture
def real(tmp_path: Path, version: Version) -> Iterator[NodeProcess]:
    with RealNode(tmp_path, PYTHONPATH=str(version.root)) as node:
        kept(node)
        yield node


@pytest.fixture
def house(real: NodeProcess, controller: Controller, all_kinds: Mapping[str, Kind], ground: Ground) -> House:
    return House(real, controller, all_kinds, ground)


@pytest.fixture
def controller(real: NodeProcess) -> Iterator[Controller]:
    with closing(RestController(real)) as controller:
        yield controller


@pytest.mark.slow
@pytest.mark.both
def test_users_change_while_the_next_version_prepares(
    tmp_path: Path, real: NodeProcess, version: Version, home: Place, controller: Controller, echo: EchoServer
) -> None:
    """It has built their accounts by then: those who are removed, changed and added have what the controller wants."""
    prepared, changed = tmp_path / "prepared", tmp_path / "changed"
    wait = f"""
import pathlib, time
_prepare = Arrival.prepare
async def _wait(self):
    await _prepare(self)
    pathlib.Path({str(prepared)!r}).touch()
    while not pathlib.Path({str(changed)!r}).exists():
        time.sleep(0.01)
Arrival.prepare = _wait
"""
    run(controller, [home], [member(ANNA, home), member(BERT, home)])
    version.name("9.0.0")
    version.add("node/handover/arrival.py", wait)
    with connection(home, ANNA, echo) as link, talking(link):
        os.kill(real.pid, signal.SIGUSR2)
        until(prepared.exists, 20, "the next version is prepared")
        bert = TestUser.new(BERT.email)
        for one in (member(bert, home), member(CARL, home)):
            controller.sync_user(one)
        assert gets_in(home, CARL, echo)
        changed.touch()
        until(lambda: said(real, "txnode 9.0.0 is ready") > 0, 20, "the next version is ready")
        running(controller)
        assert all(gets_in(home, one, echo) for one in (ANNA, bert, CARL)) and stays_out(home, BERT, echo)
    controller.sync_user(member(CARL))
    assert stays_out(home, CARL, echo)


@pytest.mark.slow
@pytest.mark.parametrize("transport", [RestController, RpcController])
def test_no_line_is_lost_or_repeated(
    transport: type[RestController] | type[RpcController],
    real: NodeProcess,
    ground: Ground,
    home: Place,
    controller: Controller,
    echo: EchoServer,
) -> None:
    """A log stream over the upgrade has each connection's line once, also of those during it."""
    level = {} if ground.name == "xray" else {"log": {"level": "info"}}
    run(controller, [home], [member(ANNA, home)], **level)
    words = "accepted" if ground.name == "xray" else "inbound connection from"
    made: list[bool] = []
    done = threading.Event()
    with closing(transport(real)) as reading, reading.logs(patience=30) as reader:
        visitor = threading.Thread(target=lambda: visit(lambda: made.append(gets_in(home, ANNA, echo)), done))
        visitor.start()
        try:
            for _ in range(3):
                upgrade(real)
        finally:
            done.set()
            visitor.join()
        assert made and all(made)
        until(lambda: len(lines_with(reader, words)) >= len(made), 10, "each connection has its line")
    assert len(lines_with(reader, words)) == len(made) == len(set(lines_with(reader, words)))


def visit(come: Callable[[], None], done: threading.Event) -> None:
    while not done.wait(0.01):
        come()


def lines_with(reader: LogReader, words: str) -> list[str]:
    return [line for line in reader.lines if words in line]


@pytest.mark.slow
@pytest.mark.parametrize("transport", [RestController, RpcController])
@pytest.mark.parametrize("anew", [True, False], ids=["new connections", "one connection"])
def test_controllers_wait(
    transport: type[RestController] | type[RpcController], anew: bool, real: NodeProcess, home: Place
) -> None:
    """No call is refused, on an existing connection or a new one: it waits until the new version serves."""
    faults: list[str] = []
    done, calls = threading.Event(), 0
    with closing(transport(real)) as first:
        run(first, [home], [member(ANNA, home)])

        def call() -> None:
            nonlocal calls
            with closing(transport(real)) as own:
                try:
                    state = (own if anew else first).info().state
                except (ControllerError, NodeError, OSError) as error:
                    faults.append(f"{type(error).__name__}: {error}")
                else:
                    calls += 1
                    if state != "running":
                        faults.append(state)

        caller = threading.Thread(target=lambda: visit(call, done))
        caller.start()
        try:
            for _ in range(4):
                upgrade(real)
        finally:
            done.set()
            caller.join()
    assert not faults and calls


@pytest.mark.slow
def test_connections_that_are_kept(real: NodeProcess, home: Place, controller: Controller) -> None:
    """A client that checks its connection before each call, as pools do, gets a reply to every call."""
    run(controller, [home], [member(ANNA, home)])
    faults: list[str] = []
    done, calls = threading.Event(), 0
    pool = Pool(real)

    def call() -> None:
        nonlocal calls
        try:
            assert pool.get("/info") == 200
            calls += 1
        except (OSError, HTTPException) as error:
            faults.append(repr(error))

    caller = threading.Thread(target=lambda: visit(call, done))
    caller.start()
    try:
        for _ in range(4):
            upgrade(real)
    finally:
        done.set()
        caller.join()
    pool.close()
    assert not faults and calls


@pytest.mark.slow
def test_a_reload_in_between(
    real: NodeProcess, version: Version, home: Place, controller: Controller, echo: EchoServer
) -> None:
    """SIGHUP during an upgrade, as from a certificate's renewal, waits, and ends nothing."""
    run(controller, [home], [member(ANNA, home)])
    core, pid = real.newest_core(), real.pid
    version.add("node/handover/succession.py", "import time\ntime.sleep(1.5)")
    with connection(home, ANNA, echo) as link, talking(link):
        before = said(real, "is ready")
        os.kill(pid, signal.SIGUSR2)
        until(lambda: said(real, "starting up") > 1, 20, "the next version begins")
        os.kill(pid, signal.SIGHUP)
        until(lambda: said(real, "is ready") > before, 20, "the next version is ready")
        running(controller)
    assert real.core_pids() == [core]
    assert node_of(Path(real.state)) in {each.pid for each in psutil.Process(pid).children()} - {core}


@pytest.mark.slow
def test_a_signal_in_between(real: NodeProcess, version: Version, home: Place, controller: Controller) -> None:
    """TERM waits for the new version: the node ends cleanly, and the core with it."""
    run(controller, [home], [member(ANNA, home)])
    version.add("node/handover/succession.py", "import time\ntime.sleep(1.5)")
    pid = real.pid
    os.kill(pid, signal.SIGUSR2)
    until(lambda: said(real, "starting up") > 1, 20, "the next version begins")
    os.kill(pid, signal.SIGTERM)
    assert real._running.wait() in (0, -signal.SIGTERM)
    until(lambda: not real.core_pids(), 10, "no core is left")


@pytest.mark.slow
@pytest.mark.parametrize("runs", [True, False], ids=["a core", "no core"])
def test_a_signal_at_the_last_moment(runs: bool, tmp_path: Path, version: Version, home: Place) -> None:
    """A signal that the old version gets after it has closed everything is passed on to the new one."""
    slow = "import time\n_of = memory_of\ndef memory_of(packed):\n    time.sleep(1.5)\n    return _of(packed)"
    version.add("node/handover/succession.py", slow)
    with RealNode(tmp_path, PYTHONPATH=str(version.root)) as node, closing(RestController(node)) as controller:
        kept(node)
        if runs:
            run(controller, [home], [member(ANNA, home)])
        os.kill(node.pid, signal.SIGUSR2)
        until(lambda: said(node, "upgrading the node to"), 20, "the version that goes closes all")
        os.kill(node.pid, signal.SIGTERM)
        assert node._running.wait() in (0, -signal.SIGTERM)
        assert said(node, "goes on with") <= 1 and "Traceback" not in "".join(node.lines)
        until(lambda: not node.core_pids(), 10, "no core is left")


@pytest.mark.slow
@pytest.mark.parametrize("state", ["nothing", "stopped"])
def test_without_a_core(state: str, real: NodeProcess, home: Place, controller: Controller, echo: EchoServer) -> None:
    """There is no core to hand over; the new version works, and remembers a stopped backend."""
    if state != "nothing":
        run(controller, [home], [member(ANNA, home)])
        controller.stop()
    upgrade(real)
    upgrade(real)
    assert controller.info().state == "stopped"
    run(controller, [home], [member(ANNA, home)])
    assert gets_in(home, ANNA, echo)


@pytest.mark.slow
def test_limits_go_on(real: NodeProcess, home: Place, controller: Controller, echo: EchoServer) -> None:
    """The new version knows users' use of their quotas: barred users are and stay barred."""
    run(controller, [home], [member(ANNA, home), member(BERT, home)])
    controller.set_limits({ANNA.email: Limits(bytes=Quota(bytes=3 * MIB))})
    with connection(home, ANNA, echo) as carrying:
        transfer.download(carrying, 2 * MIB)
        with connection(home, BERT, echo) as link, talking(link):
            upgrade(real)
        transfer.download(carrying, MIB)
    until(lambda: stays_out(home, ANNA, echo), 20, "Anna is over her quota")
    upgrade(real)
    # Without a node nothing cuts barred users whom sing-box accepts.
    until(lambda: stays_out(home, ANNA, echo), 10, "Anna is out")
    assert controller.limits().users[0].off_for == ["quota"]
    assert gets_in(home, BERT, echo)
    controller.set_limits({ANNA.email: None})
    until(lambda: gets_in(home, ANNA, echo), 10, "Anna is in again")


def test_streams_that_never_end(real: NodeProcess, home: Place) -> None:
    """A log stream, a request stream that a panel never closes, and silent strangers do not delay it."""
    with closing(RpcController(real)) as rpc, closing(RestController(real)) as rest, ExitStack() as stack:
        run(rpc, [home], [member(ANNA, home)])
        readers = [stack.enter_context(each.logs()) for each in (rpc, rest)]
        for _ in range(20):
            stack.enter_context(closing(socket.create_connection((real.host, real.rest_port))))
        channel = stack.enter_context(Rpc(real))
        over = threading.Event()
        feed = stack.enter_context(ThreadPoolExecutor(1)).submit(channel.SyncUser, feeding(over))
        try:
            until(lambda: rpc.info().state == "running", 10, "the backend runs")
            upgrade(real)
        finally:
            over.set()
        until(lambda: all(reader.ended for reader in readers), 10, "the streams of all readers end")
        with pytest.raises(grpc.RpcError):
            feed.result(10)
        assert rest.info().state == rpc.info().state == "running"


def feeding(over: threading.Event) -> Iterator[User]:
    """An open request stream that sends nothing until its end."""
    over.wait(60)
    yield from ()


@pytest.mark.slow
def test_clients_over_udp(real: NodeProcess, house: House, controller: Controller, echo: EchoServer) -> None:
    """Clients with a session keep it, others reach the serving core, and the next core takes over from it."""
    house.start(ANNA, BERT, CARL, udp=True)
    with connection(house.home, ANNA, echo) as link, talking(link):
        house.start(ANNA, BERT, CARL, udp=True)
        for _ in range(2):
            with connection(house.quic, ANNA, echo) as session, talking(session):
                upgrade(real)
                running(controller)
                assert gets_in(house.quic, BERT, echo) and gets_in(house.loose, BERT, echo)
        new = house.start(ANNA, BERT, udp=True)
        for place in (house.quic, house.loose):
            assert gets_in(place, BERT, echo) and stays_out(place, CARL, echo)
        upgrade(real)
        running(controller)
        assert gets_in(house.quic, BERT, echo)
    only(real, new)
    assert gets_in(house.quic, BERT, echo)


@pytest.mark.slow
def test_lines_of_one_that_drains(
    real: NodeProcess, house: House, ground: Ground, controller: Controller, echo: EchoServer
) -> None:
    """None is lost or repeated, of requests on a connection that carries many."""
    level = {} if ground.name == "xray" else {"log": {"level": "info"}}
    words = "accepted" if ground.name == "xray" else "inbound connection to"
    with closing(RestController(real)) as reading, reading.logs(patience=40) as reader:
        home = Place(house.home.kind, "home", ground=ground)
        run(controller, [home], [member(ANNA, home)], **level)
        old, port = core(real), free_port()
        mux = {"mux": {"enabled": True, "concurrency": 128}}
        with XrayClient({port: {**home.outbound(ANNA), **mux}}), transfer.connect(port, echo) as link:
            made = 1
            other = Place(house.home.kind, "other", ground=ground)
            run(controller, [home, other], [member(ANNA, home)], **level)
            for _ in range(3):
                before = said(real, READY)
                os.kill(real.pid, signal.SIGUSR2)
                while said(real, READY) == before:
                    transfer.connect(port, echo).close()
                    made += 1
            transfer.echo(link, b"still there")
            assert old in runs(real)

        def found() -> list[str]:
            return [line for line in reader.lines if words in line and str(echo.port) in line]

        until(lambda: len(found()) >= made, 10, "each connection has its line")
        assert len(found()) == made


@pytest.mark.slow
def test_one_on_probation(
    real: NodeProcess, version: Version, house: House, controller: Controller, echo: EchoServer
) -> None:
    """A new core that took over just before the upgrade and fails just after it gives way to the old one."""
    version.add("node/backend/probation.py", "SECONDS = 60.0")
    upgrade(real)
    old = house.start(ANNA)
    with connection(house.home, ANNA, echo) as link:
        new = house.start(ANNA, BERT)
        with talking(link):
            upgrade(real)
            running(controller)
            assert runs(real) == {old, new}
            os.kill(new, signal.SIGKILL)
            until(
                lambda: any("failed soon after taking over" in warning for warning in controller.info().warnings),
                10,
                "it goes back",
            )
            until(lambda: gets_in(house.home, ANNA, echo), 10, "Anna gets in")
        assert runs(real) == {old} and listens(old, house.home.port)
