"""Time until an added user can connect on sing-box, where a new core brings additions to VLESS; connections it drops.

`python -m scripts.bench.additions [--quick]` prints a row for each kind of change: `first` is the first user added
after a Start (5 times, each after a Stop), `changed` a changed credential (10 times), `in a row` an addition while
every earlier core still holds a connection (20 times; a connection is opened on each new core). Half of 50 live
connections use VLESS, half Shadowsocks-2022; calls go over gRPC and REST in turn. `in` is the time from sending the
user to the first VLESS connection that carries a byte, `reply` to the node's reply; `dropped` counts live connections
that ended.
"""

from __future__ import annotations

import argparse
import itertools
import socket
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

from node.base.errors import NodeError
from protos.service_pb2 import User
from scripts.bench.plain import alive, comes_in
from scripts.bench.stage import Links, Stage, machine, stage
from scripts.staging import plain_vless
from scripts.staging.controller import ControllerError, RestController
from scripts.staging.ports import free_port
from scripts.staging.sing_box import VLESS, Door, SingBoxClient, backend, shadowsocks_2022
from scripts.staging.users import TestUser

FIRST, CHANGED, IN_A_ROW = 5, 10, 20
USERS, HALF = 1_000, 25
# Seconds until a user must be able to connect, and for a core's probation to end before the measurement.
PATIENCE, SETTLED = 60.0, 6.0


@dataclass
class Figures:
    """Changes of one kind: seconds until the user could connect, seconds until the reply, and connections."""

    came: list[float] = field(default_factory=list)
    answered: list[float] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    dropped: int = 0
    live: int = 0


class Ground:
    """A node with 1,000 users on a VLESS and a Shadowsocks-2022 inbound, and controllers that take turns."""

    def __init__(self, on: Stage) -> None:
        self.on = on
        self.vless, self.shadowsocks = Door(VLESS), Door(shadowsocks_2022())
        self.live = TestUser.new("live")
        others = (TestUser.new(f"{number}.user") for number in range(1, USERS))
        self.users = [self.user(person) for person in (self.live, *others)]
        self._turns = itertools.cycle([on.controller, RestController(on.node, deadline=PATIENCE)])

    def user(self, person: TestUser) -> User:
        message = self.vless.user(person)
        message.MergeFrom(self.shadowsocks.user(person))
        return message

    def start(self) -> None:
        inbounds = [*self.vless.inbounds, *self.shadowsocks.inbounds]
        self.on.controller.start(backend(inbounds, self.users))

    def link(self) -> socket.socket:
        """A VLESS connection, on the newest core."""
        return plain_vless.connect(self.vless.port, self.live.uuid, self.on.echo)

    def change(self, person: TestUser, figures: Figures) -> None:
        """Send the user and wait until they can connect."""
        user, begun = self.user(person), time.monotonic()

        def call() -> None:
            try:
                next(self._turns).sync_user(user)
            except (ControllerError, NodeError) as error:
                figures.refused.append(str(error))
            figures.answered.append(time.monotonic() - begun)

        with ThreadPoolExecutor(1) as pool:
            reply = pool.submit(call)
            figures.came.append(comes_in(self.vless.port, user, self.on.echo, begun + PATIENCE) - begun)
            reply.result()

    @contextmanager
    def at_work(self, figures: Figures) -> Iterator[list[socket.socket]]:
        """Open the live connections; callers may append to the list. At the end, count those that ended."""
        proxy = free_port()
        with ExitStack() as stack:
            stack.enter_context(SingBoxClient({proxy: self.shadowsocks.outbounds(self.live)}))
            links = stack.enter_context(Links(proxy, self.on.echo, HALF))
            plain = [self.link() for _ in range(HALF)]
            yield plain
            figures.dropped += links.drops() + sum(not alive(link) for link in plain)
            figures.live += HALF + len(plain)
            for link in plain:
                link.close()


def first(ground: Ground, times: int) -> Figures:
    figures = Figures()
    for number in range(times):
        ground.on.controller.stop()
        ground.start()
        with ground.at_work(figures):
            ground.change(TestUser.new(f"{number}.first"), figures)
    return figures


def changed(ground: Ground, times: int) -> Figures:
    figures = Figures()
    ground.on.controller.stop()
    ground.start()
    with ground.at_work(figures):
        time.sleep(SETTLED)
        for _ in range(times):
            ground.change(TestUser.new("1.user"), figures)
    return figures


def in_a_row(ground: Ground, times: int) -> Figures:
    figures = Figures()
    ground.on.controller.stop()
    ground.start()
    with ground.at_work(figures) as links:
        time.sleep(SETTLED)
        for number in range(times):
            ground.change(TestUser.new(f"{number}.row"), figures)
            links.append(ground.link())
    return figures


def main(share: int) -> None:
    print(machine())
    print(f"sing-box; {USERS:,} users, {2 * HALF} live connections; seconds")
    columns = ("changes", "in median", "in worst", "reply median", "reply worst", "refused", "dropped", "of live")
    print(f"{'':>10} " + " ".join(f"{column:>13}" for column in columns))
    kinds: Iterable[tuple[str, Callable[[Ground, int], Figures], int]] = (
        ("first", first, FIRST),
        ("changed", changed, CHANGED),
        ("in a row", in_a_row, IN_A_ROW),
    )
    for name, work, times in kinds:
        with stage() as on:
            row(name, work(Ground(on), -(-times // share)))
    print(machine())


def row(name: str, figures: Figures) -> None:
    seconds = [middle_and_most(figures.came), middle_and_most(figures.answered)]
    words = " ".join(f"{figure:>13.2f}" for pair in seconds for figure in pair)
    lost = f"{len(figures.refused):>13} {figures.dropped:>13} {figures.live:>13}"
    print(f"{name:>10} {len(figures.came):>13} {words} {lost}", flush=True)
    for text in sorted(set(figures.refused)):
        print(f"{'':>12}{figures.refused.count(text)} x {text[:150]}")


def middle_and_most(figures: list[float]) -> tuple[float, float]:
    return statistics.median(figures), max(figures)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a third of the changes")
    main(3 if parser.parse_args().quick else 1)
