"""Accuracy and cost of users' speed limits.

`python -m scripts.bench.speed [CORE ...]`: a user downloads over 1, 4 and 16 connections through each core, at some
limits, while a neighbour without a limit downloads too; it prints the speed of both. Then it prints the node's
processor time for many concurrent users with four connections each, who use all of their allowed speed.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from protos.service_pb2 import Backend, Limits, Speed, User
from scripts.bench.stage import KIND, Stage, machine, processor, stage
from scripts.staging import sing_box
from scripts.staging.backend import backend, user
from scripts.staging.plain_vless import Download, connect
from scripts.staging.ports import free_port
from scripts.staging.users import TestUser

CORES = ("xray", "sing-box")
SPEEDS, CONNECTIONS = (1, 10, 100), (1, 4, 16)
MBIT = 1_000_000
# Seconds until a speed is stable, and the minimum duration of a measurement.
SETTLE, SECONDS = 2.0, 5.0
# Bytes that the kernel sends in one burst on a path with a round trip as short as the loopback's.
BURST = 65_536
# Users of the second part, their connections each, and their speed.
MANY, EACH, SLOW = 500, 4, 1


def main(cores: Sequence[str]) -> None:
    print(machine())
    for core in cores:
        print(f"\n{core:10} {'asked':>6} {'connections':>12} {'got':>8} {'neighbour':>10}   Mbit/s")
        with stage() as on:
            exact(on, core)
        with stage() as on:
            cost(on, core)
    print(machine())


def exact(on: Stage, core: str) -> None:
    """Measure one user at each limit and number of connections, beside a neighbour without a limit."""
    anna, bert, port = TestUser.new("anna"), TestUser.new("bert"), free_port()
    on.controller.start(request(core, port, [anna, bert]))
    with download(on, port, [bert]) as neighbour:
        print(f"{'':10} {'':6} {'':12} {'':8} {speeds(neighbour)[0]:10.0f}   alone")
        for asked in SPEEDS:
            on.controller.set_limits({anna.email: Limits(speed=Speed(down=asked * MBIT))})
            for count in CONNECTIONS:
                # Seconds between two bursts of a connection.
                period = count * BURST / (asked * MBIT / 8)
                with download(on, port, [anna] * count) as limited:
                    time.sleep(SETTLE)
                    got, beside = speeds(limited, neighbour, seconds=period * math.ceil(SECONDS / period))
                    print(f"{'':10} {asked:6} {count:12} {got:8.2f} {beside:10.0f}", flush=True)
                # The core notices the end of the client with its next burst.
                time.sleep(period)


def cost(on: Stage, core: str) -> None:
    """Measure the node's processor time for many users at their limits."""
    people, port = [TestUser.new(f"{number}.user") for number in range(MANY)], free_port()
    on.controller.start(request(core, port, people))
    for name, limit in (("no limits", None), ("limited", Limits(speed=Speed(down=SLOW * MBIT)))):
        if limit is not None:
            on.controller.set_limits({person.email: limit for person in people})
        with download(on, port, [person for person in people for _ in range(EACH)]) as all_of_them:
            time.sleep(SETTLE)
            before, began = processor(on.node.node_pid), time.monotonic()
            (got,) = speeds(all_of_them)
            part = 100 * (processor(on.node.node_pid) - before) / (time.monotonic() - began)
        print(
            f"{MANY} users by {EACH} connections each, {name}: {got:.0f} Mbit/s, the node takes {part:.1f} % of a core"
        )


def request(core: str, port: int, people: Sequence[TestUser]) -> Backend:
    if core == "sing-box":
        door = sing_box.Door(sing_box.VLESS, port)
        return sing_box.backend(door.inbounds, [door.user(person) for person in people])
    users: list[User] = [user(person, {"in": KIND}) for person in people]
    return backend([KIND.inbound(port, "in")], users)


@contextmanager
def download(on: Stage, port: int, people: Sequence[TestUser]) -> Iterator[Download]:
    """A download over one connection for each of `people` (who may occur several times)."""
    some = Download(*[connect(port, person.uuid, on.echo) for person in people])
    try:
        yield some
    finally:
        some.close()


def speeds(*some: Download, seconds: float = SECONDS) -> list[float]:
    """The speed of each download in Mbit/s, over so many seconds."""
    began, before = time.monotonic(), [one.received for one in some]
    time.sleep(seconds)
    took, after = time.monotonic() - began, [one.received for one in some]
    return [8 * (now - then) / took / MBIT for now, then in zip(after, before, strict=True)]


if __name__ == "__main__":
    main(sys.argv[1:] or CORES)
