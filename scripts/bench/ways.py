"""Cost for the core alone of user additions, removals and inbound swaps: basis of `drivers.xray.user_changes`.

`python -m scripts.bench.ways [SIZE ...]` prints a line for each kind of inbound and number of its users: microseconds
for an addition and for a removal by AlterInbound with 64 in flight, milliseconds for RemoveInbound and AddInbound with
all users (swap), and the descriptors and goroutines that ten swaps leak.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import grpc
import psutil

from drivers.xray.api import HANDLER, STATS
from protos import xray_pb2
from scripts.bench import bare
from scripts.bench.stage import machine, timed
from scripts.staging import certs
from scripts.staging.backend import backend_config, user
from scripts.staging.inbounds import NAMES, SERVER_NAME, Kind, kinds
from scripts.staging.ports import free_port
from scripts.staging.users import TestUser

SIZES = (1_000, 10_000, 40_000)
# Users added and removed; fewer where each is expensive.
MOVED, FEW = 1_000, 50
SWAPS = 10
_OPTIONS = [("grpc.max_send_message_length", -1)]


def main(sizes: Sequence[int]) -> None:
    print(machine())
    print(f"{'':26} {'users':>6} {'add us':>7} {'rm us':>7} {'swap ms':>8} {'fds':>4} {'goroutines':>10}")
    with tempfile.TemporaryDirectory() as work:
        known = kinds(certs.make(Path(work), [SERVER_NAME]), 1)
        for name in (name for name in NAMES if not known[name].reality):
            for size in sizes:
                row(known[name], size, Path(work))
    print(machine())


def row(kind: Kind, size: int, directory: Path) -> None:
    tag = kind.name
    crowd = [user(TestUser.new(f"{number}.user"), {tag: kind}) for number in range(size)]
    fresh = [user(TestUser.new(f"{number}.new"), {tag: kind}) for number in range(FEW if "2022" in tag else MOVED)]
    with bare.BareCore(backend_config([kind.inbound(free_port(), tag)]), crowd, directory) as core:
        rows = core.calls(fresh)
        added = bare.alter(core.socket, [row[1:] for row in rows]) / len(fresh)
        removed = bare.alter(core.socket, [row[:1] for row in rows]) / len(fresh)
        with grpc.insecure_channel(f"unix:{core.socket}", options=_OPTIONS) as channel:
            before = left_open(core, channel)
            whole = core.inbound(tag, crowd)
            swapped = "too large" if len(whole) > 4 * 2**20 else f"{1000 * swaps(channel, tag, whole):.0f}"
            after = left_open(core, channel)
    leaks = f"{after[0] - before[0]:>4} {after[1] - before[1]:>10}"
    print(f"{tag:26} {size:>6} {1e6 * added:>7.0f} {1e6 * removed:>7.0f} {swapped:>8} {leaks}", flush=True)


def swaps(channel: grpc.Channel, tag: str, whole: bytes) -> float:
    """Mean seconds of several consecutive swaps."""
    remove = xray_pb2.RemoveInboundRequest(tag=tag).SerializeToString()

    def swap() -> None:
        channel.unary_unary(HANDLER + "RemoveInbound")(remove, timeout=10)
        channel.unary_unary(HANDLER + "AddInbound")(whole, timeout=10)

    return sum(timed(swap) for _ in range(SWAPS)) / SWAPS


def left_open(core: bare.BareCore, channel: grpc.Channel) -> tuple[int, int]:
    """The number of the core's descriptors and of its goroutines."""
    stats = xray_pb2.SysStatsResponse.FromString(channel.unary_unary(STATS + "GetSysStats")(b"", timeout=10))
    return psutil.Process(core.pid).num_fds(), stats.num_goroutine


if __name__ == "__main__":
    main([int(word) for word in sys.argv[1:]] or SIZES)
