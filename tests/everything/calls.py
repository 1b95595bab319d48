"""Random calls of controllers."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

from protos.service_pb2 import (
    DropConnectionsRequest,
    DropConnectionsResponse,
    Inbounds,
    Limits,
    ListOnlineRequest,
    ListOnlineResponse,
    ListUsersRequest,
    ListUsersResponse,
    User,
    UserStat,
)
from scripts.staging.backend import chunks
from scripts.staging.controller import Controller, RestController, RpcController
from tests.everything.world import PEOPLE, World

Call = Callable[[], None]


class Calls:
    """One controller's calls. `weights` are their relative frequencies."""

    def __init__(self, world: World, controller: Controller, rng: random.Random, panel: bool) -> None:
        self._world, self._controller, self._rng = world, controller, rng
        self.weights: Mapping[Call, float] = self._of_a_panel() if panel else self._of_a_controller()

    def _of_a_controller(self) -> Mapping[Call, float]:
        return {
            self.change_one: 6,
            self.change_some: 3,
            self.remove: 2,
            self.remove_and_add: 3,
            self.replace_everybody: 3,
            self.replace_in_chunks: 2,
            self.set_limits: 5,
            self.look: 2,
            self.bill: 3,
            self.bill_one: 3,
            self.peek: 2,
            self.drop: 2,
            self.list_online: 1,
            self.start: 2,
            self.start_wrongly: 0.5,
            self.three_at_once: 1,
            self.interrupt: 1,
        }

    def _of_a_panel(self) -> Mapping[Call, float]:
        return {self.stop_and_start: 2, self.replace_everybody: 4, self.bill: 2, self.change_one: 2}

    def start(self) -> None:
        self._controller.start(self._world.backend(self._rng, self._world.crowd(self._rng)))

    def stop_and_start(self) -> None:
        """Stop and Start, as a panel sends them for each change of an operator."""
        backend = self._world.backend(self._rng, self._world.crowd(self._rng))
        self._controller.stop()
        time.sleep(self._rng.choice([0, 0.1, 1]))
        self._controller.start(backend)

    def start_wrongly(self) -> None:
        backend = self._world.backend(self._rng, self._world.crowd(self._rng))
        backend.config = backend.config.replace('"tag"', '"gat"', 1) if self._rng.random() < 0.5 else "{"
        self._controller.start(backend)

    def change_one(self) -> None:
        self._controller.sync_user(self._anybody())

    def change_some(self) -> None:
        self._controller.sync_user(*(self._anybody() for _ in range(self._rng.randint(2, 8))))

    def remove(self) -> None:
        self._controller.sync_user(self._world.user(self._number(), self._rng, places=[]))

    def remove_and_add(self) -> None:
        number = self._number()
        self._controller.sync_user(self._world.user(number, self._rng, places=[]))
        self._controller.sync_user(self._world.user(number, self._rng, places=self._world.kinds, limited=False))

    def replace_everybody(self) -> None:
        self._controller.sync_users(self._world.crowd(self._rng))

    def replace_in_chunks(self) -> None:
        self._controller.sync_chunked(chunks(self._world.crowd(self._rng), 2))

    def set_limits(self) -> None:
        people = self._rng.sample(self._world.people, self._rng.randint(1, 3))
        spelled = [self._rng.choice([both[0].email, both[0].email.upper()]) for both in people]
        self._controller.set_limits({email: self._world.limits(self._rng) for email in spelled})

    def look(self) -> None:
        self._controller.call("ListUsers", ListUsersResponse, ListUsersRequest())
        self._controller.limits()

    def bill(self) -> None:
        self._world.bills.take(self._controller)

    def bill_one(self) -> None:
        self._world.bills.take(self._controller, self._email())

    def peek(self) -> None:
        self._controller.stats(UserStat, self._email())
        self._controller.stats(Inbounds)
        self._controller.online(self._email())
        self._controller.online_ips(self._email())
        self._controller.backend_stats()

    def drop(self) -> None:
        """End the connections of a user, an address or an inbound; they may come back."""
        name, address, tag = (
            self._email(),
            f"127.0.0.{self._rng.randrange(2, 6)}",
            self._rng.choice([*self._world.kinds]),
        )
        asked = [
            DropConnectionsRequest(name=name),
            DropConnectionsRequest(name=name, inbound=tag),
            DropConnectionsRequest(address=address),
            DropConnectionsRequest(inbound=tag),
        ]
        self._controller.call("DropConnections", DropConnectionsResponse, self._rng.choice(asked))

    def list_online(self) -> None:
        self._controller.call("ListOnline", ListOnlineResponse, ListOnlineRequest(limit=self._rng.choice([0, 2])))

    def three_at_once(self) -> None:
        """Another configuration, a removal and an expiry at the same time."""
        world, rng = self._world, self._rng
        one, two = rng.sample(range(PEOPLE), 2)
        everybody = [world.user(number, rng, places=world.kinds, limited=False) for number in range(PEOPLE)]
        backend, removal = world.backend(rng, [world.always(), *everybody]), world.user(one, rng, places=[])
        over = {world.people[two][0].email: Limits(expires_at=int(time.time()) - 5)}
        with closing(RpcController(world.node)) as second:
            third = RestController(world.node)
            at_once(
                lambda: self._controller.start(backend),
                lambda: second.sync_user(removal),
                lambda: third.set_limits(over),
            )

    def interrupt(self) -> None:
        """A Start, or a Stop and a Start, while the core of an earlier change starts or takes over."""
        world, rng = self._world, self._rng
        user, earlier = self._anybody(), world.backend(rng, world.crowd(rng))
        later, other = world.backend(rng, world.crowd(rng)), RestController(world.node)
        change = rng.choice([lambda: other.sync_user(user), lambda: other.start(earlier)])
        stops = rng.random() < 0.5
        with ThreadPoolExecutor(1) as pool:
            changed = pool.submit(change)
            time.sleep(rng.uniform(0.05, 0.9))
            if stops:
                self._controller.stop()
            self._controller.start(later)
            # It may fail, as it was interrupted on purpose.
            changed.exception()

    def _number(self) -> int:
        return self._rng.randrange(PEOPLE)

    def _anybody(self) -> User:
        return self._world.user(self._number(), self._rng)

    def _email(self) -> str:
        return self._rng.choice(self._world.people)[0].email


def at_once(*calls: Callable[[], object]) -> None:
    """Make all calls at the same time, and wait for all. Raises the first error."""
    barrier = threading.Barrier(len(calls))

    def make(call: Callable[[], object]) -> None:
        barrier.wait()
        call()

    with ThreadPoolExecutor(len(calls)) as pool:
        for made in [pool.submit(make, call) for call in calls]:
            made.result()
