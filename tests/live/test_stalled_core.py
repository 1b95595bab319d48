"""A core that does not reply for some seconds: the node never confirms what the core did not do, and then does it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from scripts.staging.controller import Controller, ControllerError
from scripts.staging.echo import EchoServer
from scripts.staging.node import NodeProcess
from scripts.staging.process import freeze
from scripts.staging.users import TestUser
from scripts.staging.wait import until
from tests.conftest import Place, gets_in, live, member, over, run, stays_out

ANNA, BERT = (TestUser.new(f"{name}@test") for name in ("anna", "bert"))
# Seconds: longer than the timeout of a call to the core, shorter than the time after which the node ends it.
STALL = 7.0


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    """Without another run beside the suspended one, so that this one applies the change in the end."""
    with NodeProcess(tmp_path_factory.mktemp("node"), DRAIN_GENERATIONS="0") as running:
        yield running


@contextmanager
def stalled(node: NodeProcess) -> Iterator[int]:
    """Suspend the core inside the block."""
    [core] = node.core_pids()
    freeze(core)
    try:
        yield core
    finally:
        os.kill(core, signal.SIGCONT)


def succeeds(call: Callable[[], object]) -> bool:
    try:
        call()
    except ControllerError:
        return False
    return True


def removes(node: NodeProcess, home: Place, echo: EchoServer, call: Callable[[], object]) -> None:
    """The call removes Anna from a suspended core: it does not succeed before she is cut, which happens soon."""
    with ThreadPoolExecutor(1) as pool:
        with stalled(node) as core:
            began = time.monotonic()
            said = pool.submit(succeeds, call)
            until(lambda: said.done() or time.monotonic() > began + STALL, STALL + 1, "its time is over")
            assert not (said.done() and said.result()), "it was confirmed by a core that stands still"
        said.result()
    until(lambda: stays_out(home, ANNA, echo), 10, "who was removed is out")
    assert gets_in(home, BERT, echo)
    assert node.core_pids() == [core]


@over("rest")
def test_one_who_is_removed(node: NodeProcess, home: Place, echo: EchoServer, controller: Controller) -> None:
    """SyncUser does not confirm an unapplied removal. It is applied soon, and the repeated call succeeds."""
    run(controller, [home], [member(ANNA, home), member(BERT, home)])
    removes(node, home, echo, lambda: controller.sync_user(member(ANNA)))
    controller.sync_user(member(ANNA))
    assert stays_out(home, ANNA, echo)


@pytest.mark.slow
@live
@over("grpc")
def test_a_start_without_one(node: NodeProcess, home: Place, echo: EchoServer, controller: Controller) -> None:
    """Nor does a Start that keeps the running core, which fails then."""
    run(controller, [home], [member(ANNA, home), member(BERT, home)])
    removes(node, home, echo, lambda: run(controller, [home], [member(BERT, home)]))
    run(controller, [home], [member(BERT, home)])
    assert stays_out(home, ANNA, echo)
