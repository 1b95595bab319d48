"""Kills of the node among Starts, users, limits and crashes in random order: at the end core, memory and disk agree."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path

import pytest

from protos.service_pb2 import UsersStat
from scripts.staging import transfer
from scripts.staging.controller import RpcController, traffic
from scripts.staging.cover import CoverServer
from scripts.staging.echo import EchoServer
from scripts.staging.inbounds import Kind
from scripts.staging.node import NodeProcess
from scripts.staging.wait import until
from tests.conftest import Place, connection, control, member, run, settled
from tests.harness.grounds import Ground
from tests.harness.upgraded import RealNode
from tests.live import test_next_node
from tests.live.test_limits_any_order import PEOPLE, Chaos, agree

# The share of kills that end the keeper, too; the most lines of the node between two, and seconds.
ALL, LINES, PAUSE = 0.2, 30, 1.0


class Killed(Chaos):
    """All random operations, and kills of the node, of which a few end everything."""

    def kill_node(self) -> None:
        self.let_it_work(LINES, PAUSE)
        if self._chance.random() < ALL:
            self._node.kill()
            self._node.start()
        else:
            with suppress(AssertionError):  # none is there yet
                self._node.kill_node()


@pytest.fixture
def real(tmp_path: Path) -> Iterator[NodeProcess]:
    with RealNode(tmp_path, DRAIN_TIMEOUT="4") as node:
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
    """There is one core with exactly the allowed users, and bytes moved afterwards are counted exactly."""
    place = Place(all_kinds["vless-raw"], "in", ground=ground)
    with closing(RpcController(real)) as controller, control(real, "rest") as other:
        chaos, rest = Killed(real, controller, place, echo, seed), Killed(real, other, place, echo, seed + 100)
        with settled([place], cover):
            chaos.start()
        words = {chaos.set_limits: 5, chaos.sync_one: 20, chaos.remove_and_add: 8, chaos.sync_all: 4, chaos.start: 1}
        with ThreadPoolExecutor(3) as pool:
            done = [
                pool.submit(chaos.act, words),
                pool.submit(rest.act, {rest.set_limits: 5, rest.carry: 3, **({rest.kill_core: 1} if crashes else {})}),
                pool.submit(rest.act, {rest.kill_node: 1}),
            ]
            for each in done:
                each.result()
        until(lambda: controller.info().running, 60, "the core is there")
        # A user who was just removed may still lack the addition that followed.
        controller.sync_users(chaos.everybody())
        until(lambda: agree(real, controller, place), 30, "core and memory agree")
        until(lambda: len(real.core_pids()) == 1, 20, "there is one core")
        run(controller, [place], [member(person, place) for person in PEOPLE])
        controller.set_limits({person.email: None for person in PEOPLE})
        until(lambda: agree(real, controller, place), 30, "core and memory agree")
        controller.stats(UsersStat, reset=True)
        counted(real, controller, place, echo)


def counted(node: NodeProcess, controller: RpcController, place: Place, echo: EchoServer) -> None:
    """Bytes over two more kills, of a user without limits."""
    size = 300_000
    (person,) = PEOPLE[:1]
    before = traffic(controller.stats(UsersStat)).get(person.email, {}).get("downlink", 0)
    until(lambda: reaches(place, person, echo, size), 20, "the user gets in")
    begun = traffic(controller.stats(UsersStat))[person.email]["downlink"]
    assert begun - before >= size
    killed = test_next_node.Killed(node, controller)
    with connection(place, person, echo) as link:
        for _ in range(2):
            transfer.download(link, size)
            killed.happens(lambda: transfer.download(link, size))
    until(lambda: bytes_of(controller, person.email) - begun >= 4 * size, 10, "all bytes are counted")
    assert bytes_of(controller, person.email) - begun < 4 * size + 5000


def bytes_of(controller: RpcController, email: str) -> int:
    return traffic(controller.stats(UsersStat)).get(email, {}).get("downlink", 0)


def reaches(place: Place, person: object, echo: EchoServer, size: int) -> bool:
    with connection(place, person, echo) as link:  # type: ignore[arg-type]
        transfer.download(link, size)
    return True
