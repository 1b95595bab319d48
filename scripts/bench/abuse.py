"""Cost of the watch for abuse, and which part of encrypted torrents it finds by behaviour.

`python -m scripts.bench.abuse` parses and judges access lines in this process: microseconds a line without ABUSE and
with it, and memory for each user at work. Then it writes such lines into the output of a node's core, 2,000 a second of
500 among 10,000 users, and prints the node's processor time without ABUSE and with it. Last it simulates encrypted
torrents of a growing number of peers a minute.
"""

from __future__ import annotations

import os
import random
import time
import tracemalloc
from collections.abc import Iterator
from typing import Any

from twisted.internet.task import Clock

from drivers.sing_box.table import Table
from drivers.sing_box.tally import CLOSED
from drivers.xray.connections import Connections
from drivers.xray.ingress import Ingress
from node.abuse.abuse import LOOK, Abuse
from node.abuse.detectors import SWARM_HALF, Watch
from node.abuse.parsing import by_kind
from node.contract.abuse import AbuseRules, Request
from node.contract.generations import Generations
from protos.sing_box_pb2 import Connection, ConnectionEvent, ConnectionEvents
from scripts.bench.stage import backing, machine, processor, stage

RULES = "torrent: tell; scan: tell; mail: tell"
USERS, ACTIVE, RATE = 10_000, 500, 2_000
# Targets of each user, like those of somebody who browses; the last three are on other ports.
TARGETS = 40
# Lines of a run in this process, and runs, of which the cheapest counts.
LINES, RUNS = 20_000, 5
SECONDS, ROUNDS = 15.0, 3
# Encrypted torrents simulated for each number of peers.
TORRENTS = 200


def main() -> None:
    print(machine())
    off, on = (min(_parsed(watched) for _ in range(RUNS)) for watched in (False, True))
    print(f"in this process: {off:.2f} us a line without ABUSE, {on:.2f} us with it: {on - off:.2f} us more, ", end="")
    print(f"{(on - off) * RATE / 1e4:.2f} % of a processor at {RATE:,} lines a second")
    off, on = (min(_streamed(watched) for _ in range(RUNS)) for watched in (False, True))
    print(f"of sing-box's stream: {off:.2f} us a connection without ABUSE, {on:.2f} us with it: {on - off:.2f} us more")
    print(f"memory of a user at work: {_memory() / 1024:.1f} KiB", flush=True)
    without, with_it = zip(*([_in_a_node(rules) for rules in ("", RULES)] for _ in range(ROUNDS)), strict=True)
    print(
        f"{USERS:,} users, {ACTIVE} at work, {RATE:,} lines a second: the node takes {100 * min(without):.1f} % ",
        end="",
    )
    print(f"of a processor without ABUSE, {100 * min(with_it):.1f} % with it (the least of {ROUNDS})", flush=True)
    for peers in (20, 30, 35, 40, 45, 50, 60, 90):
        found = sum(_is_found(random.Random(number), peers) for number in range(TORRENTS))
        print(f"encrypted torrents with {peers} new peers a minute: {100 * found / TORRENTS:.0f} % found in 5 minutes")
    print(machine())


def lines(rng: random.Random, number: int) -> Iterator[str]:
    """Access lines of random users at work, each to one of their targets."""
    for _ in range(number):
        user, place = rng.randrange(ACTIVE), rng.randrange(TARGETS)
        port = (443, 80, 8443)[place % 3] if place < TARGETS - 3 else 5000 + user + place
        yield (
            f"2026/11/22 12:00:00.000000 from 203.0.{user // 250}.{user % 250}:{rng.randrange(1024, 65536)} "
            f"accepted tcp:site{user * TARGETS + place}.example:{port} [in-0 >> direct] email: {user}.user"
        )


class _Limits:
    """Stands in for the limits and the journal."""

    def name_of(self, key: str) -> str:
        return key

    def tell(self, *_: object, **__: object) -> None:
        raise AssertionError("browsing is reported as abuse")


def _parsed(watched: bool) -> float:
    """Microseconds of processor time a line."""
    clock, written = Clock(), list(lines(random.Random(1), LINES))
    connections, abuse = _watching(clock)
    each = int(RATE * LOOK)
    began = time.process_time()
    for begin in range(0, LINES, each):
        clock.advance(LOOK)
        if watched:
            abuse.judge(connections.requests.collect(()), clock.seconds())
        for line in written[begin : begin + each]:
            connections.take(line)
    return 1e6 * (time.process_time() - began) / LINES


def _streamed(watched: bool) -> float:
    """Microseconds of processor time a connection of sing-box's stream, which has its begin and its end."""
    rng, table, clock = random.Random(1), Table(["in"]), Clock()
    _, abuse = _watching(clock)
    each = int(RATE * LOOK)
    batches = [[_connection(rng) for _ in range(each)] for _ in range(0, LINES, each)]
    began = time.process_time()
    for batch in batches:
        clock.advance(LOOK)
        if watched:
            abuse.judge(table.requests((), clock.seconds()), clock.seconds())
        for event in batch:
            table.take(event, clock.seconds())
    return 1e6 * (time.process_time() - began) / LINES


def _connection(rng: random.Random) -> ConnectionEvents:
    user, id = rng.randrange(ACTIVE), rng.randbytes(16).hex()
    source, target = f"203.0.{user // 250}.{user % 250}:{rng.randrange(1024, 65536)}", rng.randrange(TARGETS)
    known = Connection(id=id, inbound="in", network="tcp", source=source, user=f"{user}.user")
    known.destination = f"site{user * TARGETS + target}.example:443"
    end = ConnectionEvent(type=CLOSED, id=id, connection=known)
    end.connection.closed_at = 1
    return ConnectionEvents(events=[ConnectionEvent(id=id, connection=known), end])


def _watching(clock: Clock) -> tuple[Connections, Abuse]:
    there: Any = clock
    stub: Any = _Limits()
    rules = AbuseRules(by_kind(RULES))
    return Connections(there, {"in-0": Ingress(())}), Abuse(there, Generations(), stub, stub, rules)


def _memory() -> float:
    """Bytes for each user at work."""
    clock = Clock()
    connections, abuse = _watching(clock)
    connections.requests.collect(())
    for line in lines(random.Random(1), LINES):
        connections.take(line)
    requests = connections.requests.collect(())
    tracemalloc.start()
    abuse.judge(requests, 1.0)
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return used / ACTIVE


def _in_a_node(rules: str) -> float:
    """The part of a processor that a node takes."""
    portions = 100
    with stage(ABUSE=rules) as on:
        on.controller.start(backing(USERS).request())
        pipe = os.open(f"/proc/{on.node.newest_core()}/fd/1", os.O_WRONLY)
        blocks = [
            "".join(f"{line}\n" for line in lines(random.Random(n), RATE // portions)).encode() for n in range(500)
        ]
        time.sleep(2)
        before, began = processor(on.node.node_pid), time.monotonic()
        for number in range(int(SECONDS * portions)):
            time.sleep(max(0.0, began + number / portions - time.monotonic()))
            os.write(pipe, blocks[number % len(blocks)])
        took, used = time.monotonic() - began, processor(on.node.node_pid) - before
        os.close(pipe)
        return used / took


def _is_found(rng: random.Random, peers: int) -> bool:
    """Whether the watch finds a client that tries so many new peers a minute, over TCP and UDP, no port known."""
    watch, now = Watch(0.0), rng.uniform(0, SWARM_HALF)
    end = now + 300
    while (now := now + rng.expovariate(peers / 60)) < end:
        port = rng.choices((51413, rng.randrange(1024, 65536)), (1, 4))[0]
        target = ".".join(str(rng.randrange(1, 255)) for _ in range(4)) + f":{port}"
        if [*watch.judge(Request("anna", b"\x7f\0\0\2", "in", target, rng.random() < 0.5), now)]:
            return True
    return False


if __name__ == "__main__":
    main()
