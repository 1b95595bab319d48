"""How many users fit on a small host: node and cores in a memory cgroup, and what happens beyond. Needs root.

`python -m scripts.bench.fits [--memory 512] [USERS ...]` runs a node for each number of users and each protocol, in a
cgroup without swap. A controller starts the users, of whom 1,000 connect; it sends another configuration (a second
core beside the first), a list with a hundredth of the users changed, and reads all statistics; then the node is
upgraded, the node is killed (SIGKILL), and the core. The columns have the seconds of each step, or `failed`; after a
step that fails there is no other. `dropped` counts the connections of 200 that ended before the core was killed, `OOM`
the processes that the kernel ended for lack of memory. The peaks are those of the cgroup, with the kernel's memory and
cached files, and of what the node and the cores have (proportional set sizes). Below a row are an error, and warnings
and log lines about memory.
"""

from __future__ import annotations

import argparse
import os
import signal
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Self

from node.base.errors import NodeError
from protos.service_pb2 import UsersStat
from scripts.bench import overlap, upgrade
from scripts.bench.confined import confined
from scripts.bench.load import Load, loading
from scripts.bench.overlap import TAG, on_xray
from scripts.bench.stage import KIND, LIVE, Crowd, Links, Stage, first_byte, machine, stage, timed
from scripts.staging.controller import ControllerError, RestController, RpcController
from scripts.staging.core import XrayClient
from scripts.staging.ports import free_port
from scripts.staging.version import Version

SIZES = (10_000, 20_000, 30_000, 50_000, 100_000, 150_000)
MEMORY, CONNECTED = 512, 1_000
STEPS = ("Start", "connect", "change", "sync", "stats", "upgrade", "kill node", "kill core")
# Seconds of a call at most.
_DEADLINE = 120.0
Kind = type[RestController] | type[RpcController]


class Host:
    """A node with so many users, and their connections."""

    def __init__(self, on: Stage, kind: Kind, version: Version, load: Load, size: int) -> None:
        self.on, self._version, self._load = on, version, load
        self._controller = kind(on.node, deadline=_DEADLINE)
        self._crowd, self._port, self._proxy = Crowd(size, [TAG], steady=CONNECTED), free_port(), free_port()
        self._stack = ExitStack()
        self._links: Links | None = None
        self.dropped = LIVE

    def __enter__(self) -> Self:
        self._stack.enter_context(closing(self._controller))
        self._stack.enter_context(XrayClient({self._proxy: KIND.outbound(self._port, self._crowd.live)}))
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def steps(self) -> Mapping[str, Callable[[], object]]:
        return {
            "Start": lambda: self._start(0),
            "connect": self._connect,
            "change": lambda: self._start(1),
            "sync": self._sync,
            "stats": lambda: self._controller.stats(UsersStat),
            "upgrade": lambda: upgrade.upgrade(self.on, self._version, "9.0.1"),
            "kill node": self._kill_node,
            "kill core": self._kill_core,
        }

    def _start(self, number: int) -> None:
        try:
            self._controller.start(on_xray(self._port, self._crowd, number))
        except ControllerError as error:
            if "continues in the background" not in error.text:
                raise
            upgrade.serves(self.on)

    def _connect(self) -> None:
        self._load.open([user.proxies.vless.id for user in self._crowd.users[1:CONNECTED]], self._port)
        self._links = self._stack.enter_context(Links(self._proxy, self.on.echo))

    def _sync(self) -> None:
        self._crowd.change(len(self._crowd.users) // 100)
        self._controller.sync_users(self._crowd.users)

    def _kill_node(self) -> None:
        self.on.node.kill_node()
        upgrade.serves(self.on)

    def _kill_core(self) -> None:
        assert self._links
        self.dropped = self._links.drops()
        os.kill(self.on.core, signal.SIGKILL)
        first_byte(self._port, self._proxy, self.on.echo)


def main(memory: int, sizes: Sequence[int]) -> None:
    print(machine())
    print(f"{memory} MiB, {LIVE} live connections, and {CONNECTED:,} of other users; seconds of each step")
    columns = (*STEPS, "dropped", "OOM", "peak MiB", "node MiB", "cores MiB")
    print(f"{'users':>13}" + " ".join(f"{column:>9}" for column in columns), flush=True)
    for size in sizes:
        for kind in (RpcController, RestController):
            row(size, kind, memory)
    print(machine())


def row(size: int, kind: Kind, memory: int) -> None:
    """Measure one number of users over one protocol, and print it."""
    with confined(memory * 2**20) as group, tempfile.TemporaryDirectory() as directory:
        version = Version(Path(directory))
        with stage(TRAFFIC_INTERVAL="", PYTHONPATH=str(version.root), through=group.through) as on:
            looks = upgrade.watching(on), overlap.watching(on)
            with looks[0] as nodes, looks[1] as cores, loading() as load, Host(on, kind, version, load, size) as host:
                took, notes = taken(host.steps())
            peaks = group.peak() / 2**20, max(nodes), max(cores)
            notes += told(on)
        figures = [*(took.get(step, "") for step in STEPS), host.dropped, group.kills(), *map(round, peaks)]
    name = kind.__name__.removesuffix("Controller")
    print(f"{size:>8,} {name:>4}" + " ".join(f"{figure:>9}" for figure in figures), flush=True)
    for note in notes:
        print(f"{'':>13}{note[:200]}", flush=True)


def taken(steps: Mapping[str, Callable[[], object]]) -> tuple[dict[str, str], list[str]]:
    """Take the steps up to one that fails. Returns the seconds of each, and the error."""
    took = dict[str, str]()
    for name, step in steps.items():
        try:
            took[name] = f"{timed(step):.2f}"
        except (ControllerError, NodeError, OSError, AssertionError, SystemExit) as error:
            took[name] = "failed"
            return took, [f"{name}: {error}"]
    return took, []


def told(on: Stage) -> list[str]:
    """Warnings of the node, and lines of its log, about memory."""
    warnings = list[str]()
    with suppress(ControllerError, NodeError, OSError):
        warnings += on.controller.info().warnings
    return [line for line in dict.fromkeys([*warnings, *on.node.lines]) if "memory" in line]


if __name__ == "__main__":
    parser = argparse.ArgumentParser("python -m scripts.bench.fits", description=__doc__)
    parser.add_argument("sizes", nargs="*", type=int, default=SIZES, metavar="USERS")
    parser.add_argument("--memory", type=int, default=MEMORY, metavar="MIB")
    given = parser.parse_args()
    main(given.memory, given.sizes)
