"""Floods of the node's ports: a controller with the key gets replies throughout, and the node's memory is bounded."""

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
from tests.conftest import daily

# Seconds for a call over gRPC, on a kept connection, and for one over REST, on a new one. On an idle machine it is less
# than one.
PATIENCE = 5.0
# MiB: the node's memory, and its growth, at most.
MEMORY, GROWTH = 300, 20


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    with NodeProcess(tmp_path_factory.mktemp("floods")) as running:
        yield running


def memory(node: NodeProcess) -> float:
    return float(psutil.Process(node.node_pid).memory_info().rss) / 2**20


KINDS = [*FLOODS, "idle"]


@pytest.mark.parametrize("kind", daily(KINDS[::2], KINDS))
def test_a_flood(node: NodeProcess, kind: str) -> None:
    """The node closes each flooding connection after few bytes, and controllers are not affected."""
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
