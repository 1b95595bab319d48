"""A node under attack: attackers at work on one side, on the other a controller who must not notice."""

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

# One case: makes something up, sends it, and raises `AssertionError` for an answer that must not be.
Attack = Callable[[NodeProcess, Random], None]

WORKERS = 3
# MiB of the whole node.
MEMORY = 300
# Descriptors that it may have more afterwards, three for each connection that an attacker over gRPC keeps, and seconds
# until it has let go of the others.
LEFT, RELEASED = 3 * WORKERS + 4, 40.0
# What stands in its log when something went wrong that it did not expect.
BAD = ("Traceback", "Unhandled", "#critical")
# Seconds after which a controller gives up.
GIVEN_UP = 20.0
_PAUSE = 0.05
# How often, after an attack, a core is started: some of the attacks stop it.
_AGAIN = 0.01


@dataclass
class Report:
    cases: int = 0
    slowest: float = 0.0
    memory: float = 0.0


def siege(node: NodeProcess, attack: Attack, seconds: float, *, cases: float = float("inf"), seed: int = 0) -> Report:
    """Attack for so many seconds, or until there were so many cases. Raises `AssertionError` if an answer is wrong.

    Afterwards the node must have let go of all connections, and have noted no fault of its own.
    """
    report, over = Report(), time.monotonic() + seconds
    before = psutil.Process(node.pid).num_fds()
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
    until(lambda: psutil.Process(node.pid).num_fds() <= before + LEFT, RELEASED, "the connections are released")
    assert not (bad := [line for line in node.lines if any(word in line for word in BAD)]), bad
    return report


@contextmanager
def watched(node: NodeProcess, report: Report) -> Iterator[None]:
    """Inside, a controller asks over both protocols again and again, and the node's memory is looked at."""
    with closing(RpcController(node)) as rpc, closing(RestController(node)) as rest, ThreadPoolExecutor(1) as pool:
        over = threading.Event()

        def watch() -> None:
            while not over.wait(_PAUSE):
                report.slowest = max(report.slowest, timed(rpc), timed(rest))
                report.memory = max(report.memory, psutil.Process(node.pid).memory_info().rss / 2**20)

        rpc.info()
        watching = pool.submit(watch)
        try:
            yield
        finally:
            over.set()
            watching.result()


def timed(controller: RestController | RpcController) -> float:
    """Seconds until the answer; a connection that breaks is made again."""
    begun = time.monotonic()
    until(lambda: controller.info().version, GIVEN_UP, "a controller is answered")
    return time.monotonic() - begun


@contextmanager
def besieged(directory: Path) -> Iterator[NodeProcess]:
    """A node with a core that runs, and some users."""
    with NodeProcess(directory) as node:
        serve(node)
        yield node


def serve(node: NodeProcess) -> None:
    """Start a core. Another call may be in its way."""
    with closing(RpcController(node)) as controller, suppress(ControllerError):
        controller.start(backing(20).request())
