"""The node is killed while cores drain: the next one goes on with all of them, and each drains to its end."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from node.backend.probation import SECONDS as PROBATION
from protos.service_pb2 import UsersStat
from scripts.staging import transfer
from scripts.staging.controller import Controller, RestController, traffic
from scripts.staging.echo import EchoServer
from scripts.staging.inbounds import Kind
from scripts.staging.node import NodeProcess
from scripts.staging.users import TestUser
from scripts.staging.wait import until
from tests.conftest import connection, daily, gets_in, member, stays_out, talking, way
from tests.harness.grounds import Ground
from tests.harness.upgraded import RealNode
from tests.live.test_killed_node import Below, is_closed
from tests.live.test_overlap import GONE, ended, only, runs
from tests.live.test_upgrade_drains import House

ANNA, BERT, CARL, DORA = (TestUser.new(f"{name}@test") for name in ("anna", "bert", "carl", "dora"))
MIB = 1024 * 1024
DRAIN = 14.0


@pytest.fixture
def settings() -> dict[str, str]:
    return {}


@pytest.fixture
def real(tmp_path: Path, settings: dict[str, str]) -> Iterator[NodeProcess]:
    with RealNode(tmp_path, **settings) as node:
        yield node


@pytest.fixture
def controller(real: NodeProcess) -> Iterator[Controller]:
    with closing(RestController(real)) as controller:
        yield controller


@pytest.fixture
def house(real: NodeProcess, controller: Controller, all_kinds: Mapping[str, Kind], ground: Ground) -> House:
    return House(real, controller, all_kinds, ground)


def killed(node: NodeProcess, controller: Controller, meanwhile: Callable[[], object] = lambda: None) -> None:
    """Kill the node, and wait for the next one."""
    Below(node, controller).killed(meanwhile)


@pytest.mark.slow
@pytest.mark.parametrize("udp", [False, True], ids=["", "with UDP"])
def test_all_of_them_go_on(
    udp: bool, real: NodeProcess, house: House, controller: Controller, echo: EchoServer
) -> None:
    """No connection is dropped, new ones go to the newest core, and each core ends with its last connection."""
    with ExitStack() as stack:
        cores, links = [], []
        for person in (ANNA, BERT):
            cores.append(house.start(ANNA, BERT, CARL, udp=udp))
            links.append(stack.enter_context(ExitStack()))
            link = links[-1].enter_context(connection(house.home, person, echo))
            links[-1].enter_context(talking(link))
        cores.append(house.start(ANNA, BERT, CARL, DORA, udp=udp))
        for _ in range(2):
            killed(real, controller)
            assert runs(real) == {*cores}
            assert all(gets_in(house.home, DORA, echo) for _ in range(10))
            if udp:
                assert gets_in(house.quic, DORA, echo) and gets_in(house.loose, DORA, echo)
        for number, visit in enumerate(links, 1):
            visit.close()
            left = {*cores[number:]}
            until(lambda left=left: runs(real) == left, GONE, "the core behind it ends")  # type: ignore[misc]
            assert gets_in(house.home, DORA, echo)
        with connection(house.home, CARL, echo) as link, talking(link):
            cores.append(house.start(CARL, DORA, udp=udp))
            assert runs(real) == {*cores[-2:]}
            killed(real, controller)
            assert gets_in(house.home, DORA, echo) and stays_out(house.home, BERT, echo)
    only(real, cores[-1])


@pytest.mark.slow
def test_bytes_are_exact(real: NodeProcess, house: House, controller: Controller, echo: EchoServer) -> None:
    """Bytes of a connection on a draining core, and of others, are counted exactly."""

    def told() -> int:
        return traffic(controller.stats(UsersStat)).get(ANNA.email, {}).get("downlink", 0)

    house.start(ANNA)
    with connection(house.home, ANNA, echo) as link:
        transfer.download(link, MIB)
        house.start(ANNA, BERT)
        for _ in range(2):
            transfer.download(link, MIB)
            killed(real, controller)
            transfer.download(link, MIB)
    with connection(house.home, ANNA, echo) as link:
        transfer.download(link, MIB)
    until(lambda: told() >= 6 * MIB, 10, "all is told")
    assert told() < 6 * MIB + 10_000
    until(lambda: len(runs(real)) == 1, GONE, "the core that drained ends")
    controller.stats(UsersStat, reset=True)
    assert told() == 0
    killed(real, controller)
    assert told() < 10_000


@pytest.mark.slow
def test_while_a_core_waits_for_its_restart(
    real: NodeProcess, house: House, controller: Controller, echo: EchoServer
) -> None:
    """It crashes again and again: those that drain stay, with their bytes, and another one starts beside them."""

    def told() -> int:
        return traffic(controller.stats(UsersStat)).get(ANNA.email, {}).get("downlink", 0)

    old = house.start(ANNA)
    with connection(house.home, ANNA, echo) as link:
        transfer.download(link, MIB)
        house.start(ANNA, BERT)
        time.sleep(PROBATION)
        until(lambda: told() >= MIB, 10, "the first bytes are told")
        for _ in range(3):
            core = until(lambda: controller.info().state == "running" and runs(real) - {old}, 10, "a core serves")
            for pid in core or ():
                os.kill(pid, signal.SIGKILL)
            until(lambda core=core: not core & runs(real), 10, "it has ended")  # type: ignore[misc]
        until(lambda: controller.info().state == "restarting", 10, "the node waits to restart it")
        killed(real, controller)
        assert old in runs(real) and gets_in(house.home, BERT, echo)
        transfer.download(link, MIB)
    until(lambda: told() >= 2 * MIB, 10, "all is told")
    assert told() < 2 * MIB + 10_000


@pytest.mark.slow
def test_who_is_removed_is_off_everywhere(
    real: NodeProcess, house: House, controller: Controller, echo: EchoServer
) -> None:
    """A removed user's connections on any draining core are cut; those of others stay."""
    house.start(ANNA, BERT)
    elsewhere = way(house.home, BERT, "127.0.0.9")
    with (
        connection(house.home, ANNA, echo) as link,
        elsewhere as port,
        transfer.connect(port, echo) as other,
        talking(other),
    ):
        house.start(ANNA, BERT)
        killed(real, controller)
        controller.sync_user(member(ANNA))
        until(lambda: is_closed(link), 20, "the connection of who was removed ends")
        assert stays_out(house.home, ANNA, echo)


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{"DRAIN_TIMEOUT": f"{DRAIN:g}"}])
def test_the_time_to_drain_goes_on(real: NodeProcess, house: House, controller: Controller, echo: EchoServer) -> None:
    """The next node does not restart the drain's time limit."""
    house.start(ANNA)
    with connection(house.home, ANNA, echo) as link:
        new, began = house.start(ANNA), time.monotonic()
        while time.monotonic() < began + DRAIN - 5:
            killed(real, controller)
        transfer.echo(link, b"still there")
        until(lambda: ended(link), DRAIN, "it is ended")
        assert DRAIN - 1 < time.monotonic() - began < DRAIN + 6
    only(real, new)


@pytest.mark.slow
@pytest.mark.parametrize("which", daily(["newest"], ["oldest", "newest", "current"]))
def test_one_dies_meanwhile(
    which: str, real: NodeProcess, house: House, controller: Controller, echo: EchoServer
) -> None:
    """The other cores stay; if the one for new connections is gone, a new core is started beside them."""
    with ExitStack() as stack:
        cores, links = [], {}
        for person in (ANNA, BERT):
            cores.append(house.start(ANNA, BERT, CARL))
            links[cores[-1]] = stack.enter_context(connection(house.home, person, echo))
        cores.append(house.start(ANNA, BERT, CARL))
        dead = dict(zip(["oldest", "newest", "current"], cores, strict=True))[which]
        killed(real, controller, meanwhile=lambda: os.kill(dead, signal.SIGKILL))
        assert all(gets_in(house.home, CARL, echo) for _ in range(10))
        left = {*cores} - {dead}
        assert runs(real) & {*cores} == left
        for core in left & links.keys():
            transfer.echo(links[core], b"still there")
        # Another core joins them.
        cores.append(house.start(ANNA, BERT, CARL, DORA))
        assert all(gets_in(house.home, DORA, echo) for _ in range(10))
    only(real, cores[-1])
