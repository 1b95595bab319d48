"""Effect of upgrading the node in place on users' traffic and on controllers' calls.

`python -m scripts.bench.upgrade [UPGRADES [USERS]]` prints for each core, over UPGRADES (10), each to another version
number: live connections dropped, new ones made and failed, and the slowest; the median from the signal until the new
version is ready; and for each interface, on one connection and on new ones, the calls made and failed. `gap` is the
median of the longest call in each upgrade. `node MiB` is the proportional set size of the node before the first
upgrade, at its peak (with the version that is tried beside it), and after the last.
"""

from __future__ import annotations

import os
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path

import psutil

from node.errors import NodeError
from protos.service_pb2 import Backend
from scripts.bench.overlap import TAG, on_sing_box, on_xray, proportional, working
from scripts.bench.stage import LIVE, Crowd, Stage, machine, stage
from scripts.staging.controller import ControllerError, RestController, RpcController
from scripts.staging.ports import free_port
from scripts.staging.version import Version
from scripts.staging.wait import until

UPGRADES = 10
USERS = 1000
# Seconds of traffic around each upgrade, between two calls, and between two samples of the memory.
AROUND, PAUSE, LOOK = 1.0, 0.01, 0.02


class Caller:
    """Calls the node repeatedly, on one connection or on new ones. `took` has the begin and seconds of each call."""

    def __init__(self, on: Stage, kind: type[RestController] | type[RpcController], fresh: bool) -> None:
        self.took: list[tuple[float, float]] = []
        self.failed: list[str] = []
        self._make = lambda: kind(on.node)
        self._fresh = fresh
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def close(self) -> None:
        self._over.set()
        self._thread.join()

    def longest(self, since: float) -> float:
        return max((took for begun, took in self.took if begun + took >= since), default=0.0)

    def _run(self) -> None:
        with closing(self._make()) as one:
            while not self._over.wait(PAUSE):
                if not self._fresh:
                    self._call(one)
                    continue
                with closing(self._make()) as other:
                    self._call(other)

    def _call(self, controller: RestController | RpcController) -> None:
        begun = time.monotonic()
        try:
            controller.info()
        except (ControllerError, NodeError, OSError) as error:
            self.failed.append(str(error))
        self.took.append((begun, time.monotonic() - begun))


@contextmanager
def watching(on: Stage) -> Iterator[list[float]]:
    """Samples of the memory of the node and of a version that it tries beside it, in MiB."""
    looks, over = [memory(on)], threading.Event()

    def look() -> None:
        while not over.wait(LOOK):
            looks.append(memory(on))

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield looks
    finally:
        over.set()
        thread.join()


def memory(on: Stage) -> float:
    with suppress(psutil.NoSuchProcess):
        node = psutil.Process(on.node.pid)
        tried = [child for child in node.children() if child.name().startswith(("python", "twistd"))]
        return sum(map(proportional, [node, *tried]))
    return 0.0


def main(upgrades: int, users: int = USERS) -> None:
    print(machine())
    print(f"{LIVE} live connections, {users:,} users, {upgrades} upgrades of each core's node")
    for name, request in {"Xray": on_xray, "sing-box": on_sing_box}.items():
        with tempfile.TemporaryDirectory() as directory:
            version = Version(Path(directory))
            with stage(PYTHONPATH=str(version.root)) as on:
                measure(name, on, version, request, upgrades, users)
    print(machine())


def measure(
    name: str, on: Stage, version: Version, request: Callable[[int, Crowd, int], Backend], upgrades: int, users: int
) -> None:
    crowd, port = Crowd(users, [TAG]), free_port()
    on.controller.start(request(port, crowd, 0))
    ways = [(kind, fresh) for kind in (RestController, RpcController) for fresh in (False, True)]
    with ExitStack() as stack:
        workers = stack.enter_context(working(on, crowd, port))
        looks = stack.enter_context(watching(on))
        callers = [stack.enter_context(closing(Caller(on, *way))) for way in ways]
        time.sleep(AROUND)
        first, took, gaps = looks[-1], [], [list[float]() for _ in callers]
        for number in range(upgrades):
            begun = time.monotonic()
            upgrade(on, version, f"9.0.{number}")
            took.append(time.monotonic() - begun)
            time.sleep(AROUND)
            for caller, found in zip(callers, gaps, strict=True):
                found.append(caller.longest(begun))
        for worker in workers:
            worker.rest()
    opened = [each for worker in workers for each in worker.opened]
    print(f"\n{name}: dropped {sum(len(worker.dropped) for worker in workers)} of {LIVE} live connections;", end=" ")
    print(f"{len(opened):,} new, failed {sum(len(worker.failed) for worker in workers)},", end=" ")
    print(f"slowest {1000 * max(each.took for each in opened):.0f} ms; ready after {statistics.median(took):.2f} s;")
    print(f"node MiB {first:.0f} before, {max(looks):.0f} at most, {looks[-1]:.0f} after")
    for (kind, fresh), caller, found in zip(ways, callers, gaps, strict=True):
        way = f"{kind.__name__.removesuffix('Controller'):>4}, {'new connections' if fresh else 'one connection'}"
        calls = f"{len(caller.took):,} calls, {len(caller.failed)} failed"
        print(f"{way:>22}: {calls}; gap {statistics.median(found):.2f} s, longest {max(found):.2f} s")
        for fault in sorted(set(caller.failed))[:3]:
            print(f"{'':>24}{fault[:160]}")


def upgrade(on: Stage, version: Version, name: str) -> None:
    version.name(name)
    words = f"txnode {name} is ready"
    os.kill(on.node.pid, signal.SIGUSR2)
    until(lambda: any(words in line for line in on.node.lines), 60, words)
    until(lambda: not on.controller.info().state.startswith("start"), 30, "the backend runs")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:] or [str(UPGRADES)]))
