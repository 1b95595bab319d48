"""Bytes pushed against bytes billed, over kills of cores and of nodes at random moments.

`python -m scripts.bench.accounting [KILLS [CORE ...]]` (50; xray and sing-box, or the path of a sing-box) has a user
push bytes both ways through each core, and kills (SIGKILL) in turn the core, the node, and the node with its cores,
KILLS times in all. After each kill the user waits until the backend runs again, and the bytes billed are compared with
those pushed: no byte may be billed that was not pushed, and no more may be missing than were pushed since the last
reading, as the bound in `info` says. It prints the bytes missing, and how old the first missing byte was at the kill:
the median, and the most. Exit status 1 if a kill lost more, or billed too much.
"""

from __future__ import annotations

import os
import random
import signal
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from protos.service_pb2 import Backend, UsersStat
from scripts.bench.overlap import TAG, on_sing_box, on_xray
from scripts.bench.stage import KIND, Crowd, Stage, machine, stage
from scripts.bench.upgrade import serves
from scripts.staging.controller import traffic
from scripts.staging.core import XrayClient
from scripts.staging.ports import free_port
from scripts.staging.pushes import Moved, Pushes
from scripts.staging.wait import until

KILLS, USERS = 50, 1000
# Seconds of pushing before a kill. A node that has just come up has yet to read and save what was pushed before.
LEAST, MOST = 2.5, 6.0
# Seconds that a reading may be late: the node looks twice a second whether one is due, and the machine is busy.
LATE = 1.0


@dataclass
class Losses:
    """What kills of one kind cost."""

    kills: int = 0
    bytes: list[int] = field(default_factory=list)
    ages: list[float] = field(default_factory=list)
    # Kills that lost more than the bound, and those after which too much was billed.
    beyond: int = 0
    too_much: int = 0


def kill_core(on: Stage) -> None:
    os.kill(on.core, signal.SIGKILL)


def kill_node(on: Stage) -> None:
    on.node.kill_node()


def restart(on: Stage) -> None:
    on.node.stop()
    on.node.start()


def kill_all(on: Stage) -> None:
    on.node.kill()
    on.node.start()


WAYS: Mapping[str, Callable[[Stage], None]] = {
    "the core": kill_core,
    "the node": kill_node,
    "the node with its cores": kill_all,
    "a restart": restart,
}


def main(kills: int, names: list[str]) -> int:
    print(machine())
    print(f"{kills} kills of each, {USERS:,} users; missing bytes in both directions")
    bad = 0
    for name in names:
        own = {} if name in ("xray", "sing-box") else {"SING_BOX_EXECUTABLE_PATH": name}
        with stage(TRAFFIC_INTERVAL="10", **own) as on:
            found = measure(on, on_xray if name == "xray" else on_sing_box, kills)
        print(f"\n{name}")
        columns = ("killed", "kills", "missing", "most", "age s", "oldest s", "beyond", "too much")
        print(" ".join(f"{column:>24}" if not place else f"{column:>10}" for place, column in enumerate(columns)))
        for way, losses in found.items():
            bad += losses.beyond + losses.too_much
            figures = f"{losses.kills:>10} {sum(losses.bytes):>10,} {max(losses.bytes):>10,}"
            ages = f"{statistics.median(losses.ages):>10.2f} {max(losses.ages):>10.2f}"
            print(f"{way:>24} {figures} {ages} {losses.beyond:>10} {losses.too_much:>10}", flush=True)
    print(machine())
    return min(1, bad)


def measure(
    on: Stage, request: Callable[[int, Crowd, int], Backend], kills: int, users: int = USERS
) -> Mapping[str, Losses]:
    crowd, port, proxy = Crowd(users, [TAG]), free_port(), free_port()
    on.controller.start(request(port, crowd, 0))
    found = {way: Losses() for way in WAYS}
    with XrayClient({proxy: KIND.outbound(port, crowd.live)}), Pushes(proxy, on.echo) as pushes:
        before = Moved()
        for number in range(kills):
            way = [*WAYS][number % len(WAYS)]
            before = one(on, way, pushes, crowd.live.email, before, found[way])
    return found


def one(on: Stage, way: str, pushes: Pushes, email: str, before: Moved, losses: Losses) -> Moved:
    """Kill once. Returns the bytes that are missing from then on, with those `before`."""
    spare = pushes.most - pushes.arrived
    pushes.resume()
    time.sleep(random.uniform(LEAST, MOST))
    bound = on.controller.info().traffic_interval + LATE
    killed = time.monotonic()
    WAYS[way](on)
    pushes.pause()
    serves(on)
    if way == "the node":
        # The core goes on with its counters: the next reading has all of them.
        until(lambda: billed(on, email) + before == pushes.arrived, 10, "nothing is missing")
    rows = billed(on, email)
    missing = pushes.arrived - rows - before
    losses.kills += 1
    losses.bytes.append(max(0, missing.up) + max(0, missing.down))
    losses.ages.append(pushes.age(rows + before, killed))
    # Bytes may have reached the core, and the node, but not the server.
    losses.too_much += not Moved() - missing <= pushes.most - pushes.arrived - spare
    losses.beyond += not missing <= pushes.arrived - pushes.at(killed - bound)
    return before + missing


def billed(on: Stage, email: str) -> Moved:
    row = traffic(on.controller.stats(UsersStat)).get(email, {})
    return Moved(row.get("uplink", 0), row.get("downlink", 0))


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if sys.argv[1:] else KILLS, sys.argv[2:] or ["xray", "sing-box"]))
