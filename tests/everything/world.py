"""A node with its environment: inbounds, users with two sets of credentials each, and the faults found."""

from __future__ import annotations

import random
import re
import threading
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

from drivers.sing_box.tally import LACKING
from protos.service_pb2 import Backend, Limits, Quota, Speed, User
from scripts.staging import certs
from scripts.staging.backend import user as message_of
from scripts.staging.controller import RestController, RpcController
from scripts.staging.core import XrayClient
from scripts.staging.inbounds import SERVER_NAME, Kind, kinds
from scripts.staging.node import NodeProcess
from scripts.staging.ports import free_port
from scripts.staging.users import TestUser
from tests.everything import small
from tests.everything.bills import Bills
from tests.everything.far_end import FarEnd, Roads
from tests.everything.options import CORES, IDLE, PLACES, Executables, Options
from tests.harness.grounds import SING_BOX, XRAY, Ground

PEOPLE = 7
# Seconds that a core may drain, and that the node waits for a Start after a deployed panel's Stop.
DRAIN_TIMEOUT, STOP_GRACE = 25, 2
_SOURCE = "127.0.0.2"
# `drivers.sing_box.tally.LACKING`, in the log.
_OMITTED = re.compile("#warn\\] ([0-9,]+)" + re.escape(LACKING.removeprefix("{:,}")))
# The difference between configurations.
_LOGS: Mapping[Ground, Sequence[Mapping[str, str]]] = {
    XRAY: ({"loglevel": "warning"}, {"loglevel": "error"}),
    SING_BOX: ({"level": "warn"}, {"level": "error"}),
}


class World:
    """A running node, inside its `with` block, and messages for it.

    `done` counts what happened by name, `refused` the errors of controllers' calls; `faults` are the failures found.
    `likely` are the credentials and inbounds that were sent last for each user.
    """

    def __init__(self, options: Options, directory: Path) -> None:
        self.options = options
        self.grounds: Executables = CORES[options.core]()
        made = kinds(certs.make(directory, [SERVER_NAME]), free_port())
        self.kinds: dict[str, Kind] = {tag: made[name] for tag, name in PLACES.items()}
        self._idle = made["hysteria2"]
        self._idle_port = free_port()
        self.people = [[TestUser.new(f"user{number}@test") for _ in range(2)] for number in range(PEOPLE)]
        self.steady = TestUser.new("steady@test")
        self.node = _node(options, directory, self.grounds)
        self.far_end = FarEnd()
        self.bills = Bills(self.far_end, self._omitted, mixes=SING_BOX in self.grounds)
        proxied = [tag for tag in self.kinds if tag != Roads.plain]
        proxies = {(tag, person.uuid): free_port() for tag in proxied for person in self.credentials}
        self.roads = Roads(self.far_end, {tag: free_port() for tag in self.kinds}, proxies)
        # By user, while they open a connection.
        self.opening = {person.email: threading.Lock() for person in self.credentials}
        self.done: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self.faults: list[str] = []
        self.likely: dict[int, tuple[TestUser, list[str]]] = {}

    @property
    def credentials(self) -> list[TestUser]:
        """All sets of credentials of all users."""
        return [self.steady, *(person for both in self.people for person in both)]

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            stack.enter_context(self.far_end)
            stack.enter_context(XrayClient(self._client_routes()))
            stack.enter_context(self.node)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, trace)

    def fault(self, text: str) -> None:
        self.faults.append(text)
        print(f"  {text}", flush=True)

    def _omitted(self) -> int:
        """The bytes that cores without counters omitted; the node reports the number when such a core ends."""
        found = (_OMITTED.search(line) for line in self.node.lines)
        return sum(int(match[1].replace(",", "")) for match in found if match)

    def controllers(self) -> list[RestController | RpcController]:
        """Four controllers, the last one with the dialect of deployed panels."""
        node = self.node
        panel = RestController(node, dialect="x-api-key")
        return [RestController(node), RpcController(node), RpcController(node), panel]

    def user(self, number: int, rng: random.Random, places: Iterable[str] | None = None, limited: bool = True) -> User:
        """The user with one of their sets of credentials and a random spelling; in random inbounds without `places`."""
        person = rng.choice(self.people[number])
        tags = rng.sample(list(self.kinds), rng.randint(0, len(self.kinds))) if places is None else list(places)
        message = User(email=rng.choice([person.email, person.email.upper(), person.email.title()]), inbounds=tags)
        for kind in self.kinds.values():
            message.proxies.MergeFrom(kind.proxy(person))
        if limited and rng.random() < 0.25 and (limits := self.limits(rng)) is not None:
            message.limits.CopyFrom(limits)
        self.likely[number] = person, tags
        return message

    def limits(self, rng: random.Random) -> Limits | None:
        """Random limits that take effect within seconds; None removes a user's own."""
        soon = int(time.time()) + rng.choice([-5, 1, 3, 1000])
        quota = Quota(bytes=rng.choice([1000, 300_000, 5_000_000, 10**10]), since=rng.choice([0, 1, 2]))
        speed = Speed(down=8_000_000, up=4_000_000)
        return rng.choice(
            [
                None,
                Limits(),
                Limits(expires_at=soon),
                Limits(bytes=quota),
                Limits(addresses=2),
                Limits(speed=speed),
            ]
        )

    def crowd(self, rng: random.Random) -> list[User]:
        """The user who is always allowed, and some of the others."""
        return [
            self.always(),
            *(self.user(number, rng) for number in rng.sample(range(PEOPLE), rng.randint(0, PEOPLE))),
        ]

    def always(self) -> User:
        return message_of(self.steady, self.kinds)

    def backend(self, rng: random.Random, users: Iterable[User], whole: bool = False) -> Backend:
        """One of the configurations; unless `whole`, some lack the last inbound."""
        ground = rng.choice(list(self.grounds))
        inbounds = [ground.inbound(kind, self.roads.ports[tag], tag) for tag, kind in self.kinds.items()]
        if not whole and rng.random() < 0.2:
            inbounds.pop()
        if self.options.course.idle:
            inbounds.append(ground.inbound(self._idle, self._idle_port, IDLE))
        return ground.backend(inbounds, users, log=rng.choice(_LOGS[ground]))

    def _client_routes(self) -> dict[int, dict[str, object]]:
        by_uuid = {person.uuid: person for person in self.credentials}
        return {
            port: self.kinds[tag].outbound(self.roads.ports[tag], by_uuid[uuid], source=_SOURCE)
            for (tag, uuid), port in self.roads.proxies.items()
        }


def _node(options: Options, directory: Path, grounds: Executables) -> NodeProcess:
    settings = {
        "DRAIN_TIMEOUT": str(DRAIN_TIMEOUT),
        "DRAIN_GENERATIONS": str(options.course.drains),
        "STOP_GRACE": str(STOP_GRACE),
        **{ground.variable: str(executable) for ground, executable in grounds.items()},
    }
    if options.course.apart:
        settings |= {"USER_INBOUNDS": "on", "WEIGHTS": "home: 0.5; work 00:00-12:00: 3"}
    node = NodeProcess(directory, **settings)
    if SING_BOX in grounds:
        node.sing_box = grounds[SING_BOX].resolve()
    if options.course.small:
        node.program = small.program(directory)
    return node
