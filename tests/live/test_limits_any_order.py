"""Limits, users, Starts and crashes in random order and at once: at the end the core, memory and disk agree."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress

import psutil
import pytest

from node.base.errors import NodeError
from protos.service_pb2 import Limits, ListUsersRequest, ListUsersResponse, Quota, User
from scripts.staging import transfer
from scripts.staging.controller import Controller, ControllerError, RpcController
from scripts.staging.cover import CoverServer
from scripts.staging.echo import EchoServer
from scripts.staging.inbounds import Kind
from scripts.staging.node import NodeProcess
from scripts.staging.users import TestUser
from scripts.staging.wait import until
from tests.conftest import Place, connection, control, member, run, settled
from tests.harness.grounds import Ground

KIB = 1024
PEOPLE = [TestUser.new(f"user{number}@test") for number in range(8)]
# Duration of the random operations; longer in a nightly run.
SECONDS = float(os.environ.get("TXNODE_TEST_CHAOS", "6"))


class Chaos:
    """All operations that affect limits, at random."""

    def __init__(self, node: NodeProcess, controller: Controller, place: Place, echo: EchoServer, seed: int) -> None:
        self._node, self._controller, self._place, self._echo = node, controller, place, echo
        self._chance = random.Random(seed)
        # The limits in the users' own messages.
        self.said: dict[str, Limits | None] = {person.email: None for person in PEOPLE}

    def limits(self) -> Limits | None:
        """Random limits that take effect within seconds."""
        soon = int(time.time()) + self._chance.choice([-5, 1, 2, 1000])
        size = self._chance.choice([KIB, 300 * KIB, 10**9])
        period = self._chance.choice([Quota.NEVER, Quota.DAY])
        return self._chance.choice(
            [None, Limits(expires_at=soon), Limits(bytes=Quota(bytes=size, period=period)), Limits(addresses=2)]
        )

    def person(self) -> TestUser:
        return self._chance.choice(PEOPLE)

    def user(self, person: TestUser) -> User:
        user = member(person, self._place)
        if (said := self.said[person.email]) is not None:
            user.limits.CopyFrom(said)
        return user

    def everybody(self) -> list[User]:
        return [self.user(person) for person in PEOPLE]

    def set_limits(self) -> None:
        self._controller.set_limits({self.person().email: self.limits()})

    def sync_one(self) -> None:
        person = self.person()
        self.said[person.email] = self.limits()
        self._controller.sync_user(self.user(person))

    def remove_and_add(self) -> None:
        person = self.person()
        self._controller.sync_user(User(email=person.email))
        self._controller.sync_user(self.user(person))

    def sync_all(self) -> None:
        self._controller.sync_users(self.everybody())

    def start(self) -> None:
        extra = {"log": self._place.ground.brief if self._chance.random() < 0.5 else self._place.ground.verbose}
        run(self._controller, [self._place], self.everybody(), **extra)

    def carry(self) -> None:
        with connection(self._place, self.person(), self._echo) as link:
            link.settimeout(2)
            transfer.download(link, 100 * KIB)

    def kill_core(self) -> None:
        for pid in self._node.core_pids():
            with suppress(psutil.NoSuchProcess):
                psutil.Process(pid).kill()

    def let_it_work(self, lines: int, seconds: float) -> None:
        """Wait until the node has logged a random number of lines, for up to so many seconds."""
        goal = len(self._node.lines) + self._chance.randrange(lines)
        with suppress(AssertionError):
            until(lambda: len(self._node.lines) >= goal, seconds)

    def is_over(self, seconds: float) -> bool:
        """Whether these many seconds of random calls are enough."""
        return seconds > SECONDS

    def act(self, works: Mapping[Callable[[], None], int]) -> None:
        """Make random calls repeatedly, whatever their results."""
        began = time.monotonic()
        while not self.is_over(time.monotonic() - began):
            (work,) = self._chance.choices([*works], [*works.values()])
            with suppress(ControllerError, NodeError, OSError):
                work()


def confirmed(controller: RpcController) -> dict[str, bool]:
    """The confirmed users, from the node."""
    rows = controller.call("ListUsers", ListUsersResponse, ListUsersRequest()).users
    return {row.name: bool(row.confirmed) for row in rows}


def off(controller: Controller) -> set[str]:
    return {row.name for row in controller.limits(off=True).users}


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1])
def test_all_agree_at_the_end(
    ground: Ground,
    seed: int,
    own_node: NodeProcess,
    all_kinds: Mapping[str, Kind],
    cover: CoverServer,
    echo: EchoServer,
) -> None:
    place = Place(all_kinds["vless-raw"], "in", ground=ground)
    with closing(RpcController(own_node)) as controller, control(own_node, "rest") as other:
        chaos = Chaos(own_node, controller, place, echo, seed)
        rest = Chaos(own_node, other, place, echo, seed + 100)
        with settled([place], cover):
            chaos.start()
        words = {chaos.set_limits: 5, chaos.sync_one: 5, chaos.remove_and_add: 2, chaos.sync_all: 2, chaos.start: 1}
        with ThreadPoolExecutor(3) as pool:
            done = [
                pool.submit(chaos.act, words),
                pool.submit(rest.act, {rest.set_limits: 5, rest.carry: 3, rest.kill_core: 1}),
                pool.submit(rest.act, {rest.carry: 1}),
            ]
            for each in done:
                each.result()
        for restarted in (False, True):
            if restarted:
                # Read the counters; the reply to the next call then confirms that they are on disk.
                controller.limits()
                controller.set_limits({PEOPLE[-1].email: Limits(bytes=Quota(bytes=10**12))})
                before = off(controller), {row.name: row.used_down for row in controller.limits().users}
                own_node.kill()
                own_node.start()
            until(lambda: controller.info().running, 30, "the core is back")
            until(lambda: agree(own_node, controller, place), 20, "core and memory agree")
            if restarted:
                after = off(controller), {row.name: row.used_down for row in controller.limits().users}
                # Users who expired meanwhile are barred, too.
                assert before[0] <= after[0]
                assert before[1] == after[1]


def agree(node: NodeProcess, controller: RpcController, place: Place) -> bool:
    """Barred users are refused, and all others are admitted."""
    gone, there = off(controller), confirmed(controller)
    if there.keys() != {person.email for person in PEOPLE}:
        return False
    if any(is_in == (name in gone) for name, is_in in there.items()):
        return False
    known = place.ground.users(node.state, node.newest_core(), place.tag)
    return not place.ground.refuses or known == there.keys() - gone
