"""A core that is killed, or a node with its cores, loses the bytes of a second or two, and bills none twice."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from protos.service_pb2 import UsersStat
from scripts.staging.controller import Controller, traffic
from scripts.staging.echo import EchoServer
from scripts.staging.node import NodeProcess
from scripts.staging.pushes import Moved, Pushes
from scripts.staging.users import TestUser
from scripts.staging.wait import until
from tests.conftest import Place, control, member, run, way

ANNA = TestUser.new("anna@test")
# Seconds between two readings by default, and for which readings may be late on a busy machine.
INTERVAL, LATE = 10.0, 1.5
KILLS = 2


@pytest.fixture
def node(tmp_path: Path) -> Iterator[NodeProcess]:
    """A node with the default interval."""
    with NodeProcess(tmp_path, TRAFFIC_INTERVAL="") as running:
        yield running


def kill_core(node: NodeProcess) -> None:
    os.kill(node.newest_core(), signal.SIGKILL)


def kill_all(node: NodeProcess) -> None:
    node.kill()
    node.start()


def running(controller: Controller) -> Callable[[], bool]:
    return lambda: controller.info().running


def interval(node: NodeProcess) -> float:
    """Seconds between two readings, which are cheap enough to be more frequent than the setting."""
    with control(node, "rest") as controller:
        found = controller.info().traffic_interval
    assert 1 <= found < INTERVAL / 2
    return found


def billed(controller: Controller) -> Moved:
    row = traffic(controller.stats(UsersStat)).get(ANNA.email, {})
    return Moved(row.get("uplink", 0), row.get("downlink", 0))


@pytest.mark.slow
@pytest.mark.each_once("ground", "kill")
@pytest.mark.parametrize("kill", [kill_core, kill_all])
def test_bytes_of_a_second_or_two(
    kill: Callable[[NodeProcess], None], node: NodeProcess, home: Place, echo: EchoServer
) -> None:
    """No byte is missing that was pushed longer ago than `info` says, and none is billed that was not pushed."""
    with control(node, "grpc") as controller:
        run(controller, [home], [member(ANNA, home)])
    lost = Moved()
    with way(home, ANNA) as port, Pushes(port, echo) as pushes:
        for _ in range(KILLS):
            spare = pushes.most - pushes.arrived
            every = interval(node)
            pushes.resume()
            pushes.for_seconds(2 * (every + LATE))
            killed = time.monotonic()
            kill(node)
            pushes.pause()
            with control(node, "grpc") as controller:
                until(running(controller), 20, "the backend runs again")
                missing = pushes.arrived - billed(controller) - lost
            assert missing <= pushes.arrived - pushes.at(killed - every - LATE)
            assert Moved() - missing <= pushes.most - pushes.arrived - spare
            lost += missing


@pytest.mark.slow
def test_a_killed_node_loses_none(node: NodeProcess, home: Place, echo: EchoServer) -> None:
    """Its core goes on, with its counters."""
    with control(node, "grpc") as controller:
        run(controller, [home], [member(ANNA, home)])
    with way(home, ANNA) as port, Pushes(port, echo) as pushes:
        pushes.resume()
        until(lambda: pushes.arrived.up > 50_000, 10, "bytes arrive")
        node.kill_node()
        until(lambda: pushes.arrived.up > 100_000, 10, "more bytes arrive")
        pushes.pause()
        with control(node, "rest") as controller:
            until(lambda: billed(controller) == pushes.arrived, 20, "all are billed, once")
            print(billed(controller), pushes.arrived)
