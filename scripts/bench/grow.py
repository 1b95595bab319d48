"""Cost of a Start that brings many users to a running core, by protocol, and on five inbounds at once.

`python -m scripts.bench.grow [BASE [MORE [NAME ...]]]` starts a core with BASE users (500), then sends the same
configuration with MORE more (12,000), then without those again. A NAME is a kind of inbound, or several joined by `+`.
*drops* counts the open connections of a remaining user that ended, *cores* the cores that took over, *wait* is the
longest GetBaseInfo meanwhile, and *one* the time of a single user's change sent just after the many.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from protos.service_pb2 import Backend, User
from scripts.bench.stage import Links, Stage, machine, stage, timed
from scripts.staging import certs
from scripts.staging.backend import backend_config, user
from scripts.staging.core import XrayClient
from scripts.staging.inbounds import SERVER_NAME, Kind, kinds
from scripts.staging.ports import free_port
from scripts.staging.users import TestUser

FIVE = "vless-raw+vmess-raw+trojan-tls+shadowsocks-chacha20+shadowsocks-2022-aes-128"
NAMES = (
    "vless-raw",
    "vless-grpc-tls",
    "vmess-raw",
    "trojan-tls",
    "shadowsocks-chacha20",
    "shadowsocks-2022-aes-128",
    "hysteria2",
    FIVE,
)
LIVE = 50
# Seconds between the Start and the change of a single user that follows it.
BEHIND = 0.1


def main(base: int, more: int, names: Sequence[str]) -> None:
    print(machine())
    print(f"{base} users, {more} more: seconds")
    print(f"{'':26} {'added':>7} {'one':>6} {'removed':>8} {'one':>6} {'drops':>6} {'cores':>6} {'wait':>6}")
    with stage() as on:
        known = kinds(certificate(on), 1)
        for name in names:
            row(on, name, known, base, more)
    print(machine())


def certificate(on: Stage) -> certs.Certificate:
    directory = on.directory / "inbounds"
    directory.mkdir()
    return certs.make(directory, [SERVER_NAME])


def row(on: Stage, name: str, known: Mapping[str, Kind], base: int, more: int) -> None:
    places = {kind: known[kind] for kind in name.split("+")}
    ports = {tag: free_port() for tag in places}
    config = backend_config([kind.inbound(ports[tag], tag) for tag, kind in places.items()])
    live = TestUser.new("live")
    crowd = [user(TestUser.new(f"{number}.user"), places) for number in range(base - 1)]
    few = [user(live, places), *crowd]
    many = few + [user(TestUser.new(f"{number}.more"), places) for number in range(more)]
    on.controller.start(Backend(config=config, users=few))
    socks, tag = free_port(), next(iter(places))
    with XrayClient({socks: places[tag].outbound(ports[tag], live)}), Links(socks, on.echo, LIVE) as links:
        cores, waits = on.core, list[float]()
        with asking(on, waits):
            added = both(on, Backend(config=config, users=many), crowd[0], places)
            changed = int(on.core != cores)
            cores = on.core
            removed = both(on, Backend(config=config, users=few), crowd[1], places)
            changed += int(on.core != cores)
        figures = f"{added[0]:>7.2f} {added[1]:>6.2f} {removed[0]:>8.2f} {removed[1]:>6.2f}"
        print(f"{short(name):26} {figures} {links.drops():>6} {changed:>6} {max(waits):>6.2f}", flush=True)
    on.controller.stop()


def both(on: Stage, start: Backend, one: User, places: Mapping[str, Kind]) -> tuple[float, float]:
    """Seconds of a Start, and of the change of one user sent just after it."""
    other = user(TestUser.new(one.email), places)
    with ThreadPoolExecutor(1) as pool:
        many = pool.submit(timed, lambda: on.controller.start(start))
        time.sleep(BEHIND)
        single = timed(lambda: on.controller.sync_user(other))
        return many.result(), single


@contextmanager
def asking(on: Stage, waits: list[float]) -> Iterator[None]:
    """Inside, call GetBaseInfo repeatedly and append the seconds of each call to `waits`."""
    over = threading.Event()

    def ask() -> None:
        while not over.wait(0.05):
            waits.append(timed(lambda: on.controller.info()))

    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask)
        try:
            yield
        finally:
            over.set()
            asked.result()


def short(name: str) -> str:
    return f"{name.count('+') + 1} inbounds" if "+" in name else name


if __name__ == "__main__":
    words = sys.argv[1:]
    main(int(words[0]) if words else 500, int(words[1]) if len(words) > 1 else 12_000, words[2:] or NAMES)
