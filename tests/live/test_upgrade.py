"""The node upgrades itself in place while users are connected: no connection is dropped, and nothing is lost."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from http.client import HTTPException
from itertools import pairwise
from pathlib import Path

import grpc
import pytest

from node.base.errors import NodeError
from protos.service_pb2 import Inbounds, Limits, Quota, User, UsersStat
from scripts.staging import transfer
from scripts.staging.controller import Controller, ControllerError, LogReader, RestController, RpcController, traffic
from scripts.staging.echo import EchoServer
from scripts.staging.inbounds import Kind
from scripts.staging.node import NodeProcess
from scripts.staging.rpc import Rpc
from scripts.staging.users import TestUser
from scripts.staging.version import Version
from scripts.staging.wait import until
from tests.conftest import Place, connection, daily, gets_in, member, run, stays_out, talking
from tests.harness.grounds import Ground
from tests.harness.pool import Pool
from tests.harness.upgraded import FAILED, RealNode, die_in_between, kept, said, upgrade

ANNA, BERT, CARL = (TestUser.new(f"{name}@test") for name in ("anna", "bert", "carl"))
MIB = 1024 * 1024


@pytest.fixture
def version(tmp_path: Path, request: pytest.FixtureRequest) -> Version:
    version = Version(tmp_path)
    if "hangs" in request.node.name:
        version.add("node/handover/program.py", "PATIENCE = 8.0")
    return version


@pytest.fixture
def real(tmp_path: Path, version: Version) -> Iterator[NodeProcess]:
    with RealNode(tmp_path, PYTHONPATH=str(version.root)) as node:
        kept(node)
        yield node


@pytest.fixture
def home(all_kinds: Mapping[str, Kind], ground: Ground) -> Place:
    return Place(all_kinds["vless-raw"], "home", ground=ground)


@pytest.fixture
def controller(real: NodeProcess) -> Iterator[Controller]:
    with closing(RestController(real)) as controller:
        yield controller


@pytest.mark.slow
@pytest.mark.both
def test_nobody_is_dropped(
    real: NodeProcess, version: Version, ground: Ground, home: Place, controller: Controller, echo: EchoServer
) -> None:
    """Connections carry bytes throughout, the core is the same process, with the same users."""
    run(controller, [home], [member(ANNA, home), member(BERT, home)])
    core = real.newest_core()
    with connection(home, ANNA, echo) as link, talking(link):
        for number in range(3):
            version.name(f"9.0.{number}")
            upgrade(real, f"txnode 9.0.{number} is ready")
            until(lambda: controller.info().state == "running", 10, "the backend runs")
        assert real.core_pids() == [core]
        assert controller.info().version == "9.0.2"
        assert gets_in(home, BERT, echo) and stays_out(home, CARL, echo)
        controller.sync_user(member(BERT))
        assert stays_out(home, BERT, echo)
        # After the removal another sing-box may run beside it.
        assert core in real.core_pids()
        controller.sync_user(member(CARL, home))
        assert gets_in(home, CARL, echo)


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
        until(lambda: controller.info().state == "running", 10, "the backend runs")
        assert all(gets_in(home, one, echo) for one in (ANNA, bert, CARL)) and stays_out(home, BERT, echo)
    controller.sync_user(member(CARL))
    assert stays_out(home, CARL, echo)


@pytest.mark.slow
def test_no_byte_is_lost_or_counted_twice(
    real: NodeProcess, home: Place, controller: Controller, echo: EchoServer
) -> None:
    """Bytes before, during and after are counted once, of surviving connections and of ended ones."""
    run(controller, [home], [member(ANNA, home), member(BERT, home)])
    with connection(home, ANNA, echo) as link:
        for _ in range(3):
            transfer.download(link, MIB)
            with connection(home, BERT, echo) as other:
                transfer.download(other, MIB)
            upgrade(real)
        transfer.download(link, MIB)
    want = {ANNA.email: 4 * MIB, BERT.email: 3 * MIB}

    def told() -> bool:
        rows = traffic(controller.stats(UsersStat))
        return all(0 <= rows[email]["downlink"] - bytes < 10_000 for email, bytes in want.items())

    until(told, 10, "all bytes are told once")
    assert 0 <= traffic(controller.stats(Inbounds))["home"]["downlink"] - 7 * MIB < 100_000


@pytest.mark.slow
@pytest.mark.parametrize("transport", [RestController, RpcController])
def test_no_line_is_lost_or_told_twice(
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
        until(lambda: len(lines_with(reader, words)) >= len(made), 10, "all connections are told of")
    assert len(lines_with(reader, words)) == len(made) == len(set(lines_with(reader, words)))


def visit(come: Callable[[], None], done: threading.Event) -> None:
    while not done.wait(0.01):
        come()


def lines_with(reader: LogReader, words: str) -> list[str]:
    return [line for line in reader.lines if words in line]


# Faults of a version, by where they show, and the operator's message.
BROKEN: Mapping[str, tuple[str, str, str]] = {
    "at import": ("node/settings.py", "raise RuntimeError('no import')", "no import"),
    "at start": (
        "node/tap.py",
        "def _broken(self):\n    raise RuntimeError('no start')\nNodeService.startService = _broken",
        "no start",
    ),
    "ends": (
        "node/tap.py",
        "def _broken(self):\n    raise SystemExit('no more')\nNodeService.startService = _broken",
        "no more",
    ),
    "hangs": (
        "node/tap.py",
        "import time\ndef _broken(self):\n    while True: time.sleep(0.1)\nNodeService.startService = _broken",
        "did not come up",
    ),
    "with everything opened": (
        "node/door/ports.py",
        "def _broken(self, _):\n    raise RuntimeError('no ports')\nPorts._metrics_site = _broken",
        "no ports",
    ),
    "hangs with everything opened": (
        "node/door/ports.py",
        "import time\ndef _broken(self, _):\n    while True: time.sleep(0.1)\nPorts._metrics_site = _broken",
        "did not come up",
    ),
    "when all is there": (
        "node/tap.py",
        "def _broken(self):\n    raise RuntimeError('not ready')\nNodeService._ready = _broken",
        "RuntimeError: not ready",
    ),
    "at the hand-over": (
        "node/engine/leaving.py",
        "def _broken(self, left, heirs):\n    async def no(plan):\n        heirs.failed('no hand-over')\n"
        "    self._heirs = heirs\n    self._runner.inherit(no)\nLeaving.inherit = _broken",
        "no hand-over",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", daily(["at start", "hangs", "at the hand-over", "with everything opened"], BROKEN))
def test_a_wrong_version(
    fault: str, real: NodeProcess, version: Version, home: Place, controller: Controller, echo: EchoServer
) -> None:
    """Users are not affected by a version that fails to start: the old one runs on, and logs the reason."""
    run(controller, [home], [member(ANNA, home)])
    core, (module, code, words) = real.newest_core(), BROKEN[fault]
    with connection(home, ANNA, echo) as link, talking(link):
        version.name("9.9.9")
        version.add(module, code)
        upgrade(real, FAILED)
        until(lambda: controller.info().state == "running", 10, "the backend runs")
        assert words in next(line for line in real.lines if FAILED in line)
        assert controller.info().version != "9.9.9"
        assert real.core_pids() == [core]
    assert gets_in(home, ANNA, echo) and stays_out(home, BERT, echo)


@pytest.mark.nightly
def test_the_watchdog(tmp_path: Path, home: Place, echo: EchoServer) -> None:
    """It is notified often enough, also if a version hangs: else it would end the node and the core."""
    version, silence, heard = Version(tmp_path), 15, [time.monotonic()]
    version.add("node/handover/program.py", "PATIENCE = 8.0")
    module, code, _ = BROKEN["hangs with everything opened"]
    whole = (version.root / module).read_text()
    version.add(module, code)
    hangs = (version.root / module).read_text()
    (version.root / module).write_text(whole)
    there = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)

    def listen() -> None:
        with suppress(OSError):
            while message := there.recv(1000):
                heard.extend([time.monotonic()] * (b"WATCHDOG=1" in message))

    with there:
        there.bind(str(tmp_path / "notify"))
        threading.Thread(target=listen, daemon=True).start()
        settings = {"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": str(silence * 10**6)}
        with RealNode(tmp_path, PYTHONPATH=str(version.root), **settings) as node:
            kept(node)
            with closing(RestController(node)) as controller:
                run(controller, [home], [member(ANNA, home)])
            with connection(home, ANNA, echo) as link, talking(link):
                (version.root / module).write_text(hangs)
                upgrade(node, FAILED)
            until(lambda: time.monotonic() - heard[-1] < 1, silence, "the version before is heard of")
        there.shutdown(socket.SHUT_RDWR)
    assert max(later - earlier for earlier, later in pairwise(heard)) < silence


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
def test_a_core_that_dies_in_between(
    real: NodeProcess, version: Version, home: Place, controller: Controller, echo: EchoServer
) -> None:
    """The new version starts another core at once."""
    run(controller, [home], [member(ANNA, home)])
    core = real.newest_core()
    die_in_between(version, core)
    version.name("9.0.0")
    upgrade(real, "txnode 9.0.0 is ready")
    until(lambda: gets_in(home, ANNA, echo), 20, "Anna gets in")
    # The core may accept her before the node's state is running.
    until(lambda: controller.info().state == "running", 10, "the backend runs")
    assert real.newest_core() != core and said(real, FAILED) == 0


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
        until(lambda: controller.info().state == "running", 10, "the backend runs")
    assert real.core_pids() == [core]


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
        until(lambda: all(reader.ended for reader in readers), 10, "readers are told")
        with pytest.raises(grpc.RpcError):
            feed.result(10)
        assert rest.info().state == rpc.info().state == "running"


def feeding(over: threading.Event) -> Iterator[User]:
    """An open request stream that sends nothing until its end."""
    over.wait(60)
    yield from ()
