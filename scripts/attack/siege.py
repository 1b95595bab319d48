"""Run fuzzers against a node while a controller measures its replies."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random

import psutil

from scripts.bench.stage import backing
from scripts.staging.controller import ControllerError, RestController, RpcController
from scripts.staging.node import NodeProcess
from scripts.staging.wait import until

# One case: generates input, sends it, and raises `AssertionError` for a wrong reply.
Attack = Callable[[NodeProcess, Random], None]

WORKERS = 3
# The memory that the node may use, in MiB.
MEMORY = 300
# File descriptors that it may hold afterwards beyond those before (three for each kept gRPC connection), and seconds
# until it must have closed the others.
LEFT, RELEASED = 3 * WORKERS + 4, 40.0
# Marks of an unexpected error in its log.
BAD = ("Traceback", "Unhandled", "#critical")
# Seconds after which a controller gives up.
GIVEN_UP = 20.0
_PAUSE = 0.05
# How often a case is followed by a start of the core, as some cases stop it.
_AGAIN = 0.01


@dataclass
class Report:
    cases: int = 0
    slowest: float = 0.0
    memory: float = 0.0


def siege(node: NodeProcess, attack: Attack, seconds: float, *, cases: float = float("inf"), seed: int = 0) -> Report:
    """Attack for so many seconds or cases. Raises `AssertionError` for a wrong reply.

    Afterwards the node must have closed all connections and logged no unexpected error.
    """
    report, over = Report(), time.monotonic() + seconds
    before = psutil.Process(node.node_pid).num_fds()
    lock = threading.Lock()

    def work(number: int) -> None:
        random = Random(f"{seed}/{number}")
        while time.monotonic() < over and report.cases < cases:
            attack(node, random)
            if random.random() < _AGAIN:
                serve(node)
            with lock:
                report.cases += 1

    with watched(node, report), ThreadPoolExecutor(WORKERS) as pool:
        for worker in [pool.submit(work, number) for number in range(WORKERS)]:
            worker.result()
    until(lambda: psutil.Process(node.node_pid).num_fds() <= before + LEFT, RELEASED, "the connections are released")
    assert not (bad := [line for line in node.lines if any(word in line for word in BAD)]), bad
    return report


@contextmanager
def watched(node: NodeProcess, report: Report) -> Iterator[None]:
    """Inside, call the node over both protocols repeatedly; `report` keeps the slowest reply and the peak memory."""
    with closing(RpcController(node)) as rpc, closing(RestController(node)) as rest, ThreadPoolExecutor(1) as pool:
        over = threading.Event()

        def watch() -> None:
            while not over.wait(_PAUSE):
                report.slowest = max(report.slowest, timed(rpc), timed(rest))
                report.memory = max(report.memory, psutil.Process(node.node_pid).memory_info().rss / 2**20)

        rpc.info()
        watching = pool.submit(watch)
        try:
            yield
        finally:
            over.set()
            watching.result()


def timed(controller: RestController | RpcController) -> float:
    """Seconds until a reply; a broken call is repeated."""
    begun = time.monotonic()
    until(lambda: controller.info().version, GIVEN_UP, "the node replies to a controller")
    return time.monotonic() - begun


@contextmanager
def besieged(directory: Path) -> Iterator[NodeProcess]:
    """A node with a running core and some users."""
    with NodeProcess(directory) as node:
        serve(node)
        yield node


def serve(node: NodeProcess) -> None:
    """Start a core. A refusal is ignored: another call may be in progress."""
    with closing(RpcController(node)) as controller, suppress(ControllerError):
        controller.start(backing(20).request())
