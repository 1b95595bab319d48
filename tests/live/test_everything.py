"""Everything at once: short rounds in every run, many long ones nightly, and one precisely timed situation."""

from __future__ import annotations

import itertools
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path

import pytest

from protos.service_pb2 import Limits, User
from scripts.staging import plain_vless, transfer
from scripts.staging.controller import Controller, RestController, RpcController
from scripts.staging.echo import EchoServer
from scripts.staging.inbounds import Kind
from scripts.staging.node import NodeProcess
from scripts.staging.users import TestUser
from scripts.staging.wait import until
from tests.conftest import Place, daily, member, run
from tests.everything import agreement, rounds
from tests.everything.calls import at_once
from tests.everything.options import CORES, COURSES, Options
from tests.everything.world import World
from tests.harness.grounds import Ground

# Rounds of each of the courses: twelve on each core.
ROUNDS = 2
SHORT = 6.0
# Seconds from a controller's removal until the user must be cut, on a busy machine.
OUT = 4.0

_seeds = itertools.count(1, 1000)
_SEEDS: Mapping[tuple[str, str], int] = {
    (core, course): next(_seeds) for core, course in itertools.product(CORES, COURSES)
}


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("course", COURSES)
@pytest.mark.parametrize("core", CORES)
def test_rounds(core: str, course: str, tmp_path: Path) -> None:
    """After each round everything agrees."""
    assert not rounds.run(Options(core, _SEEDS[core, course], ROUNDS, COURSES[course]), tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("core", daily(["xray"], ["xray", "sing-box"]))
def test_short_round(core: str, tmp_path: Path) -> None:
    """A round of some seconds, without harm to cores."""
    assert not rounds.run(Options(core, 1, 1, replace(COURSES["crowded"], seconds=SHORT)), tmp_path)


@pytest.mark.nightly
def test_a_difference_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A state file with a removed user differs from memory, connections and the core."""
    with (
        World(Options("xray", 1, 1, COURSES["crowded"]), tmp_path) as world,
        closing(RpcController(world.node)) as controller,
    ):
        rounds.start(world, controller)
        assert not agreement.differences(world, controller)
        before = agreement.on_disk(world)
        controller.sync_user(User(email=world.steady.email))
        monkeypatch.setattr(agreement, "on_disk", lambda _: before)
        found = "\n".join(agreement.differences(world, controller))
    assert "memory has [], disk ['steady@test']" in found
    for tag in world.kinds:
        assert f"is out and should be in at {tag};" in found
        assert f"the core has [] in {tag}, and should have ['steady@test']" in found


class Moment:
    """A node with as many draining cores as allowed (one), and four users connected to the current core."""

    def __init__(self, node: NodeProcess, place: Place, echo: EchoServer) -> None:
        self.node, self.place, self._echo = node, place, echo
        names = ("removed", "over", "stays", "comes")
        self.removed, self.over, self.stays, self.comes = (TestUser.new(f"{name}@test") for name in names)
        self.links: dict[str, socket.socket] = {}
        self.ended: dict[str, float] = {}

    @property
    def users(self) -> list[User]:
        return [member(person, self.place) for person in (self.removed, self.over, self.stays)]

    def open(self, controller: Controller, stack: ExitStack) -> None:
        run(controller, [self.place], self.users)
        stack.enter_context(self.connect(self.stays))
        run(controller, [self.place], self.users, **self.place.ground.other)
        until(lambda: len(self.node.core_pids()) == 2, what="one core drains")
        for person in (self.removed, self.over, self.stays):
            self.links[person.email] = stack.enter_context(self.connect(person))

    def connect(self, person: TestUser) -> socket.socket:
        return plain_vless.connect(self.place.port, person.uuid, self._echo)

    def is_in(self, person: TestUser) -> bool:
        """Whether a new connection lives; those of barred users are cut at once."""
        try:
            with self.connect(person) as link:
                return not ends(link, 0.7)
        except OSError:
            return False

    def watch(self, person: TestUser) -> None:
        """Record when this user's connection ends."""
        if ends(self.links[person.email], 15):
            self.ended[person.email] = time.monotonic()


def ends(link: socket.socket, seconds: float) -> bool:
    """Whether the connection ends within so many seconds of repeated use."""
    try:
        until(lambda: has_ended(link), seconds, "the connection ends")
    except AssertionError:
        return False
    return True


def has_ended(link: socket.socket) -> bool:
    try:
        transfer.small_echo(link, b"still there")
    except OSError:
        return True
    return False


def addition(moment: Moment, controller: Controller) -> None:
    controller.sync_user(member(moment.comes, moment.place))


def another_start(moment: Moment, controller: Controller) -> None:
    run(controller, [moment.place], [*moment.users[1:], member(moment.comes, moment.place)])


@pytest.fixture
def moment(
    tmp_path: Path, all_kinds: Mapping[str, Kind], ground: Ground, echo: EchoServer
) -> Iterator[tuple[Moment, Controller]]:
    place = Place(all_kinds["vless-raw"], "in", ground=ground)
    with NodeProcess(tmp_path, DRAIN_GENERATIONS="1") as node, ExitStack() as stack:
        controller = stack.enter_context(closing(RpcController(node)))
        found = Moment(node, place, echo)
        found.open(controller, stack)
        yield found, controller


@pytest.mark.parametrize("change", [addition, another_start])
def test_removal_limits_and_overlap_at_once(
    moment: tuple[Moment, Controller], change: Callable[[Moment, Controller], None]
) -> None:
    """A removal and a limit do not wait for the core of another change, and affect no other user."""
    scene, controller = moment
    past = Limits(expires_at=int(time.time()) - 5)
    with closing(RpcController(scene.node)) as second, ThreadPoolExecutor(2) as pool:
        watches = [pool.submit(scene.watch, person) for person in (scene.removed, scene.over)]
        began = time.monotonic()
        at_once(
            lambda: change(scene, controller),
            lambda: second.sync_user(User(email=scene.removed.email)),
            lambda: RestController(scene.node).set_limits({scene.over.email: past}),
        )
        for watch in watches:
            watch.result()
    took = {email: round(ended - began, 2) for email, ended in scene.ended.items()}
    assert took.keys() == {scene.removed.email, scene.over.email}
    assert max(took.values()) < OUT, f"seconds until the connections were cut: {took}"
    assert not scene.is_in(scene.removed)
    assert not scene.is_in(scene.over)
    assert scene.is_in(scene.stays)
    until(lambda: scene.is_in(scene.comes), 15, "the new user is in")
    assert not has_ended(scene.links[scene.stays.email])
