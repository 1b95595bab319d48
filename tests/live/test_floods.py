"""Floods at the node's ports: a controller with the key is answered throughout, and the node does not grow by them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing

import psutil
import pytest

from scripts.attack.floods import FLOODS, flooding
from scripts.staging.controller import RestController, RpcController
from scripts.staging.node import NodeProcess
from scripts.staging.wait import until

# Seconds for a call over gRPC, on a connection that is there, and for one over REST, on a new one. It is less than one
# on a machine that has nothing else to do.
PATIENCE = 5.0
# MiB: of the whole node, and by which it may have grown.
MEMORY, GROWTH = 300, 20


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    with NodeProcess(tmp_path_factory.mktemp("floods")) as running:
        yield running


def memory(node: NodeProcess) -> float:
    return float(psutil.Process(node.pid).memory_info().rss) / 2**20


@pytest.mark.parametrize("kind", [*FLOODS, "idle"])
def test_a_flood(node: NodeProcess, kind: str) -> None:
    """The node hangs up on the flood each time, having taken little, and whoever has the key notices nothing."""
    with closing(RpcController(node)) as rpc, closing(RestController(node)) as rest, rpc.logs() as reader:
        assert rpc.info().version
        assert rest.info().version
        before, worst = memory(node), 0.0
        with flooding(node.grpc_port, kind) as taken, flooding(node.rest_port, kind) as too:
            until(lambda: taken() and too(), 20, "the flood has begun")
            end = time.monotonic() + 2
            while time.monotonic() < end:
                worst = max(worst, timed(rpc), timed(rest))
        assert worst < PATIENCE
        assert not reader.ended
    if kind != "idle":
        assert max(taken() + too()) < 8 * 2**20, "the node took it all"
    assert memory(node) < min(MEMORY, before + GROWTH)
    assert not [line for line in node.lines if "Traceback" in line]


def timed(controller: RpcController | RestController) -> float:
    begun = time.monotonic()
    assert controller.info().version
    return time.monotonic() - begun
