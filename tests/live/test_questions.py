"""Queries about a core while another one replaces it, or while it dies: controllers see no outage."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from scripts.staging.controller import Controller, ControllerError
from scripts.staging.echo import EchoServer
from scripts.staging.node import NodeProcess
from scripts.staging.process import freeze
from tests.conftest import Place, connection, control, member
from tests.live.test_core_faults import WAITING, in_state
from tests.live.test_overlap import ANNA, BERT, Changes, core

# After so many other replies a query is in progress.
LATER = 20


def questions(controller: Controller, email: str) -> list[Callable[[], Any]]:
    return [controller.backend_stats, lambda: controller.online(email), lambda: controller.online_ips(email)]


def test_while_starts_overlap(node: NodeProcess, home: Place, echo: EchoServer) -> None:
    """The old core replies until the next one does."""
    users, changes, states = [member(ANNA, home)], Changes([home]), set[str]()
    with control(node, "rest") as rest, control(node, "grpc") as rpc, control(node, "grpc") as starter:
        starter.stop()
        changes.start(starter, users)
        with connection(home, ANNA, echo), ThreadPoolExecutor(1) as pool:
            # Three times, and on a busy machine, where a question may take longer than a Start, until it was seen.
            for round in range(20):
                if round >= 3 and "starting" in states:
                    break
                changes.next()
                starting = pool.submit(changes.start, starter, users)
                while not starting.done():
                    for ask in (*questions(rest, ANNA.email), *questions(rpc, ANNA.email)):
                        states.add(rest.info().state)
                        ask()
                starting.result()
    assert "starting" in states


@contextmanager
def asked(controller: Controller, other: Controller, ask: Callable[[], Any]) -> Iterator[Future[Any]]:
    """Inside, this call is in progress, as its core is suspended."""
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(ask)
        for _ in range(LATER):
            other.info()
        assert not future.done()
        yield future


def test_core_that_drains_is_killed(node: NodeProcess, home: Place, echo: EchoServer) -> None:
    """A query for online users meanwhile: its connections are gone, the others are returned."""
    users, changes = [member(ANNA, home), member(BERT, home)], Changes([home])
    with control(node, "rest") as controller, control(node, "grpc") as other:
        controller.stop()
        changes.start(controller, users)
        old = core(node)
        with connection(home, ANNA, echo):
            changes.next()
            changes.start(controller, users)
            with connection(home, BERT, echo):
                freeze(old)
                with asked(controller, other, lambda: controller.online(BERT.email)) as answer:
                    os.kill(old, signal.SIGKILL)
                    assert answer.result().value == 1


@pytest.mark.parametrize("number", range(3), ids=["figures", "online", "addresses"])
def test_core_is_killed(node: NodeProcess, home: Place, number: int) -> None:
    """A query meanwhile gets a reply from the next core, or the error that it is starting."""
    with control(node, "grpc") as controller, control(node, "rest") as other:
        controller.stop()
        Changes([home]).start(controller, [member(ANNA, home)])
        freeze(core(node))
        with asked(controller, other, questions(controller, ANNA.email)[number]) as answer:
            os.kill(core(node), signal.SIGKILL)
            if error := answer.exception():
                assert isinstance(error, ControllerError)
                assert error.text.startswith(WAITING)
        in_state(controller, "running")
