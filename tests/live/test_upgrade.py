"""The node becomes another version of itself while users are connected: nobody is dropped, and nothing is lost."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from pathlib import Path

import pytest

from scripts.staging import transfer
from scripts.staging.controller import RestController, RpcController, traffic
from scripts.staging.echo import EchoServer
from scripts.staging.inbounds import Kind
from scripts.staging.node import NodeProcess
from scripts.staging.process import Child
from scripts.staging.users import TestUser
from scripts.staging.wait import until
from tests.conftest import Place, connection, gets_in, member, run, stays_out, talking
from tests.harness.grounds import Ground

ANNA, BERT, CARL = (TestUser.new(f"{name}@test") for name in ("anna", "bert", "carl"))
GOES_ON = "goes on with the core"


class RealNode(NodeProcess):
    """Not a copy of an interpreter: what it was run as it can be run as again."""

    child = Child


@pytest.fixture
def real(tmp_path: Path) -> Iterator[NodeProcess]:
    with RealNode(tmp_path) as node:
        yield node


@pytest.fixture
def home(all_kinds: Mapping[str, Kind], ground: Ground) -> Place:
    if ground.name != "xray":
        pytest.skip("xray only")
    return Place(all_kinds["vless-raw"], "home", ground=ground)


def said(node: NodeProcess, words: str) -> int:
    """How often the node has said so."""
    return sum(words in line for line in node.lines)


def upgrade(node: NodeProcess, times: int = 1) -> None:
    """Have it become itself, and wait until it has."""
    pid = node.pid
    for _ in range(times):
        before = said(node, "is ready")
        os.kill(pid, signal.SIGUSR2)
        until(lambda: said(node, "is ready") > before, 30, "the node is ready again")
    assert node.pid == pid


def test_nobody_is_dropped(real: NodeProcess, home: Place, echo: EchoServer) -> None:
    """Connections carry bytes all the while, the core is the same process, its users are as they were."""
    with closing(RestController(real)) as controller:
        run(controller, [home], [member(ANNA, home), member(BERT, home)])
        core = real.newest_core()
        with connection(home, ANNA, echo) as link, talking(link):
            upgrade(real, 3)
            assert real.core_pids() == [core]
            assert controller.info().state == "running"
        assert gets_in(home, BERT, echo) and stays_out(home, CARL, echo)
        controller.sync_user(member(CARL, home), member(BERT))
        assert gets_in(home, CARL, echo) and stays_out(home, BERT, echo)
        assert real.core_pids() == [core]
