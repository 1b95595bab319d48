"""Kills of the node at random moments of everything it does, under users' traffic.

`python -m scripts.bench.kills [KILLS [CORE ...]]` (100; xray and sing-box, or the path of a sing-box) kills the node of
each core KILLS times (SIGKILL). The moments are chosen at random: while the next node starts (a kill just before), in a
Start (overlap, probation), an upgrade, a change of users that is being written, and at rest. It prints live connections
dropped, new ones made and failed, the bytes that users moved and those that the node reported, the cores that are left
after a Stop, and how often each moment was met. Seconds are those until the node serves again: median, and longest.
"""

from __future__ import annotations

import os
import random
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from node.base.errors import NodeError
from protos.service_pb2 import Backend, UsersStat
from scripts.bench.overlap import TAG, cores, on_sing_box, on_xray, working
from scripts.bench.stage import LIVE, Crowd, Stage, machine, stage
from scripts.bench.upgrade import serves
from scripts.staging.controller import ControllerError, traffic
from scripts.staging.ports import free_port
from scripts.staging.version import Version
from scripts.staging.wait import until

KILLS, USERS = 100, 1000
# Seconds: of calm before each moment, and between what begins and the kill.
CALM, WITHIN = 0.5, 1.5

Request = Callable[[int, Crowd, int], Backend]


class Moments:
    """What the node is doing when it is killed."""

    def __init__(self, on: Stage, version: Version, request: Request, crowd: Crowd, port: int) -> None:
        self._on = on
        self._version = version
        self._request = request
        self._crowd = crowd
        self._port = port
        self._number = 0
        self._threads: list[threading.Thread] = []

    def at_rest(self) -> None:
        pass

    def start(self) -> None:
        """A Start with another configuration: a new core beside the old one, and its probation."""
        self._number += 1
        request = self._request(self._port, self._crowd, self._number)
        self._meanwhile(lambda: self._on.controller.start(request))

    def upgrade(self) -> None:
        self._number += 1
        self._version.name(f"9.0.{self._number}")
        os.kill(self._on.node.pid, signal.SIGUSR2)

    def users(self) -> None:
        """A change of a tenth of the users, and its write to the disk."""
        users = self._crowd.change(USERS // 10)
        self._meanwhile(lambda: self._on.controller.sync_users(self._crowd.users) if users else None)

    def another_kill(self) -> None:
        """The start of the next node."""
        with suppress(AssertionError, ProcessLookupError):
            self._on.node.kill_node()

    def rest(self) -> None:
        for thread in self._threads:
            thread.join()
        self._threads = []

    def _meanwhile(self, call: Callable[[], object]) -> None:
        def ask() -> None:
            with suppress(ControllerError, NodeError, OSError):
                call()

        self._threads.append(threading.Thread(target=ask))
        self._threads[-1].start()


def main(kills: int, names: list[str]) -> None:
    print(machine())
    print(f"{LIVE} live connections, {USERS:,} users, {kills} kills of each core's node")
    for name in names:
        own = {} if name in ("xray", "sing-box") else {"SING_BOX_EXECUTABLE_PATH": name}
        with tempfile.TemporaryDirectory() as directory:
            version = Version(Path(directory))
            with stage(PYTHONPATH=str(version.root), **own) as on:
                measure(name, on, version, on_xray if name == "xray" else on_sing_box, kills)
    print(machine())


def measure(name: str, on: Stage, version: Version, request: Request, kills: int) -> None:
    crowd, port = Crowd(USERS, [TAG]), free_port()
    on.controller.start(request(port, crowd, 0))
    moments, met, took = Moments(on, version, request, crowd, port), Counter[str](), list[float]()
    ways = (moments.at_rest, moments.start, moments.upgrade, moments.users, moments.another_kill)
    with working(on, crowd, port) as workers:
        for _ in range(kills):
            time.sleep(random.uniform(0, CALM))
            way = random.choice(ways)
            way()
            time.sleep(random.uniform(0, WITHIN))
            until(lambda: killed(on), 60, "there is a node to kill")
            begun = time.monotonic()
            serves(on)
            took.append(time.monotonic() - begun)
            moments.rest()
            met[way.__name__] += 1
        for worker in workers:
            worker.rest()
        until(lambda: on.controller.info().running, 30, "the backend runs")
        time.sleep(2)  # the last bytes are on their way to the counters
        reported = traffic(on.controller.stats(UsersStat)).get(crowd.live.email, {})
    opened = sum(len(worker.opened) for worker in workers)
    failed = [fault for worker in workers for fault in worker.failed]
    print(f"\n{name}: dropped {sum(len(worker.dropped) for worker in workers)} of {LIVE} live connections;", end=" ")
    print(f"{opened:,} new, failed {len(failed)}; served after {statistics.median(took):.2f}, {max(took):.2f} s")
    print(f"bytes moved {on.echo.received:,} up, {on.echo.sent:,} down; reported {reported}")
    on.controller.stop()
    until(lambda: not cores(on), 60, "no core is left")
    print(f"cores left {len(cores(on))}; moments {dict(met)}")
    for fault in failed[:5]:
        print(f"{'':>4}{fault}")


def killed(on: Stage) -> bool:
    with suppress(AssertionError, ProcessLookupError):
        on.node.kill_node()
        return True
    return False


if __name__ == "__main__":
    main(int(sys.argv[1]) if sys.argv[1:] else KILLS, sys.argv[2:] or ["xray", "sing-box"])
