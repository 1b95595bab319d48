"""Cost of adding, changing and removing a user on sing-box, by type of inbound, with live connections.

`python -m scripts.bench.sing_box [USERS ...]` prints a table for each build and type: medians of three rounds. `dark`
is the longest time without a successful connection, tried by one client without a pause; without an interruption it is
the duration of one connection. `drops` counts live connections that ended.
"""

from __future__ import annotations

import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise

import psutil

from protos.service_pb2 import User
from scripts.bench.stage import LIVE, Links, Stage, answers, machine, stage, timed
from scripts.staging import socks
from scripts.staging.echo import EchoServer
from scripts.staging.ports import free_port
from scripts.staging.sing_box import BUILDS, VLESS, Door, SingBoxClient, Way, backend, find_sing_box, shadowsocks_2022
from scripts.staging.users import TestUser

ROUNDS = 3
SIZES = (1, 1_000, 10_000, 50_000)


def main(sizes: list[int]) -> None:
    print(machine())
    for build, core in BUILDS.items():
        executable = find_sing_box(build)
        with stage(SING_BOX_EXECUTABLE_PATH=str(executable)) as on:
            on.node.core = executable.resolve()
            for way in (shadowsocks_2022(), VLESS):
                print(f"\n{way.name}, {core.label}; ms, {LIVE} live connections")
                table(on, way, sizes)


def table(on: Stage, way: Way, sizes: list[int]) -> None:
    columns = ("users", "Start", "RSS MiB", "added", "dark", "drops", "changed", "drops", "removed", "drops")
    print(" ".join(f"{name:>8}" for name in columns))
    for size in sizes:
        print(" ".join(f"{figure:>8.0f}" for figure in (size, *row(on, way, size))), flush=True)


def row(on: Stage, way: Way, size: int) -> list[float]:
    door, live = Door(way), TestUser.new("live")
    users = [door.user(live), *(door.user(TestUser.new(f"{number}.user")) for number in range(1, size))]
    starts = []
    for _ in range(ROUNDS):
        on.controller.stop()
        starts.append(timed(lambda: on.controller.start(backend(door.inbounds, users))))
    memory = psutil.Process(on.core).memory_info().rss / 2**20
    proxy = free_port()
    with SingBoxClient({proxy: door.outbounds(live)}):
        darkness: list[float] = []

        def add(number: int) -> float:
            with dark(proxy, on.echo) as found:
                seconds = sync(on, door.user(TestUser.new(f"{number}.new")))
            darkness.extend(found)
            return seconds

        added = each(proxy, on.echo, add)
        changed = each(proxy, on.echo, lambda number: sync(on, door.user(TestUser.new(f"{number}.new"))))
        removed = each(proxy, on.echo, lambda number: sync(on, User(email=f"{number}.new")))
    first = [1000 * statistics.median(starts), memory]
    return [*first, added[0], 1000 * statistics.median(darkness), added[1], *changed, *removed]


def sync(on: Stage, user: User) -> float:
    return timed(lambda: on.controller.sync_user(user))


def each(proxy: int, echo: EchoServer, work: Callable[[int], float]) -> tuple[float, float]:
    """Medians of milliseconds and of the number of live connections that ended."""
    took, drops = [], []
    for number in range(ROUNDS):
        with Links(proxy, echo) as links:
            took.append(1000 * work(number))
            drops.append(links.drops())
    return statistics.median(took), statistics.median(drops)


@contextmanager
def dark(proxy: int, echo: EchoServer) -> Iterator[list[float]]:
    """Connect repeatedly inside; at the end, append the longest time between two successes to the list."""
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
