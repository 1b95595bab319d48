"""Growth of cost with users and with inbounds. `python -m scripts.bench.growth [USERS[xINBOUNDS] ...]`

Columns: a Start after a Stop; the same list again; the list with one user in a hundred changed; a PUT of one user and
the node's processor time for it; users a second in a stream of a thousand; the node's memory two seconds later. The
first three are medians of three.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Iterable
from functools import partial

from protos.service_pb2 import Users
from scripts.bench.arena import INTERVAL
from scripts.bench.calls import STREAM, feed
from scripts.bench.sides import Call, Ours, calling
from scripts.bench.stage import backing, machine, stage, timed

SIZES = ("1000", "10000", "50000", "100000", "10000x5", "10000x20")
ROUNDS = 3
SINGLE = 50
_LATER = 2.0
_COLUMNS = ("Start ms", "same ms", "1 % ms", "PUT ms", "CPU ms", "stream/s", "RSS MiB")


def main(sizes: Iterable[str] = SIZES) -> None:
    print(machine())
    print(f"{'users':>10}" + "".join(f" {column:>9}" for column in _COLUMNS))
    for size in sizes:
        users, _, inbounds = size.partition("x")
        with stage(TRAFFIC_INTERVAL=INTERVAL) as on, calling(side := Ours(on), "grpc") as call:
            side.backing = backing(int(users), int(inbounds or 1))
            figures = [*_lists(side, call), *_single(side)]
            time.sleep(_LATER)
            print(f"{size:>10}" + "".join(f" {figure:>9,.1f}" for figure in (*figures, side.rss)), flush=True)


def _lists(side: Ours, call: Call) -> tuple[float, ...]:
    """Milliseconds of a Start, of the same list again, and of the list with one user in a hundred changed."""
    _start(side, call)
    rows = []
    for _ in range(ROUNDS):
        call("Stop", b"")
        start, same = timed(partial(_start, side, call)), timed(partial(_sync, side, call))
        side.backing.crowd.change(len(side.backing.crowd.users) // 100)
        rows.append((start, same, timed(partial(_sync, side, call))))
    return tuple(1e3 * statistics.median(column) for column in zip(*rows, strict=True))


def _start(side: Ours, call: Call) -> None:
    call("Start", side.backing.request().SerializeToString())


def _sync(side: Ours, call: Call) -> None:
    call("SyncUsers", Users(users=side.backing.crowd.users).SerializeToString())


def _single(side: Ours) -> tuple[float, float, float]:
    """Milliseconds and processor milliseconds of a PUT, and users a second of a stream; all users are changed."""
    bodies = [user.SerializeToString() for user in side.backing.crowd.change(SINGLE)]
    with calling(side, "rest") as call:
        call("GetBaseInfo", b"")
        used = side.used
        times = [timed(partial(call, "SyncUser", body)) for body in bodies]
        processor = side.used - used
    count = min(STREAM, len(side.backing.crowd.users) - 1)
    stream = [user.SerializeToString() for user in side.backing.crowd.change(count)]
    return 1e3 * statistics.median(times), 1e3 * processor / SINGLE, count / feed(side, "SyncUser", stream)


if __name__ == "__main__":
    main(sys.argv[1:] or SIZES)
