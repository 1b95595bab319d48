"""Large rosters: duration of each step, the longest stall of other calls meanwhile, and the node's memory.

`python -m scripts.bench.scale [USERS[xINBOUNDS] ...]` starts a new node for each size and prints a table. `stall` is
the longest GetBaseInfo, called every 5 ms by another process; `idle` is the same before any step.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable

from protos.service_pb2 import Empty, Users
from scripts.bench.stage import Backing, Stage, backing, machine, stage, timed
from scripts.bench.ticker import Ticker, ticking

SIZES = ("1", "10000", "50000", "100000", "10000x10")
_IDLE = 2.0


def main(sizes: Iterable[str]) -> None:
    print(machine())
    for size in sizes:
        users, _, inbounds = size.partition("x")
        with stage() as on, ticking(on.node) as ticker:
            table(on, backing(int(users), int(inbounds or 1)), ticker)
    print(machine())


def table(on: Stage, target: Backing, ticker: Ticker) -> None:
    crowd = target.crowd
    print(f"\n{len(crowd.users)} users, {len(target.ports)} inbounds\n{'':22} {'ms':>7} {'stall ms':>9} {'RSS MiB':>8}")
    ticker.worst()
    line("idle", 0, ticker, on)
    start, same = target.request(), Users(users=crowd.users)
    steps: list[tuple[str, Callable[[], object]]] = [
        ("Start", lambda: on.controller.start(start)),
        ("identical Start", lambda: on.controller.start(start)),
        ("identical SyncUsers", lambda: on.controller.call("SyncUsers", Empty, same)),
    ]
    if len(crowd.users) > 1:
        steps += [("1 % changed", _sync(on, target)), ("one changed, SyncUser", _one(on, target))]
    for name, work in steps:
        line(name, timed(work), ticker, on)


def _sync(on: Stage, target: Backing) -> Callable[[], object]:
    target.crowd.change(len(target.crowd.users) // 100)
    request = Users(users=target.crowd.users)
    return lambda: on.controller.call("SyncUsers", Empty, request)


def _one(on: Stage, target: Backing) -> Callable[[], object]:
    return lambda: on.controller.sync_user(*target.crowd.change(1))


def line(name: str, seconds: float, ticker: Ticker, on: Stage) -> None:
    time.sleep(_IDLE)
    figures = f"{1000 * seconds:>7.0f} {1000 * ticker.worst():>9.0f} {on.rss():>8.0f}"
    print(f"{name:22} {figures}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:] or SIZES)
