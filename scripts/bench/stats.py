"""Cost of traffic accounting: GetStats next to the core's own, readings of counters, memory, disk.

`python -m scripts.bench.stats [USERS ...]` prints a table for each size: medians of a few rounds. The traffic is real:
a tenth of the users move bytes through the core before each figure. The second part is a node with pending bytes of
all users: its ledger is full.
"""

from __future__ import annotations

import http.client
import ssl
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

import grpc

from drivers.xray.api import STATS
from protos import xray_pb2
from protos.service_pb2 import Inbounds, StatRequest, StatResponse, UsersStat, UserStat
from scripts.bench.load import PAYLOAD, Load, loading
from scripts.bench.stage import Backing, Stage, backing, machine, stage
from scripts.bench.ticker import ticking
from scripts.staging.rpc import Rpc
from scripts.staging.target import credentials

SIZES = (10_000, 50_000)
ROUNDS = 5
_FEW = 3
# Users who move bytes while the node chooses how often it reads.
_ACTIVE = 50
# Seconds between two readings of counters by the node; its default.
INTERVAL = 10
# The same for the second part: longer than it takes until all users have moved bytes.
LONG = 600
_MINUTE = 60
# Seconds for work that follows a reply, mainly the write of its rows to disk.
_MOMENT = 0.4
_NO_LIMIT = [("grpc.max_receive_message_length", -1)]


def main(sizes: Sequence[int]) -> None:
    print(machine())
    for size in sizes:
        with loading() as load:
            target = backing(size)
            print(f"\n{size} users, a tenth of them active; {ROUNDS} rounds", flush=True)
            with stage(TRAFFIC_INTERVAL=str(INTERVAL)) as on:
                active(on, target, load)
            target = backing(size)
            print(f"\n{size} users, all with pending bytes", flush=True)
            with stage(TRAFFIC_INTERVAL=str(LONG)) as on:
                full(on, target, load)
    print(machine())


def active(on: Stage, target: Backing, load: Load) -> None:
    on.controller.start(target.request())
    started = on.rss()
    some = identities(target)[: len(target.crowd.users) // 10]
    load.open(some, target.ports[0])
    replies(on, load, len(some))
    readings(on, load, len(some))
    line("RSS", f"{on.rss():.0f} MiB, {started:.0f} after Start")
    disk(on, "no user active", lambda: None)
    disk(on, "a tenth active", load.move)
    load.visit(identities(target), target.ports[0])
    readings(on, load, len(target.crowd.users))
    load.close()
    load.open(some[:_ACTIVE], target.ports[0])
    beat(on, load, len(target.crowd.users))
    load.close()


def replies(on: Stage, load: Load, some: int) -> None:
    """Measure GetStats with reset, which makes the node read the core's counters, next to the core's QueryStats."""
    with asking(on) as (rpc, rest), core_asking(on) as core:
        alone: list[float] = []
        for name, ask in (("gRPC", rpc), ("REST", rest)):
            asked = []
            for number in range(ROUNDS):
                load.move()
                # In alternating order, as the first call finds cold caches.
                if number % 2:
                    alone.append(took(core).seconds)
                asked.append(reply(ask, some))
                alone.append(took(core).seconds)
            share = statistics.median(asked) / statistics.median(alone)
            line(f"GetStats, {name}", f"{ms(asked)} ms, {share:.1f} x the core's own")
        line(f"the core's own QueryStats, {2 * some} rows", f"{ms(alone)} ms")


def reply(ask: Callable[[StatRequest], StatResponse], users: int) -> float:
    """Seconds of a GetStats with reset, which must return two rows for so many users, in multiples of the payload."""
    answer = took(lambda: ask(StatRequest(type=UsersStat, reset=True)))
    assert isinstance(answer.value, StatResponse)
    assert len(answer.value.stats) == 2 * users, f"{len(answer.value.stats)} rows, expected {2 * users}"
    assert all(not stat.value % len(PAYLOAD) for stat in answer.value.stats)
    return answer.seconds


def readings(on: Stage, load: Load, counted: int) -> None:
    """Cost of one reading, triggered by a GetStats of a few rows, and the stall of other calls."""
    with asking(on) as (rpc, _):
        few, one = StatRequest(type=Inbounds), StatRequest(type=UserStat, name="live")
        costs, single, alone = [], [], []
        for _ in range(_FEW):
            load.move()
            costs.append(processor_of(on, lambda: rpc(few)))
            single.append(processor_of(on, lambda: rpc(one)))
            alone.append(took(lambda: rpc(one)).seconds)
        line(f"CPU of one reading, {2 * counted} counters", f"{ms(costs)} ms")
        line("GetStats of one user", f"{ms(alone)} ms, CPU {ms(single)} ms")
        stalls(on, load, lambda: rpc(StatRequest(type=UsersStat, reset=True)))


def stalls(on: Stage, load: Load, ask: Callable[[], object]) -> None:
    """Longest stall of other calls: when idle, during the core's work for another client, and during GetStats."""
    found, idle, alone = list[float](), list[float](), list[float]()
    with ticking(on.node) as ticker, core_asking(on) as core:
        for _ in range(_FEW):
            load.move()
            for work, times in ((None, idle), (core, alone), (ask, found)):
                ticker.worst()
                if work is not None:
                    work()
                time.sleep(_MOMENT)
                times.append(ticker.worst())
    others = f"while another client queries the core {ms(alone)}, idle {ms(idle)}"
    line("stall by reading, reply and writing", f"{ms(found)} ms, longest {ms([max(found)])}; {others}")


def beat(on: Stage, load: Load, counted: int) -> None:
    """The interval of the node's own readings while some users move bytes, and the processor time that goes on."""
    spent = []
    for _ in range(_FEW):
        before = used(on.node.node_pid), used(on.core)
        for _ in range(INTERVAL):
            load.move()
            time.sleep(1)
        now = used(on.node.node_pid), used(on.core)
        spent.append([(after - earlier) / INTERVAL for after, earlier in zip(now, before, strict=True)])
    node, core = zip(*spent, strict=True)
    seconds = on.controller.info().traffic_interval
    line(
        f"seconds between readings, {2 * counted} counters",
        f"{seconds:.1f}; in a second node {ms(node)} ms, core {ms(core)}",
    )


def disk(on: Stage, name: str, each: Callable[[], object]) -> None:
    """Bytes that the node writes in a minute: to the disk, and by all write calls (files and sockets)."""
    before, begun = written(on.node.node_pid), time.monotonic()
    while time.monotonic() - begun < _MINUTE:
        each()
        time.sleep(1)
    now = written(on.node.node_pid)
    kib = [(after - earlier) / 1024 for after, earlier in zip(now, before, strict=True)]
    line(f"written in a minute, {name}", f"{kib[0]:.0f} KiB to the disk, {kib[1]:.0f} by all write calls")


def full(on: Stage, target: Backing, load: Load) -> None:
    on.controller.start(target.request())
    started, everyone = on.rss(), identities(target)
    load.visit(everyone, target.ports[0])
    time.sleep(_MOMENT)
    with asking(on) as (rpc, rest), core_asking(on) as core, ticking(on.node) as ticker:
        ticker.worst()
        first = took(lambda: rpc(StatRequest(type=UserStat, name="live"))).seconds
        time.sleep(_MOMENT)
        line(f"one reading, {2 * len(everyone)} counters, all new", f"{ms([first])} ms, stall {ms([ticker.worst()])}")
        line("RSS with a full ledger", f"{on.rss():.0f} MiB, {started:.0f} after Start")
        alone = [took(core).seconds for _ in range(ROUNDS)]
        for name, ask in (("gRPC", rpc), ("REST", rest)):
            ticker.worst()
            times = [took(partial(ask, StatRequest(type=UsersStat))).seconds for _ in range(ROUNDS)]
            line(f"GetStats, {name}", f"{ms(times)} ms, stall {ms([ticker.worst()])}")
        line(f"the core's own QueryStats, {2 * len(everyone)} rows", f"{ms(alone)} ms")
        line("RSS after that", f"{on.rss():.0f} MiB")


class Took(NamedTuple):
    seconds: float
    value: object


def took(work: Callable[[], object]) -> Took:
    begun = time.perf_counter()
    value = work()
    return Took(time.perf_counter() - begun, value)


@contextmanager
def asking(on: Stage) -> Iterator[tuple[Callable[[StatRequest], StatResponse], Callable[[StatRequest], StatResponse]]]:
    """GetStats over gRPC and over REST, each on a kept connection."""
    pinned = ssl.create_default_context(cadata=on.node.pem)
    connection = http.client.HTTPSConnection(on.node.host, on.node.rest_port, context=pinned)
    headers = {**credentials(on.node.key, "bearer"), "Content-Type": "application/x-protobuf"}

    def over_rest(request: StatRequest) -> StatResponse:
        connection.request("GET", "/stats", request.SerializeToString(), headers)
        response = connection.getresponse()
        body = response.read()
        assert response.status == 200, body
        return StatResponse.FromString(body)

    with Rpc(on.node) as rpc, closing(connection):
        yield rpc.GetStats, over_rest


@contextmanager
def core_asking(on: Stage) -> Iterator[Callable[[], xray_pb2.QueryStatsResponse]]:
    """QueryStats on the core's API."""
    with grpc.insecure_channel(f"unix:{on.api}", _NO_LIMIT) as channel:
        call = channel.unary_unary(STATS + "QueryStats", None, xray_pb2.QueryStatsResponse.FromString)
        request = xray_pb2.QueryStatsRequest(pattern="user>>>").SerializeToString()
        yield lambda: call(request)


def identities(target: Backing) -> list[str]:
    return [user.proxies.vless.id for user in target.crowd.users]


def processor_of(on: Stage, work: Callable[[], object]) -> float:
    """Processor seconds of the node for `work`, and for `_MOMENT` after it."""
    before = used(on.node.node_pid)
    work()
    time.sleep(_MOMENT)
    return used(on.node.node_pid) - before


def used(pid: int) -> float:
    """Processor seconds of all threads of a process, to the microsecond. See proc(5), schedstat."""
    files = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(file.read_text().split()[0]) for file in files) / 1e9


def written(pid: int) -> tuple[int, int]:
    """Bytes that a process has sent to storage, and passed to write calls. See proc(5), io."""
    rows = dict(row.split(": ") for row in Path(f"/proc/{pid}/io").read_text().splitlines())
    return int(rows["write_bytes"]), int(rows["wchar"])


def ms(seconds: Sequence[float]) -> str:
    return f"{1000 * statistics.median(seconds):.1f}"


def line(name: str, text: str) -> None:
    print(f"  {name:52} {text}", flush=True)


if __name__ == "__main__":
    main([int(word) for word in sys.argv[1:]] or SIZES)
