"""Time until a removed user is cut while the node is busy with others, and connections of others that it drops.

`python -m scripts.bench.removals [--quick]` prints a row for each core and situation, of five removals (`--quick`:
two). `collected`: an addition was sent 0.3 s before while the maximum number of cores drain, so that the node batches
additions; `coming`: another configuration was sent, and the removal follows once the new core's process runs;
`draining`: three older cores drain, and the user has a connection on each of them and on the current one.
All times are seconds from sending the removal: `cut` until the last of the user's live connections ended, `new` until
the last new connection that was not refused (the user tries 20 times a second), `reply` until the reply. `stayed`
counts users who could still use the node after 30 s. `dropped` are connections of uninvolved users that ended, of those
on the current and on draining cores; in `collected` the oldest core must end to make room for the new one, and its
connection is not counted.
"""

from __future__ import annotations

import argparse
import itertools
import socket
import statistics
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field

from node.base.errors import NodeError
from protos.service_pb2 import Backend, User
from scripts.bench.overlap import TAG, on_sing_box, on_xray
from scripts.bench.plain import Leaver, alive
from scripts.bench.stage import Crowd, Stage, machine, stage
from scripts.staging import plain_vless
from scripts.staging.controller import ControllerError, RestController
from scripts.staging.ports import free_port
from scripts.staging.wait import until

ROUNDS, QUICK = 5, 2
USERS = 1_000
# Seconds: probation of a core; from an addition to the removal; limit of a removal; without a connection afterwards.
SETTLED, AHEAD, PATIENCE, QUIET = 6.0, 0.3, 30.0, 1.0
# Draining cores in the situation `draining`.
DRAINING = 3
Request = Callable[[int, Crowd, int], Backend]


@dataclass
class Figures:
    """Figures of removals in one situation: seconds, and connections of uninvolved users."""

    cut: list[float] = field(default_factory=list)
    new: list[float] = field(default_factory=list)
    answered: list[float] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    stayed: int = 0
    dropped: int = 0
    live: int = 0


class Ground:
    """A node with users on one VLESS inbound, of whom `leaver` is removed."""

    def __init__(self, on: Stage, request: Request) -> None:
        self.on, self._request, self.port = on, request, free_port()
        self.crowd = Crowd(USERS, [TAG], steady=3)
        self._versions = itertools.count()
        self._names = itertools.count()
        self.rest = RestController(on.node, deadline=60)

    @property
    def leaver(self) -> User:
        return self.crowd.users[2]

    def start(self) -> None:
        """Start another configuration, with all users."""
        self.on.controller.start(self._request(self.port, self.crowd, next(self._versions)))

    def add(self) -> None:
        self.rest.sync_user(self.crowd.make(f"{next(self._names)}.new"))

    def link(self, user: User) -> socket.socket:
        return plain_vless.connect(self.port, user.proxies.vless.id, self.on.echo)


class Scene:
    """Connections during one removal: those of the leaver and of an uninvolved user."""

    def __init__(self, ground: Ground) -> None:
        self.ground = ground
        self.held: list[socket.socket] = []
        self.others: list[socket.socket] = []
        # On a core that must end: not counted.
        self.lost: list[socket.socket] = []

    def connect(self) -> None:
        self.held.append(self.ground.link(self.ground.leaver))
        self.others.append(self.ground.link(self.ground.crowd.users[0]))

    def close(self) -> None:
        for link in [*self.held, *self.others, *self.lost]:
            link.close()


def collected(scene: Scene, pool: ThreadPoolExecutor) -> Future[None]:
    """Send an addition while the only core that may drain does so."""
    ground = scene.ground
    scene.lost.append(ground.link(ground.crowd.users[1]))
    ground.start()
    time.sleep(SETTLED)
    scene.connect()
    adding = pool.submit(ground.add)
    time.sleep(AHEAD)
    return adding


def coming(scene: Scene, pool: ThreadPoolExecutor) -> Future[None]:
    ground = scene.ground
    scene.connect()
    before = set(ground.on.node.core_pids())
    starting = pool.submit(ground.start)
    until(lambda: set(ground.on.node.core_pids()) - before, 20, "another core runs")
    return starting


def draining(scene: Scene, pool: ThreadPoolExecutor) -> Future[None]:
    for _ in range(DRAINING):
        scene.connect()
        scene.ground.start()
        time.sleep(SETTLED)
    scene.connect()
    return pool.submit(lambda: None)


# Each situation, and the settings it needs.
SITUATIONS: dict[str, tuple[Callable[[Scene, ThreadPoolExecutor], Future[None]], dict[str, str]]] = {
    "collected": (collected, {"DRAIN_GENERATIONS": "1"}),
    "coming": (coming, {}),
    "draining": (draining, {}),
}


def removal(ground: Ground, situation: str, figures: Figures) -> None:
    """Measure one removal, from a fresh core, so that no earlier one drains."""
    ground.on.controller.stop()
    ground.start()
    scene = Scene(ground)
    with ThreadPoolExecutor(2) as pool:
        try:
            meanwhile = SITUATIONS[situation][0](scene, pool)
            leave(scene, pool, figures)
            with suppress(ControllerError, NodeError):
                meanwhile.result()
            figures.dropped += sum(not alive(link) for link in scene.others)
            figures.live += len(scene.others)
        finally:
            scene.close()


def leave(scene: Scene, pool: ThreadPoolExecutor, figures: Figures) -> None:
    ground, user = scene.ground, scene.ground.leaver
    with Leaver(ground.port, user.proxies.vless.id, ground.on.echo, list(scene.held)) as leaver:
        leaver.sent = time.monotonic()
        reply = pool.submit(remove, ground, user.email, figures)
        try:
            until(lambda: leaver.settled(QUIET), PATIENCE, "the user is cut")
        except AssertionError:
            figures.stayed += 1
        reply.result()
        figures.cut.append(PATIENCE if leaver.cut is None else leaver.cut)
        figures.new.append(leaver.newest)
    scene.held.clear()


def remove(ground: Ground, email: str, figures: Figures) -> None:
    begun = time.monotonic()
    try:
        ground.on.controller.sync_user(User(email=email))
    except (ControllerError, NodeError) as error:
        figures.faults.append(str(error))
    figures.answered.append(time.monotonic() - begun)


def main(rounds: int) -> None:
    print(machine())
    print(f"{USERS:,} users, {rounds} removals each; seconds: median, worst")
    columns = ("cut", "new", "reply", "stayed", "dropped")
    print(f"{'':>20} " + " ".join(f"{column:>15}" for column in columns))
    for name, request in {"Xray": on_xray, "sing-box": on_sing_box}.items():
        for situation, (_, settings) in SITUATIONS.items():
            with stage(**settings) as on:
                ground, figures = Ground(on, request), Figures()
                for _ in range(rounds):
                    removal(ground, situation, figures)
                row(f"{name} {situation}", figures)
    print(machine())


def row(name: str, figures: Figures) -> None:
    taken = (figures.cut, figures.new, figures.answered)
    seconds = " ".join(f"{statistics.median(found):>7.2f} {max(found):>7.2f}" for found in taken)
    print(f"{name:>20} {seconds} {figures.stayed:>15} {f'{figures.dropped} of {figures.live}':>15}", flush=True)
    for text in sorted(set(figures.faults)):
        print(f"{'':>22}{figures.faults.count(text)} x {text[:150]}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=f"{QUICK} removals each")
    main(QUICK if parser.parse_args().quick else ROUNDS)
