"""Cost of monitoring and polling one node, and a thousand: `python -m scripts.bench.fleet [USERS] [NODES]`.

Measured on a node with USERS (10,000), a tenth of them active: a scrape and the calls of a controller, each over a kept
connection and over a new one: bytes of the reply, time, and processor time of the node. The rest is arithmetic for
NODES (1,000), each called at the intervals below.
"""

from __future__ import annotations

import http.client
import ssl
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass

from protos.service_pb2 import StatRequest, UsersStat
from scripts.bench.load import loading
from scripts.bench.stage import Stage, backing, machine, stage
from scripts.bench.stats import identities, used
from scripts.staging.target import credentials

USERS, NODES = 10_000, 1_000
ROUNDS = 20
SCRAPE, INFO, STATS = "GET /metrics", "GetBaseInfo", "GetStats, all users, reset"
# Seconds between two calls: Prometheus' usual interval, and those of controllers.
INTERVALS = {SCRAPE: 30, INFO: 10, STATS: 60}
# Bytes of a series in Prometheus' memory, and of a sample on its disk: rules of thumb.
_SERIES_BYTES, _SAMPLE_BYTES = 4096, 2
_DAY = 86_400
# Seconds for work that the node does after a call, mainly a reading of the counters.
_MOMENT = 0.3

Ask = Callable[[http.client.HTTPSConnection], bytes]


@dataclass(frozen=True)
class Cost:
    """Cost of one call: bytes of its reply, seconds until it arrived, and processor seconds of the node."""

    size: int
    wall: float
    node: float


def main(users: int, nodes: int) -> None:
    print(machine())
    target = backing(users)
    with loading() as load, stage(TRAFFIC_INTERVAL="10") as on:
        on.controller.start(target.request())
        load.open(identities(target)[: users // 10], target.ports[0])
        asks = {SCRAPE: _asks(on, "/metrics"), INFO: _asks(on, "/info"), STATS: _asks(on, "/stats", _stats())}
        print(f"\none node, {users} users, {users // 10} active: medians of {ROUNDS}")
        costs = {}
        for name, ask in asks.items():
            costs[name] = measured(on, ask, load.move, fresh=True)
            row(name, "kept", measured(on, ask, load.move, fresh=False))
            row(name, "new", costs[name])
        series = _series(asks[SCRAPE], on)
        load.close()
    print(f"\n{nodes} nodes, each call over a new connection")
    for line in fleet(costs, series, nodes):
        print(f"  {line}")


def row(name: str, way: str, cost: Cost) -> None:
    times = f"{1000 * cost.wall:6.1f} ms, CPU {1000 * cost.node:6.1f} ms"
    print(f"  {name:28} {way:5} {cost.size:>9,} bytes {times}", flush=True)


def _asks(on: Stage, path: str, body: bytes = b"") -> Ask:
    headers = {**credentials(on.node.key, "bearer"), "Content-Type": "application/x-protobuf"}

    def ask(connection: http.client.HTTPSConnection) -> bytes:
        connection.request("GET", path, body, headers)
        response = connection.getresponse()
        answer = response.read()
        assert response.status == 200, answer
        return answer

    return ask


def _stats() -> bytes:
    return StatRequest(type=UsersStat, reset=True).SerializeToString()


@contextmanager
def _connected(on: Stage) -> Iterator[http.client.HTTPSConnection]:
    pinned = ssl.create_default_context(cadata=on.node.pem)
    with closing(http.client.HTTPSConnection(on.node.host, on.node.rest_port, context=pinned)) as connection:
        yield connection


def measured(on: Stage, ask: Ask, before: Callable[[], None], fresh: bool) -> Cost:
    """Median costs of a call. With `fresh` they include a new connection; else one is kept from before."""
    sizes, walls, nodes = [], [], []
    with _connected(on) as kept:
        ask(kept)
        for _ in range(ROUNDS):
            before()
            idle = _idle(on)
            processor, begun = used(on.node.node_pid), time.perf_counter()
            if fresh:
                with _connected(on) as connection:
                    size = len(ask(connection))
            else:
                size = len(ask(kept))
            walls.append(time.perf_counter() - begun)
            time.sleep(_MOMENT)
            nodes.append(max(0.0, used(on.node.node_pid) - processor - idle))
            sizes.append(size)
    return Cost(int(statistics.median(sizes)), statistics.median(walls), statistics.median(nodes))


def _idle(on: Stage) -> float:
    """Processor seconds of the idle node during `_MOMENT`."""
    before = used(on.node.node_pid)
    time.sleep(_MOMENT)
    return used(on.node.node_pid) - before


def _series(ask: Ask, on: Stage) -> int:
    with _connected(on) as connection:
        return sum(not line.startswith(b"#") for line in ask(connection).splitlines())


def fleet(costs: dict[str, Cost], series: int, nodes: int) -> Iterator[str]:
    """Lines of text: the load of all nodes on their callers and Prometheus, and the share of each node's processor."""
    for name, cost in costs.items():
        rate = nodes / INTERVALS[name]
        share = 100 * cost.node / INTERVALS[name]
        yield (
            f"{name}, every {INTERVALS[name]} s: {rate:.0f} a second, {rate * cost.size * 8 / 1e6:.1f} Mbit/s, "
            f"{rate * cost.wall:.2f} at once; of each node {share:.3f} % of a processor"
        )
    samples = nodes * series / INTERVALS[SCRAPE]
    yield (
        f"Prometheus: {nodes * series:,} series ({series} a node), {samples:,.0f} samples a second, "
        f"about {nodes * series * _SERIES_BYTES / 2**30:.1f} GiB of memory, "
        f"{samples * _SAMPLE_BYTES * _DAY / 2**30:.2f} GiB of disk a day"
    )


if __name__ == "__main__":
    given = [int(word) for word in sys.argv[1:]]
    main(*(given + [USERS, NODES][len(given) :]))
