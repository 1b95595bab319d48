"""What one user more or less costs on sing-box, by type of inbound, with connections live through the core.

`python -m scripts.bench.sing_box [USERS ...]` prints a table for each build and type: medians of three rounds. `dark`
is the longest time in which nobody could connect meanwhile, tried by one client without a pause; where nothing happens
it is as long as one connection takes. `drops` are those of the live connections that ended.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import psutil

from protos.service_pb2 import User
from scripts.bench.stage import LIVE, Links, answers, machine, timed
from tests.harness import socks
from tests.harness.box import Box, box_of, client
from tests.harness.echo import EchoServer
from tests.harness.sing_box import BUILDS, VLESS, Door, Way, backend, shadowsocks_2022
from tests.harness.users import TestUser

ROUNDS = 3
SIZES = (1, 1_000, 10_000, 50_000)


def main(sizes: list[int]) -> None:
    print(machine())
    with EchoServer() as echo, tempfile.TemporaryDirectory() as work:
        for build in BUILDS:
            directory = Path(work) / build
            directory.mkdir()
            with box_of(build, directory) as box:
                for way in (shadowsocks_2022(), VLESS):
                    table(box, way, echo, sizes)


def table(box: Box, way: Way, echo: EchoServer, sizes: list[int]) -> None:
    print(f"\n{way.name}, sing-box {BUILDS[box.build].label}; ms, {LIVE} live connections")
    columns = ("users", "Start", "RSS MiB", "added", "dark", "drops", "changed", "drops", "removed", "drops")
    print(" ".join(f"{name:>8}" for name in columns))
    for size in sizes:
        print(" ".join(f"{figure:>8.0f}" for figure in (size, *row(box, way, echo, size))), flush=True)


def row(box: Box, way: Way, echo: EchoServer, size: int) -> list[float]:
    door, live = Door(way), TestUser.new("live")
    users = [door.user(live), *(door.user(TestUser.new(f"{number}.user")) for number in range(1, size))]
    starts = []
    for _ in range(ROUNDS):
        box.controller.stop()
        starts.append(timed(lambda: box.controller.start(backend(door.inbounds, users))))
    (core,) = box.node.core_pids()
    memory = psutil.Process(core).memory_info().rss / 2**20
    with client((door, live)) as (proxy,):
        darkness: list[float] = []

        def add(number: int) -> float:
            with dark(proxy, echo) as found:
                seconds = sync(box, door.user(TestUser.new(f"{number}.new")))
            darkness.extend(found)
            return seconds

        added = each(proxy, echo, add)
        changed = each(proxy, echo, lambda number: sync(box, door.user(TestUser.new(f"{number}.new"))))
        removed = each(proxy, echo, lambda number: sync(box, User(email=f"{number}.new")))
    first = [1000 * statistics.median(starts), memory]
    return [*first, added[0], 1000 * statistics.median(darkness), added[1], *changed, *removed]


def sync(box: Box, user: User) -> float:
    return timed(lambda: box.controller.sync_user(user))


def each(proxy: int, echo: EchoServer, work: Callable[[int], float]) -> tuple[float, float]:
    """Medians: milliseconds, and how many live connections ended."""
    took, drops = [], []
    for number in range(ROUNDS):
        with Links(proxy, echo) as links:
            took.append(1000 * work(number))
            drops.append(links.drops())
    return statistics.median(took), statistics.median(drops)


@contextmanager
def dark(proxy: int, echo: EchoServer) -> Iterator[list[float]]:
    """The longest time between two connections that came about, in the list at the end of the block."""
    found: list[float] = []
    over, seen = threading.Event(), [time.perf_counter()]

    def knock() -> None:
        end = float("inf")
        while seen[-1] < end:
            try:
                with socks.connect(proxy, echo.host, echo.port, timeout=0.05) as link:
                    if answers(link):
                        seen.append(time.perf_counter())
            except OSError:
                pass
            time.sleep(0.002)
            if over.is_set():
                end = min(end, time.perf_counter())

    thread = threading.Thread(target=knock)
    thread.start()
    try:
        yield found
    finally:
        over.set()
        thread.join()
        found.append(max(after - before for before, after in pairwise(seen)))


if __name__ == "__main__":
    main([int(word) for word in sys.argv[1:]] or list(SIZES))
