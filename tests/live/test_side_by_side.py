"""Two nodes of one installation on one machine: neither sees, ends or sweeps anything of the other's."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import psutil
import pytest

from node.client import connect
from protos.service_pb2 import UsersStat
from scripts.staging import background, transfer
from scripts.staging.controller import RestController, RpcController, traffic
from scripts.staging.controller import target as target_of
from scripts.staging.echo import EchoServer
from scripts.staging.inbounds import Kind
from scripts.staging.ports import free_port
from scripts.staging.users import TestUser
from scripts.staging.version import Version
from scripts.staging.wait import until
from tests.conftest import Place, connection, gets_in, member, run, stays_out, talking
from tests.harness.grounds import Ground
from tests.harness.upgraded import RealNode, kept, upgrade
from tests.live.test_next_node import running

ANNA, BERT, CARL = (TestUser.new(f"{name}@test") for name in ("anna", "bert", "carl"))


@dataclass(frozen=True)
class Neighbour:
    """One of the nodes, with a controller, an inbound, and a user whose name only this node has."""

    node: RealNode
    controller: RestController | RpcController
    home: Place
    person: TestUser

    def serve(self, **extra: Any) -> None:
        run(self.controller, [self.home], [member(self.person, self.home)], **extra)

    def survives(self) -> None:
        """Wait until the next node serves, after a kill."""
        running(self.controller)

    def metrics(self) -> str:
        url = f"http://127.0.0.1:{self.node.environment['METRICS_PORT']}/metrics"
        with urlopen(Request(url, headers={"Authorization": f"Bearer {self.node.key}"})) as page:
            return str(page.read().decode())

    @property
    def story(self) -> tuple[object, ...]:
        """What must not change by what happens to the other: processes, state, warnings and events."""
        info = self.controller.info()
        processes = (self.node.pid, self.node.node_pid, *self.node.core_pids())
        return processes, info.state, list(info.warnings), background.run(self._events)

    async def _events(self) -> list[str]:
        target = target_of(self.node, "rest", None, "bearer")
        async with connect(background.reactor, target) as client, client.events(follow=False) as stream:
            return [event.kind async for event in stream]


@pytest.fixture
def pair(tmp_path: Path, all_kinds: Mapping[str, Kind], ground: Ground) -> Iterator[tuple[Neighbour, Neighbour]]:
    """Two nodes that run the same modules as the same user; one controller speaks REST, the other gRPC."""
    version = Version(tmp_path)
    with ExitStack() as stack:
        found = []
        for name, transport, person in (("one", RestController, ANNA), ("two", RpcController, BERT)):
            (tmp_path / name).mkdir()
            metrics = {"METRICS_PORT": str(free_port()), "METRICS_USERS": "on"}
            node = stack.enter_context(RealNode(tmp_path / name, PYTHONPATH=str(version.root), **metrics))
            kept(node)
            controller = stack.enter_context(closing(transport(node)))
            found.append(Neighbour(node, controller, Place(all_kinds["vless-raw"], "home", ground=ground), person))
            found[-1].serve()
        yield found[0], found[1]


def _killed_core(it: Neighbour) -> None:
    before = it.node.newest_core()
    os.kill(before, signal.SIGKILL)
    until(lambda: before not in it.node.core_pids() and it.node.core_pids(), 20, "another core runs")
    it.survives()


def _killed_node(it: Neighbour) -> None:
    before = it.node.kill_node()
    until(lambda: it.node.node_pid != before, 20, "another node runs")
    it.survives()


def _killed_keeper(it: Neighbour) -> None:
    it.node.kill()
    it.node.start()
    it.survives()


def _restarted(it: Neighbour) -> None:
    it.node.stop()
    it.node.start()
    it.survives()


def _changed(it: Neighbour) -> None:
    it.serve(**it.home.ground.other)
    it.controller.sync_user(member(CARL, it.home))
    it.controller.stop()
    it.serve()


HAPPENINGS: Mapping[str, Callable[[Neighbour], object]] = {
    "changes": _changed,
    "its core is killed": _killed_core,
    "it is upgraded": lambda it: upgrade(it.node),
    "it is killed": _killed_node,
    "its keeper is killed": _killed_keeper,
    "it is restarted": _restarted,
}


@pytest.mark.slow
def test_what_happens_to_one_is_nothing_to_the_other(pair: tuple[Neighbour, Neighbour], echo: EchoServer) -> None:
    """Each in turn: the other's processes, events and connections stay as they were, and its users alone get in."""
    for it, other in (pair, pair[::-1]):
        with connection(other.home, other.person, echo) as link, talking(link):
            before = other.story
            for what, happens in HAPPENINGS.items():
                happens(it)
                assert other.story == before, what
                assert gets_in(it.home, it.person, echo), what
            assert stays_out(it.home, other.person, echo) and stays_out(other.home, it.person, echo)
            transfer.echo(link, bytes(1000))


def test_each_counts_its_own(pair: tuple[Neighbour, Neighbour], echo: EchoServer) -> None:
    """Counters and metrics of one node have only its users."""
    one, two = pair
    with connection(one.home, one.person, echo) as link:
        transfer.download(link, 100_000)
    until(lambda: one.person.email in traffic(one.controller.stats(UsersStat)), 10, "the node has counted it")
    assert one.person.email not in traffic(two.controller.stats(UsersStat))
    assert one.person.email in one.metrics()
    assert one.person.email not in two.metrics() and two.person.email not in one.metrics()


def test_the_run_directories_are_apart(pair: tuple[Neighbour, Neighbour]) -> None:
    """No process of one node has an open file, a socket or a directory below the other's STATE_DIR."""
    for it, other in (pair, pair[::-1]):
        for process in map(psutil.Process, (it.node.pid, it.node.node_pid, *it.node.core_pids())):
            files = [str(file.readlink()) for file in Path(f"/proc/{process.pid}/fd").iterdir()]
            assert not [file for file in files if str(other.node.state) in file]
            assert not [each for each in process.net_connections("unix") if str(other.node.state) in str(each.laddr)]
            assert str(other.node.directory / "") not in " ".join((process.cwd(), *process.cmdline()))
