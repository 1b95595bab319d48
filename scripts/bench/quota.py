"""Overrun of users' quotas, and the cost of enforcing them.

`python -m scripts.bench.quota` downloads at some speeds through each core until the connection is cut, and prints how
many bytes beyond the quota were counted and received. Then 500 of 10,000 users with quotas move bytes all the time: it
prints the node's processor time, next to that of the same users without limits, and the lag of its event loop.
"""

from __future__ import annotations

import socket
import struct
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from urllib.request import Request, urlopen

from protos.service_pb2 import Backend, BackendType, Limits, Quota, Speed
from scripts.bench.load import loading
from scripts.bench.stage import KIND, Stage, backing, machine, processor, stage
from scripts.staging import sing_box
from scripts.staging.acceptor import Acceptor
from scripts.staging.backend import backend_config, user
from scripts.staging.ports import free_port
from scripts.staging.target import credentials
from scripts.staging.users import TestUser

MIB = 1024**2
# Bits a second, and the quota in bytes that a download at this speed exceeds.
SPEEDS = ((1e6, MIB), (50e6, 50 * MIB), (500e6, 500 * MIB))
# SECONDS is longer than the minute that the node's lag metric covers.
USERS, ACTIVE, SECONDS = 10_000, 500, 65.0
# Seconds between two readings of counters by the node; its default.
INTERVAL = "10"
# A quota far above and one near the use in this bench, and the latter with all other limits.
FAR, CLOSE = Limits(bytes=Quota(bytes=10**12)), Limits(bytes=Quota(bytes=10**9))
ALL = Limits(bytes=CLOSE.bytes, addresses=3, speed=Speed(down=10_000_000), expires_at=4_000_000_000)
LIMITS = {"no limits": None, "a quota, far": FAR, "a quota, near": CLOSE, "all limits": ALL}
_SO_MAX_PACING_RATE = 47
_SOURCE = "127.0.0.2"


def main() -> None:
    print(machine())
    print(f"{'':10} {'Mbit/s':>7} {'quota MiB':>10} {'counted over MiB':>17} {'got over MiB':>14} {'took s':>7}")
    for core in ("xray", "sing-box"):
        for speed, quota in SPEEDS:
            with stage(TRAFFIC_INTERVAL=INTERVAL) as on:
                overrun(on, core, speed, quota)
    for name, limits in LIMITS.items():
        with stage(TRAFFIC_INTERVAL=INTERVAL, METRICS_PORT=str(free_port())) as on:
            cost(on, name, limits)
    print(machine())


def overrun(on: Stage, core: str, speed: float, quota: int) -> None:
    """One download until the node cuts it at the quota."""
    person, port = TestUser.new("anna"), free_port()
    on.controller.start(_backend(core, port, person))
    on.controller.set_limits({person.email: Limits(bytes=Quota(bytes=quota, way=Quota.DOWN))})
    with _source(speed / 8) as source:
        began = time.monotonic()
        came = _download(port, person, source)
        took = time.monotonic() - began
    used = 0
    while used < quota:
        (row,) = on.controller.limits(person.email).users
        used = row.used_down
    over, more = (used - quota) / MIB, (came - quota) / MIB
    print(f"{core:10} {speed / 1e6:7.0f} {quota / MIB:10.0f} {over:17.2f} {more:14.2f} {took:7.2f}", flush=True)


def cost(on: Stage, name: str, limits: Limits | None) -> None:
    """Processor time while some users move bytes."""
    target = backing(USERS)
    on.controller.start(target.request())
    users = target.crowd.users
    if limits is not None:
        on.controller.set_limits({user.email: limits for user in users})
    with loading() as load:
        load.open([user.proxies.vless.id for user in users[:ACTIVE]], target.ports[0])
        before, began = processor(on.node.node_pid), time.monotonic()
        while (took := time.monotonic() - began) < SECONDS:
            load.move()
            time.sleep(0.5)
        used = (processor(on.node.node_pid) - before) / took
    print(f"{USERS} users, {ACTIVE} active, {name}: node {100 * used:.1f} % of a processor, ", end="")
    print(f"its event loop at most {1000 * _lag(on):.0f} ms late", flush=True)


def _lag(on: Stage) -> float:
    """The highest lag of the node's event loop in the last minute, in seconds."""
    url = f"http://127.0.0.1:{on.node.environment['METRICS_PORT']}/metrics"
    with urlopen(Request(url, headers=dict(credentials(on.node.key, "bearer")))) as page:
        lines = page.read().decode().splitlines()
    return float(next(line.split()[1] for line in lines if line.startswith("txnode_reactor_lag_seconds")))


def _backend(core: str, port: int, person: TestUser) -> Backend:
    users = [user(person, {"in": KIND})]
    if core == "xray":
        return Backend(config=backend_config([KIND.inbound(port, "in")]), users=users)
    inbound = {"type": "vless", "tag": "in", "listen": "127.0.0.1", "listen_port": port}
    return Backend(type=BackendType.SING_BOX, config=sing_box.config([inbound]), users=users)


@contextmanager
def _source(rate: float) -> Iterator[int]:
    """The port of a server that sends zeros at so many bytes a second until the connection ends."""
    port, block = free_port(), bytes(64 * 1024)

    def serve(connection: socket.socket) -> None:
        connection.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, struct.pack("L", int(rate)))
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 128 * 1024)
        while True:
            connection.sendall(block)

    with Acceptor("127.0.0.1", port, serve):
        yield port


def _download(port: int, person: TestUser, source: int) -> int:
    """Download with VLESS without encryption until the connection ends. Returns the bytes received."""
    target = struct.pack("!H", source) + b"\1" + socket.inet_aton("127.0.0.1")
    came = 0
    with socket.create_connection(("127.0.0.1", port), 30, (_SOURCE, 0)) as link, suppress(ConnectionError):
        link.sendall(b"\0" + uuid.UUID(person.uuid).bytes + b"\0\1" + target)
        while block := link.recv(MIB):
            came += len(block)
    return came


if __name__ == "__main__":
    main()
