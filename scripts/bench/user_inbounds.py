"""Cost of USER_INBOUNDS: a core with each user on several inbounds, off against on in one run.

`python -m scripts.bench.user_inbounds [USERS [INBOUNDS]]` starts a node for each value, and has every user move bytes
on every inbound. It prints memory, the time of a Start, and that of GetStats and ListUsers, medians of a few rounds.
"""

from __future__ import annotations

import statistics
import sys

import psutil

from protos.service_pb2 import ListUsersRequest, ListUsersResponse, UsersStat
from scripts.bench.load import PAYLOAD, Load, loading
from scripts.bench.stage import Backing, Cost, Stage, backing, machine, median, stage, timed
from scripts.bench.stats import identities, line
from scripts.staging.controller import traffic
from scripts.staging.wait import until

SIZE, INBOUNDS = 50_000, 5
ROUNDS = 5
# Seconds between two readings of the node's own, at most: longer than the run.
LONG = 600
# Users who move bytes between two readings.
ACTIVE = 50


def main(size: int, inbounds: int) -> None:
    print(machine())
    for value in ("off", "on"):
        print(f"\nUSER_INBOUNDS={value}: {size} users, each on {inbounds} inbounds; {ROUNDS} rounds", flush=True)
        with loading() as load, stage(TRAFFIC_INTERVAL=str(LONG), USER_INBOUNDS=value) as on:
            measure(on, backing(size, inbounds), load)
    print(machine())


def measure(on: Stage, target: Backing, load: Load) -> None:
    seconds = timed(lambda: on.controller.start(target.request()))
    line("Start", f"{seconds:.2f} s")
    line("RSS after Start", memory(on))
    everyone = identities(target)
    for port in target.ports:
        load.visit(everyone, port)
    size = len(PAYLOAD) * len(target.ports)
    until(lambda: all(row["uplink"] == size for row in counted(on).values()), 60, "all bytes are counted")
    line("RSS when every user has used every inbound", memory(on))
    load.open(everyone[:ACTIVE], target.ports[0])
    costs = []
    for _ in range(ROUNDS):
        load.move()
        costs.append(on.measure(lambda: on.controller.stats(UsersStat)))
    line(f"GetStats of all users, {ACTIVE} of them active", told(median(costs)))
    load.visit(everyone, target.ports[0])
    line("GetStats when all have moved bytes on one inbound", told(on.measure(lambda: counted(on))))
    pages = [timed(lambda: page(on)) for _ in range(ROUNDS)]
    line("ListUsers, the first page with traffic", f"{1000 * statistics.median(pages):.0f} ms")
    line("RSS in the end", memory(on))
    load.close()


def counted(on: Stage) -> dict[str, dict[str, int]]:
    return traffic(on.controller.stats(UsersStat))


def page(on: Stage) -> None:
    reply = on.controller.call("ListUsers", ListUsersResponse, ListUsersRequest(traffic=True))
    assert len(reply.users) == 1000


def memory(on: Stage) -> str:
    core = psutil.Process(on.core).memory_info().rss / 2**20
    return f"core {core:.0f} MiB, node {on.rss():.0f} MiB"


def told(cost: Cost) -> str:
    return (
        f"{1000 * cost.wall:.0f} ms, CPU of the node {1000 * cost.node:.0f} ms, of the core {1000 * cost.core:.0f} ms"
    )


if __name__ == "__main__":
    given = [int(word) for word in sys.argv[1:]]
    main(*[*given, *(SIZE, INBOUNDS)[len(given) :]])
