"""Effect of upgrades, or of kills, of the node on users' traffic and on controllers' calls.

`python -m scripts.bench.upgrade [UPGRADES [USERS]]` prints for each core, over UPGRADES (10), each to another version
number: live connections dropped, new ones made and failed, and the slowest; the median from the signal until the new
version is ready; and for each interface, on one connection and on new ones, the calls made and failed. `gap` is the
longest time without a reply around each upgrade: its median, and the longest. `node MiB` is the proportional set size
of the node before the first upgrade, at its peak (with the version that is started beside it), and after the last.

With `--kills N` the node is killed (SIGKILL) N times at random moments instead of the upgrades; the times are from the
kill until the next node is ready.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import signal
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import partial
from pathlib import Path

import psutil

from node.base.errors import NodeError
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
# Seconds at most that a kill waits in addition.
RANDOM = 2.0


class Caller:
    """Calls the node repeatedly, on one connection or on new ones. `took` has the begin and seconds of each call."""

    def __init__(self, on: Stage, kind: type[RestController] | type[RpcController], fresh: bool) -> None:
        self.took: list[tuple[float, float]] = []
        self.failed: list[str] = []
        # The times of replies.
        self.replied: list[float] = []
        self._make = lambda: kind(on.node)
        self._fresh = fresh
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def close(self) -> None:
        self._over.set()
        self._thread.join()

    def gap(self, since: float) -> float:
        """The longest time without a reply since then."""
        later = [since, *(at for at in self.replied if at >= since)]
        return max((after - before for before, after in itertools.pairwise(later)), default=0.0)

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
            self.replied.append(time.monotonic())
        except (ControllerError, NodeError, OSError) as error:
            self.failed.append(str(error))
        self.took.append((begun, time.monotonic() - begun))


@contextmanager
def watching(on: Stage) -> Iterator[list[float]]:
    """Samples of the memory of the node and of a version that is tried or started beside it, in MiB."""
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
        below = psutil.Process(on.node.pid).children(recursive=True)
        return sum(proportional(child) for child in below if child.name().startswith(("python", "twistd")))
    return 0.0


def main(upgrades: int, users: int, kills: int) -> None:
    print(machine())
    what = f"{kills} kills" if kills else f"{upgrades} upgrades"
    print(f"{LIVE} live connections, {users:,} users, {what} of each core's node")
    for name, request in {"Xray": on_xray, "sing-box": on_sing_box}.items():
        with tempfile.TemporaryDirectory() as directory:
            version = Version(Path(directory))
            with stage(PYTHONPATH=str(version.root)) as on:
                steps = [partial(kill, on)] * kills or [
                    partial(upgrade, on, version, f"9.0.{number}") for number in range(upgrades)
                ]
                measure(name, on, request, steps, users)
    print(machine())


def measure(
    name: str,
    on: Stage,
    request: Callable[[int, Crowd, int], Backend],
    steps: Sequence[Callable[[], float]],
    users: int,
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
        for step in steps:
            begun = step()
            took.append(time.monotonic() - begun)
            time.sleep(AROUND)
            for caller, found in zip(callers, gaps, strict=True):
                found.append(caller.gap(begun))
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


def upgrade(on: Stage, version: Version, name: str) -> float:
    """Upgrade the node, and wait until it serves again. Returns when that began."""
    version.name(name)
    words, begun = f"txnode {name} is ready", time.monotonic()
    os.kill(on.node.pid, signal.SIGUSR2)
    until(lambda: any(words in line for line in on.node.lines), 60, words)
    serves(on)
    return begun


def kill(on: Stage) -> float:
    """Kill the node, and wait until the next one serves. Returns when that began."""
    time.sleep(random.uniform(0, RANDOM))
    ready, begun = _ready(on), time.monotonic()
    on.node.kill_node()
    until(lambda: _ready(on) > ready, 60, "the next node is ready")
    serves(on)
    return begun


def serves(on: Stage) -> None:
    def running() -> bool:
        with suppress(ControllerError, NodeError, OSError):
            return on.controller.info().running
        return False

    until(running, 30, "the backend runs")


def _ready(on: Stage) -> int:
    return sum(" is ready: REST" in line for line in on.node.lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser("python -m scripts.bench.upgrade", description=__doc__)
    parser.add_argument("upgrades", nargs="?", type=int, default=UPGRADES)
    parser.add_argument("users", nargs="?", type=int, default=USERS)
    parser.add_argument("--kills", type=int, default=0, metavar="N")
    given = parser.parse_args()
    main(given.upgrades, given.users, given.kills)
