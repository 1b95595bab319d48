"""What happens to the node, and to whom: after an upgrade and after a kill the next node goes on with the cores.

Each test has a table of what happens (an upgrade in place, a kill) and of what runs then: one core, or others that
drain beside it.
"""

from __future__ import annotations

import itertools
import os
import signal
import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing
from pathlib import Path

import psutil
import pytest

from protos.service_pb2 import Inbounds, UsersStat
from scripts.staging import transfer
from scripts.staging.controller import Controller, RestController, RpcController, traffic
from scripts.staging.echo import EchoServer
from scripts.staging.inbounds import Kind
from scripts.staging.node import NodeProcess
from scripts.staging.users import TestUser
from scripts.staging.version import Version
from scripts.staging.wait import until
from tests.conftest import Place, connection, daily, gets_in, member, run, stays_out, talking, way
from tests.harness.grounds import Ground
from tests.harness.upgraded import FAILED, RealNode, die_in_between, kept, said, upgrade
from tests.live.test_overlap import GONE, ended, only, runs

ANNA, BERT, CARL, DORA = (TestUser.new(f"{name}@test") for name in ("anna", "bert", "carl", "dora"))
MIB = 1024 * 1024
# The longest drain of a core, in seconds, in tests of it.
DRAIN = 14.0


class Killed:
    """Kills of the node."""

    def __init__(self, node: NodeProcess, controller: Controller) -> None:
        self.node, self.controller = node, controller

    def happens(self, meanwhile: Callable[[], object] = lambda: None) -> None:
        """Kill the node, do something while there is none, and wait until the next one serves."""
        keeper = psutil.Process(self.node.pid)
        keeper.suspend()
        try:
            before = self.node.kill_node()
            meanwhile()
        finally:
            keeper.resume()
        self.follows(before)

    def happens_to(self, core: int) -> None:
        """Kill a core in between."""
        self.happens(lambda: os.kill(core, signal.SIGKILL))

    def follows(self, before: int) -> None:
        """Wait until another node than this one serves."""
        until(lambda: self.node.node_pid != before, 20, "another node runs")
        running(self.controller)


class Upgraded:
    """Upgrades in place, each to a version with another name."""

    def __init__(self, node: NodeProcess, controller: Controller, version: Version) -> None:
        self._node, self._controller, self._version = node, controller, version
        self._numbers = itertools.count()

    def happens(self, meanwhile: Callable[[], object] = lambda: None) -> None:
        """Upgrade the node, do something during that, and wait until the next version serves."""
        name = f"9.0.{next(self._numbers)}"
        self._version.name(name)
        upgrade(self._node, f"txnode {name} is ready", meanwhile)
        running(self._controller)
        assert self._controller.info().version == name
        assert said(self._node, FAILED) == said(self._node, "the upgrade waits") == 0

    def happens_to(self, core: int) -> None:
        """Kill a core in between."""
        die_in_between(self._version, core)
        self.happens()


class House:
    """An inbound that each configuration has, and another one that differs."""

    def __init__(self, node: NodeProcess, controller: Controller, kinds: Mapping[str, Kind], ground: Ground) -> None:
        self._node, self._controller, self._kind, self._ground = node, controller, kinds["vless-raw"], ground
        self.home = Place(self._kind, "home", ground=ground)
        # Over UDP: sessions, and separate datagrams.
        self.quic, self.loose = (
            Place(kinds[name], name, ground=ground) for name in ("hysteria2", "shadowsocks-2022-aes-128")
        )
        self._numbers = itertools.count()

    def start(self, *people: TestUser, udp: bool = False) -> int:
        """Start another configuration; the old core drains. Returns the core that serves now."""
        before, other = runs(self._node), Place(self._kind, f"other-{next(self._numbers)}", ground=self._ground)
        places = [self.home, *([self.quic, self.loose] if udp else [])]
        run(self._controller, [*places, other], [member(person, *places) for person in people])
        (new,) = runs(self._node) - before
        return new


def running(controller: Controller) -> None:
    until(lambda: controller.info().state == "running", 20, "the backend runs")


@pytest.fixture
def version(tmp_path: Path, what: str) -> Version | None:
    return Version(tmp_path) if what == "upgraded" else None


@pytest.fixture
def settings() -> dict[str, str]:
    return {"ADOPT_SECONDS": "60"}


@pytest.fixture
def real(tmp_path: Path, version: Version | None, settings: dict[str, str]) -> Iterator[NodeProcess]:
    with RealNode(tmp_path, **settings, **({"PYTHONPATH": str(version.root)} if version else {})) as node:
        if version:
            kept(node)
        yield node


@pytest.fixture
def controller(real: NodeProcess, what: str) -> Iterator[Controller]:
    with closing((RpcController if "gRPC" in what else RestController)(real)) as controller:
        yield controller


@pytest.fixture
def change(real: NodeProcess, version: Version | None, controller: Controller) -> Upgraded | Killed:
    return Upgraded(real, controller, version) if version else Killed(real, controller)


@pytest.fixture
def house(real: NodeProcess, controller: Controller, all_kinds: Mapping[str, Kind], ground: Ground) -> House:
    return House(real, controller, all_kinds, ground)


# What happens to a node with one core, and to one with others that drain.
ONE, DRAINING = ("upgraded", "killed", "killed, gRPC"), ("upgraded", "killed")
TABLE = [*((what, False) for what in ONE), *((what, True) for what in DRAINING)]


def on_disk(node: NodeProcess) -> int:
    """Bytes of users on disk that no controller has read."""
    with closing(sqlite3.connect(f"file:{node.state}/state.db?mode=ro", uri=True)) as connection:
        rows = connection.execute("SELECT downlink FROM traffic WHERE scope = 'user'").fetchall()
    return sum(bytes for (bytes,) in rows if bytes > 10_000)


def booked(node: NodeProcess) -> list[tuple[str, str, int, int]]:
    """The counters on disk of the core that may be adopted."""
    with closing(sqlite3.connect(f"file:{node.state}/state.db?mode=ro", uri=True)) as connection:
        return connection.execute("SELECT run, name, uplink, downlink FROM counted").fetchall()


@pytest.mark.slow
@pytest.mark.parametrize("what", [pytest.param("upgraded", marks=pytest.mark.both), "killed", "killed, gRPC"])
def test_nobody_is_dropped(
    change: Upgraded | Killed, real: NodeProcess, house: House, controller: Controller, echo: EchoServer
) -> None:
    """A connection carries bytes throughout, the core is the same process, and the last user changes are in force."""
    home, core = house.home, house.start(ANNA, BERT)
    with connection(home, ANNA, echo) as link, talking(link):
        for _ in range(2):
            change.happens()
            assert real.core_pids() == [core]
        assert gets_in(home, BERT, echo) and stays_out(home, CARL, echo)
        controller.sync_user(member(BERT))
        assert stays_out(home, BERT, echo)
        controller.sync_user(member(CARL, home))
        assert gets_in(home, CARL, echo)
        change.happens()
        assert gets_in(home, CARL, echo) and stays_out(home, BERT, echo)
        controller.sync_user(member(BERT, home))
        assert gets_in(home, BERT, echo)
        controller.sync_user(member(CARL))
        assert stays_out(home, CARL, echo)
        # After a removal another sing-box may run beside it.
        assert core in real.core_pids()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "udp"), [("upgraded", False), ("killed", False), ("killed", True)], ids=["upgraded", "killed", "with UDP"]
)
def test_all_cores_go_on(
    udp: bool, change: Upgraded | Killed, real: NodeProcess, house: House, controller: Controller, echo: EchoServer
) -> None:
    """No connection is dropped, new ones reach the newest core, each core drains to its end; another can take over."""
    with ExitStack() as stack:
        cores, links = [], []
        for person in (ANNA, BERT):
            cores.append(house.start(ANNA, BERT, CARL, udp=udp))
            links.append(stack.enter_context(ExitStack()))
            link = links[-1].enter_context(connection(house.home, person, echo))
            links[-1].enter_context(talking(link))
        cores.append(house.start(ANNA, BERT, CARL, DORA, udp=udp))
        carl = stack.enter_context(connection(house.home, CARL, echo))
        stack.enter_context(talking(carl))
        for _ in range(2):
            change.happens()
            assert runs(real) == {*cores}
            assert all(gets_in(house.home, DORA, echo) for _ in range(5))
            if udp:
                assert gets_in(house.quic, DORA, echo) and gets_in(house.loose, DORA, echo)
        for number, visit in enumerate(links, 1):
            assert runs(real) == {*cores[number - 1 :]}
            visit.close()
            left = {*cores[number:]}
            until(lambda left=left: runs(real) == left, GONE, "the core behind it ends")  # type: ignore[misc]
            assert gets_in(house.home, DORA, echo)
        cores.append(house.start(CARL, DORA, udp=udp))
        assert runs(real) == {*cores[-2:]}
        assert gets_in(house.home, DORA, echo) and stays_out(house.home, BERT, echo)
        change.happens()
        assert runs(real) == {*cores[-2:]}
        assert gets_in(house.home, DORA, echo) and stays_out(house.home, BERT, echo)
    only(real, cores[-1])
    assert gets_in(house.home, DORA, echo)


@pytest.mark.slow
@pytest.mark.parametrize(("what", "drains"), TABLE)
def test_no_byte_is_lost_or_counted_twice(
    drains: bool, change: Upgraded | Killed, real: NodeProcess, house: House, controller: Controller, echo: EchoServer
) -> None:
    """Bytes before, during and after, on connections that survive, also on draining cores, and on ended ones."""
    home = house.home
    house.start(ANNA, BERT)

    def carry() -> None:
        with connection(home, BERT, echo) as other:
            transfer.download(other, MIB)

    with connection(home, ANNA, echo) as anna:
        transfer.download(anna, MIB)
        if drains:
            house.start(ANNA, BERT)
        with connection(home, BERT, echo) as bert:
            for _ in range(2):
                transfer.download(anna, MIB)
                transfer.download(bert, MIB)
                change.happens(carry)
            transfer.download(anna, MIB)
    want = {ANNA.email: 4 * MIB, BERT.email: 4 * MIB}

    def counted() -> bool:
        rows = traffic(controller.stats(UsersStat))
        return all(0 <= rows[email]["downlink"] - bytes < 10_000 for email, bytes in want.items())

    until(counted, 10, "all bytes are counted once")
    until(lambda: len(runs(real)) == 1, GONE, "the core that drained ends")
    assert counted()
    assert 0 <= traffic(controller.stats(Inbounds))["home"]["downlink"] - 8 * MIB < 100_000
    until(lambda: on_disk(real) >= 8 * MIB, 10, "all of it is on disk")
    controller.stats(UsersStat, reset=True)
    assert not any(row["downlink"] for row in traffic(controller.stats(UsersStat)).values())
    until(lambda: not on_disk(real), 10, "the reset is on disk")
    seen = booked(real)
    change.happens()
    rows = traffic(controller.stats(UsersStat))
    assert all(row["downlink"] < 10_000 for row in rows.values()), (rows, seen)


@pytest.mark.slow
@pytest.mark.parametrize(("what", "drains"), TABLE[1:])
def test_a_removed_users_connections_end(
    drains: bool, change: Upgraded | Killed, house: House, controller: Controller, echo: EchoServer
) -> None:
    """Also on a draining core, and one that the next node has not seen before; those of others stay."""
    home = house.home
    house.start(ANNA, BERT)
    elsewhere = way(home, BERT, "127.0.0.9")
    with connection(home, ANNA, echo) as link, elsewhere as port, transfer.connect(port, echo) as other, talking(other):
        if drains:
            house.start(ANNA, BERT)
        change.happens()
        transfer.echo(link, b"still there")
        controller.sync_user(member(ANNA))
        until(lambda: ended(link), 20, "the removed user's connection ends")
        assert stays_out(home, ANNA, echo) and gets_in(home, BERT, echo)


@pytest.mark.slow
@pytest.mark.parametrize("what", DRAINING)
@pytest.mark.parametrize("settings", [{"DRAIN_TIMEOUT": f"{DRAIN:g}"}], ids=[""])
def test_the_time_to_drain_goes_on(
    change: Upgraded | Killed, real: NodeProcess, house: House, echo: EchoServer
) -> None:
    """The next node does not restart the drain's time limit."""
    house.start(ANNA)
    with connection(house.home, ANNA, echo) as link:
        new, began = house.start(ANNA), time.monotonic()
        while time.monotonic() < began + DRAIN / 2:
            change.happens()
        transfer.echo(link, b"still there")
        until(lambda: ended(link), DRAIN, "the connection is ended")
        assert DRAIN - 1 < time.monotonic() - began < DRAIN + 6
    only(real, new)


@pytest.mark.slow
@pytest.mark.parametrize("what", ONE)
def test_a_core_that_dies_in_between(
    change: Upgraded | Killed, real: NodeProcess, house: House, echo: EchoServer
) -> None:
    """The next node starts another core at once."""
    core = house.start(ANNA)
    change.happens_to(core)
    assert gets_in(house.home, ANNA, echo)
    assert core not in real.core_pids()


# The draining ones, and the one for new connections.
CORES = ("oldest", "newest", "current")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "which"),
    daily(
        [("upgraded", "oldest"), ("upgraded", "current"), ("killed", "newest")],
        itertools.product(DRAINING, CORES),
    ),
)
def test_one_of_several_dies_in_between(
    which: str, change: Upgraded | Killed, real: NodeProcess, house: House, echo: EchoServer
) -> None:
    """The others stay with their connections; a new core replaces the one for new connections."""
    with ExitStack() as stack:
        links = {}
        for person in (ANNA, BERT, CARL):
            core = house.start(ANNA, BERT, CARL)
            links[core] = stack.enter_context(connection(house.home, person, echo))
        dead = dict(zip(CORES, links, strict=True))[which]
        change.happens_to(dead)
        assert all(gets_in(house.home, CARL, echo) for _ in range(10))
        assert [core for core, link in links.items() if ended(link)] == [dead]
        there = runs(real)
        assert links.keys() - there == {dead} and len(there) == (3 if which == "current" else 2)
        # Another core joins them.
        new = house.start(ANNA, BERT, CARL, DORA)
        assert all(gets_in(house.home, DORA, echo) for _ in range(10))
    only(real, new)
