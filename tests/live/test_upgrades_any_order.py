"""Upgrades among Starts, users, limits and crashes in random order: at the end core, memory and disk agree."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path

import psutil
import pytest

from scripts.staging import transfer
from scripts.staging.controller import RpcController
from scripts.staging.cover import CoverServer
from scripts.staging.echo import EchoServer
from scripts.staging.inbounds import Kind
from scripts.staging.node import NodeProcess
from scripts.staging.wait import until
from tests.conftest import Place, connection, control, run, settled
from tests.harness.grounds import Ground
from tests.harness.upgraded import RealNode
from tests.live.test_limits_any_order import PEOPLE, Chaos, agree

ANNA = PEOPLE[0]
# Seconds between two upgrades, of a lasting connection, and of a drain at most: longer than an upgrade takes.
PAUSE, STAY, DRAIN = 0.7, 2.5, 40


class Upgraded(Chaos):
    """All random operations, and upgrades."""

    def upgrade(self) -> None:
        os.kill(self._node.pid, signal.SIGUSR2)
        time.sleep(PAUSE)

    def stay(self) -> None:
        """A connection that outlasts its core's replacement."""
        with connection(self._place, self.person(), self._echo) as link:
            until = time.monotonic() + STAY
            while time.monotonic() < until:
                transfer.echo(link, bytes(1000))


def goes_on(node: NodeProcess) -> int:
    """How many upgrades handed over more than one core."""
    return sum(" goes on with " in line and line.endswith(" cores") for line in node.lines)


def upgrades(node: NodeProcess) -> int:
    """The number of upgrades."""
    return sum("is ready" in line for line in node.lines)


@contextmanager
def draining(
    node: NodeProcess, controller: RpcController, place: Place, chaos: Chaos, echo: EchoServer
) -> Iterator[socket.socket]:
    """Inside, a core drains beside another one: a user without limits is still connected, by the yielded connection."""
    chaos.said[ANNA.email] = None
    controller.set_limits({ANNA.email: None})
    run(controller, [place], chaos.everybody(), log=place.ground.brief)
    until(lambda: len(node.core_pids()) == 1, DRAIN + 20, "there is one core")
    with connection(place, ANNA, echo) as link:
        run(controller, [place], chaos.everybody(), log=place.ground.verbose)
        assert len(node.core_pids()) == 2
        yield link


@pytest.fixture
def real(tmp_path: Path) -> Iterator[NodeProcess]:
    with RealNode(tmp_path, DRAIN_TIMEOUT=str(DRAIN)) as node:
        yield node


@pytest.mark.slow
@pytest.mark.parametrize("crashes", [False, True], ids=["", "with crashes"])
@pytest.mark.parametrize("seed", [1])
def test_all_agree_at_the_end(
    ground: Ground,
    seed: int,
    crashes: bool,
    real: NodeProcess,
    all_kinds: Mapping[str, Kind],
    cover: CoverServer,
    echo: EchoServer,
) -> None:
    """The node is the same process throughout, and has no more descriptors than before."""
    place, pid = Place(all_kinds["vless-raw"], "in", ground=ground), real.pid
    with closing(RpcController(real)) as controller, control(real, "rest") as other:
        chaos = Upgraded(real, controller, place, echo, seed)
        rest = Upgraded(real, other, place, echo, seed + 100)
        with settled([place], cover):
            chaos.start()
        held = psutil.Process(pid).num_fds()
        words = {chaos.set_limits: 10, chaos.sync_one: 10, chaos.remove_and_add: 4, chaos.sync_all: 4, chaos.start: 1}
        with ThreadPoolExecutor(4) as pool:
            done = [
                pool.submit(chaos.act, words),
                pool.submit(rest.act, {rest.set_limits: 5, rest.carry: 3, **({rest.kill_core: 1} if crashes else {})}),
                pool.submit(rest.act, {rest.upgrade: 1}),
                pool.submit(rest.act, {rest.stay: 1}),
            ]
            for each in done:
                each.result()
        until(lambda: controller.info().running, 60, "the core is there")
        until(lambda: agree(real, controller, place), 30, "core and memory agree")
        until(lambda: len(real.core_pids()) == 1, DRAIN + 20, "there is one core")
        assert not [line for line in real.lines if "Traceback" in line]
        print(f"{upgrades(real) - 1} upgrades, of them {goes_on(real)} with several cores")
        with draining(real, controller, place, chaos, echo) as link:
            before, several = upgrades(real), goes_on(real)
            chaos.upgrade()
            until(lambda: upgrades(real) > before and controller.info().running, 60, "another upgrade")
            assert goes_on(real) == several + 1
            until(lambda: agree(real, controller, place), 30, "core and memory agree")
            transfer.echo(link, bytes(1000))
        assert real.pid == pid and psutil.Process(pid).is_running()
        until(lambda: len(real.core_pids()) == 1, DRAIN + 20, "there is one core")
        until(lambda: psutil.Process(pid).num_fds() <= held + 5, 20, "no descriptor is left over")
        real.kill()
        real.start()
        until(lambda: controller.info().running, 60, "the core is back")
        until(lambda: agree(real, controller, place), 30, "disk and core agree")
