"""Time from the start of a node's process until it listens, and its memory without users and with many."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from statistics import median

from scripts.bench.arena import INTERVAL
from scripts.bench.peer import peer
from scripts.bench.results import Row
from scripts.bench.sides import Ours, Side, calling, transport
from scripts.bench.stage import backing, stage, timed

# Seconds after a Start until memory is measured: the memory needed only for the Start is freed by then.
_LATER = 2.0
SIZES = (10_000, 50_000)
Opened = Callable[[], AbstractContextManager[Side]]


@contextmanager
def ours() -> Iterator[Side]:
    """The node after a restart: the first run creates its files."""
    with stage(TRAFFIC_INTERVAL=INTERVAL) as on:
        on.node.stop()
        yield Ours(on, timed(on.node.start))


def boot_rows(executable: Path | None, rounds: int) -> Iterator[Row]:
    sides: dict[str, Opened] = {"ours": ours, "transport": partial(transport, "grpc", {})}
    if executable:
        sides["peer"] = partial(peer, executable, "grpc")
    listened = {name: [_listened(opened) for _ in range(rounds)] for name, opened in sides.items()}
    yield _row("listens after its start", "ms", {name: 1e3 * median(times) for name, times in listened.items()})
    yield _row("RSS without users", "MiB", {name: memory(opened, 0) for name, opened in sides.items()})
    del sides["transport"]
    for size in SIZES:
        yield _row(f"RSS with {size:,}", "MiB", {name: memory(opened, size) for name, opened in sides.items()})


def _row(name: str, unit: str, found: dict[str, float]) -> Row:
    return Row(name, unit, found["ours"], found.get("peer"), None, found.get("transport"))


def _listened(opened: Opened) -> float:
    with opened() as side:
        return side.listened


def memory(opened: Opened, users: int) -> float:
    """Memory (MiB) of a new node after a Start with so many users; 0 for no Start."""
    with opened() as side, calling(side, "grpc") as call:
        if users:
            side.backing = backing(users)
            call("Start", side.backing.request().SerializeToString())
        time.sleep(_LATER)
        return side.rss
