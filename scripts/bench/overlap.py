"""Cost of a changed configuration under traffic: with a new core beside the old one (overlap), and with a restart.

`python -m scripts.bench.overlap [USERS ...]` prints a table for each core: medians of three rounds. `in force` is the
time from the call of Start to its reply, after which new connections use the other configuration; `longest` is the
slowest new connection around it, of all rounds. `failed` counts new connections that failed, `dropped` live ones that
ended, both of all rounds. `one` is the memory of the single core before, `peak` the highest sum of all cores at once
(proportional set sizes). The last two columns are processor time from call to reply, of the node and of all its cores,
which serve meanwhile.
"""

from __future__ import annotations

import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import psutil

from protos.service_pb2 import SING_BOX, XRAY, Backend
from scripts.bench.stage import KIND, LIVE, Crowd, Stage, machine, processor, stage, timed
from scripts.staging import sing_box
from scripts.staging.activity import Activity, Opened
from scripts.staging.backend import backend_config
from scripts.staging.core import Json, XrayClient, server_config
from scripts.staging.ports import free_port

ROUNDS = 3
SIZES = (1_000, 10_000, 50_000)
TAG = "in-0"
# Concurrent clients, each with a part of the live connections, and seconds between two new connections of each.
WORKERS = 4
PAUSE = 0.02
# Seconds of traffic before and after a change, and between two samples of the memory.
AROUND = 1.0
LOOK = 0.1
# The node's settings for each way of changing.
WAYS = {"beside": {}, "restart": {"DRAIN_GENERATIONS": "0"}}


class Round(NamedTuple):
    """Figures of one change: seconds, counts, MiB, and processor seconds."""

    in_force: float
    longest: float
    failed: int
    dropped: int
    one: float
    peak: float
    node: float
    cores: float


def main(sizes: list[int]) -> None:
    print(machine())
    for name, request in {"Xray": on_xray, "sing-box": on_sing_box}.items():
        print(f"\n{name}; {LIVE} live connections, {ROUNDS} rounds")
        columns = ("users", "", "in force ms", "longest ms", "failed", "dropped", "one MiB", "peak MiB")
        print(" ".join(f"{column:>11}" for column in (*columns, "node CPU ms", "core CPU ms")))
        for size in sizes:
            for way, settings in WAYS.items():
                with stage(**settings) as on:
                    row(way, size, [change(on, size, request) for _ in range(ROUNDS)])
    print(machine())


def row(way: str, size: int, rounds: list[Round]) -> None:
    middle = Round(*map(statistics.median, zip(*rounds, strict=True)))
    opened = 1000 * middle.in_force, 1000 * max(each.longest for each in rounds)
    lost = sum(each.failed for each in rounds), sum(each.dropped for each in rounds)
    figures = *opened, *lost, middle.one, middle.peak, 1000 * middle.node, 1000 * middle.cores
    print(f"{size:>11} {way:>11} " + " ".join(f"{figure:>11.0f}" for figure in figures), flush=True)


def change(on: Stage, size: int, request: Callable[[int, Crowd, int], Backend]) -> Round:
    """Change an outbound under traffic, from a fresh core."""
    on.controller.stop()
    crowd, port = Crowd(size, [TAG]), free_port()
    on.controller.start(request(port, crowd, 0))
    with working(on, crowd, port) as workers, watching(on) as looks:
        time.sleep(AROUND)
        one = looks[-1]
        used = spent(on)
        begun = time.monotonic()
        in_force = timed(lambda: on.controller.start(request(port, crowd, 1)))
        now = spent(on)
        time.sleep(AROUND)
        for worker in workers:
            worker.rest()
    slowest = max((opened.took for worker in workers for opened in around(worker, begun)), default=0.0)
    lost = sum(len(worker.failed) for worker in workers), sum(len(worker.dropped) for worker in workers)
    return Round(in_force, slowest, *lost, one, max(looks), now[0] - used[0], now[1] - used[1])


def around(worker: Activity, begun: float) -> list[Opened]:
    """The new connections that were being opened at this time or later."""
    return [opened for opened in worker.opened if opened.begun + opened.took >= begun]


@contextmanager
def working(on: Stage, crowd: Crowd, port: int) -> Iterator[list[Activity]]:
    proxies = [free_port() for _ in range(WORKERS)]
    with XrayClient({proxy: KIND.outbound(port, crowd.live) for proxy in proxies}), ExitStack() as stack:
        share = LIVE // WORKERS
        yield [stack.enter_context(Activity(proxy, on.echo, share, PAUSE)) for proxy in proxies]


@contextmanager
def watching(on: Stage) -> Iterator[list[float]]:
    """Samples of the memory of all cores of the node, in MiB."""
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
    # While a node starts, it looks like a core.
    with suppress(AssertionError, psutil.NoSuchProcess):
        return sum(map(proportional, cores(on)))
    return 0.0


def cores(on: Stage) -> list[psutil.Process]:
    """The children of the keeper without the node."""
    return [child for child in psutil.Process(on.node.pid).children() if child.pid != on.node.node_pid]


def proportional(process: psutil.Process) -> float:
    """Proportional set size of a process in MiB (proc(5)); 0 if it has ended."""
    with suppress(OSError):
        rows = Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines()
        return next((int(row.split()[1]) / 1024 for row in rows if row.startswith("Pss:")), 0.0)
    return 0.0


def spent(on: Stage) -> tuple[float, float]:
    """Processor seconds of the node, and of all its cores, ended ones included."""
    ended = psutil.Process(on.node.pid).cpu_times()
    used = ended.children_user + ended.children_system
    for core in cores(on):
        with suppress(psutil.NoSuchProcess):
            used += processor(core.pid)
    return processor(on.node.node_pid), float(used)


def on_xray(port: int, crowd: Crowd, number: int) -> Backend:
    inbounds = [KIND.inbound(port, TAG)]
    outbounds = server_config(inbounds)["outbounds"]
    other = {"tag": f"new-{number}", "protocol": "freedom"}
    return Backend(type=XRAY, config=backend_config(inbounds, outbounds=[*outbounds, other]), users=crowd.users)


def on_sing_box(port: int, crowd: Crowd, number: int) -> Backend:
    outbounds = [{"type": "direct", "tag": "direct"}, {"type": "direct", "tag": f"new-{number}"}]
    inbound: Json = {"type": "vless", "tag": TAG, "listen": "127.0.0.1", "listen_port": port}
    return Backend(type=SING_BOX, config=sing_box.config([inbound], outbounds=outbounds), users=crowd.users)


if __name__ == "__main__":
    main([int(word) for word in sys.argv[1:]] or list(SIZES))
