"""Disk, memory and core of a real node agree, after any concurrent calls and crashes."""

from __future__ import annotations

import os
import random
import signal
import sqlite3
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from http.client import HTTPException

import pytest

from node.client import NoReply
from protos.service_pb2 import User, UsersStat, UserStat
from scripts.staging.backend import chunks
from scripts.staging.controller import Controller, ControllerError
from scripts.staging.echo import EchoServer
from scripts.staging.inbounds import Kind
from scripts.staging.node import NodeProcess
from scripts.staging.users import TestUser
from scripts.staging.wait import until
from tests.conftest import Place, control, gets_in, member, run, stays_out
from tests.harness.grounds import Ground

PEOPLE = [TestUser.new(f"user{number}@test") for number in range(6)]
# Errors of a controller's calls to a node that dies.
GONE = (ControllerError, NoReply, OSError, HTTPException)
CALLS = 5
SEED = 0


@pytest.fixture
def places(all_kinds: Mapping[str, Kind], ground: Ground) -> list[Place]:
    return [Place(all_kinds["vless-raw"], "home", ground=ground), Place(all_kinds["trojan-tls"], "work", ground=ground)]


class Crowd:
    """Concurrent controllers with random calls, and the crashes meanwhile."""

    def __init__(
        self, node: NodeProcess, places: list[Place], seed: int, event: Callable[[NodeProcess], object]
    ) -> None:
        self._node = node
        self._places = places
        self._random = random.Random(seed)
        self._event = event
        self._said = threading.Semaphore(0)

    def run(self) -> None:
        """Returns after all calls, once the node runs."""
        with ThreadPoolExecutor(4) as pool:
            talks = [pool.submit(self._talk, transport, self._calls()) for transport in ("rest", "grpc", "rest")]
            for _ in range(CALLS):
                self._said.acquire()
            self._event(self._node)
            for talk in talks:
                talk.result()

    def _talk(self, transport: str, calls: list[Callable[[Controller], object]]) -> None:
        with control(self._node, transport) as controller:
            for call in calls:
                with suppress(*GONE):
                    call(controller)
                self._said.release()

    def _calls(self) -> list[Callable[[Controller], object]]:
        return [self._call() for _ in range(CALLS)]

    def _call(self) -> Callable[[Controller], object]:
        some = [self._user(person) for person in self._random.sample(PEOPLE, 4)]
        extra = self._random.choice([{}, {}, {}, self._places[0].ground.other])
        return self._random.choice(
            [
                lambda controller: run(controller, self._places, some, **extra),
                lambda controller: controller.sync_users(some),
                lambda controller: controller.sync_user(*some[:2]),
                lambda controller: controller.sync_user(*some[2:]),
                lambda controller: controller.sync_chunked(chunks(some)),
            ]
        )

    def _user(self, person: TestUser) -> User:
        """A user in one inbound, in both or in none."""
        return member(person, *self._random.sample(self._places, self._random.randint(0, 2)))


def core_dies(node: NodeProcess) -> None:
    for pid in node.core_pids():
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def node_is_killed(node: NodeProcess) -> None:
    node.kill()
    node.start()


def node_ends(node: NodeProcess) -> None:
    node.stop()
    node.start()


def on_disk(node: NodeProcess) -> dict[str, set[str]]:
    """The users on disk, by inbound."""
    with closing(sqlite3.connect(f"{(node.state / 'state.db').as_uri()}?mode=ro", uri=True)) as connection:
        users = [User.FromString(packed) for (packed,) in connection.execute("SELECT packed FROM users")]
    return {tag: {user.email for user in users if tag in user.inbounds} for tag in ("home", "work")}


def in_memory(controller: Controller) -> set[str]:
    """The users that the node knows."""
    known = set()
    # A removed user is known until their traffic has been read.
    controller.stats(UsersStat, reset=True)
    for person in PEOPLE:
        try:
            controller.stats(UserStat, person.email)
            known.add(person.email)
        except ControllerError as error:
            assert error.status == "404", error
    return known


def in_core(node: NodeProcess, places: list[Place]) -> dict[str, set[str]]:
    pid = node.newest_core()
    return {place.tag: place.ground.users(node.state, pid, place.tag) for place in places}


def compared(node: NodeProcess, controller: Controller, places: list[Place], echo: EchoServer) -> bool:
    """True if they agree; else raises `AssertionError`."""
    assert controller.info().state == "running"
    disk, core = on_disk(node), in_core(node, places)
    assert in_memory(controller) == disk["home"] | disk["work"]
    if places[0].ground.refuses:
        assert core == disk
    for place in places:
        assert disk[place.tag] <= core[place.tag]
        barred = [person for person in PEOPLE if person.email in core[place.tag] - disk[place.tag]]
        assert all(stays_out(place, person, echo) for person in barred[:1])
    return True


@pytest.mark.parametrize("event", [core_dies, node_is_killed, node_ends])
def test_one_truth(
    event: Callable[[NodeProcess], object],
    own_node: NodeProcess,
    places: list[Place],
    echo: EchoServer,
) -> None:
    """In the end the same users are on disk, known to the node, and admitted by the core."""
    with control(own_node, "rest") as controller:
        run(controller, places, [member(person, *places) for person in PEOPLE])
        Crowd(own_node, places, SEED, event).run()
        until(lambda: compared(own_node, controller, places, echo), 15, "all is one")
        controller.sync_user(member(PEOPLE[0], places[0]))
        assert gets_in(places[0], PEOPLE[0], echo)
