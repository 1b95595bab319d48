"""Compare the users of real connections, the node's lists, its state file and the core after a round."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from json import loads

from drivers.process.aliases import unaliased
from protos.service_pb2 import Backend, ListedUser, ListUsersRequest, ListUsersResponse, User
from scripts.staging.controller import Controller
from scripts.staging.users import TestUser
from tests.everything.world import World
from tests.harness.grounds import Ground

# Seconds until a barred user whom the core does not refuse has been cut.
_BARRED = 0.7


class Compared:
    """A snapshot of the node's replies and its state file, and the differences between them."""

    def __init__(self, world: World, controller: Controller, ground: Ground) -> None:
        self._world, self._ground = world, ground
        self._off = {row.name.lower() for row in controller.limits(off=True).users}
        rows = controller.call("ListUsers", ListUsersResponse, ListUsersRequest()).users
        self._listed = {row.name.lower(): row for row in rows}
        self._stored, self._tags = on_disk(world)

    def differences(self) -> Iterator[str]:
        yield from self._memory_and_disk()
        yield from self._connections()
        yield from self._list()
        yield from self._core()
        cores, most = len(self._world.node.core_pids()), 1 + self._world.options.course.drains
        if cores > most:
            yield f"{cores} cores run, of {most} at most"

    def _memory_and_disk(self) -> Iterator[str]:
        known = {key for key, row in self._listed.items() if row.inbounds or not row.leaving}
        if known != set(self._stored):
            yield f"memory has {sorted(self._listed)}, disk {sorted(self._stored)}"

    def _connections(self) -> Iterator[str]:
        """Try every set of credentials at every inbound."""
        tries = [(person, tag) for person in self._world.credentials for tag in self._world.kinds]
        with ThreadPoolExecutor(8) as pool:
            found = list(pool.map(lambda each: self._gets_in(*each), tries))
        for (person, tag), is_in in zip(tries, found, strict=True):
            if is_in != self._may(person, tag):
                which = [both.index(person) for both in self._world.people if person in both]
                are = "is in and should be out" if is_in else "is out and should be in"
                yield f"{person.email} with credentials {which} {are} at {tag}; {self._row(person.email)}"

    def _may(self, person: TestUser, tag: str) -> bool:
        user = self._stored.get(person.email)
        return (
            user is not None
            and person.email not in self._off
            and tag in self._tags
            and tag in user.inbounds
            and user.proxies.vless.id == person.uuid
        )

    def _gets_in(self, person: TestUser, tag: str) -> bool:
        try:
            flow = self._world.roads.open(person, tag, timeout=3)
        except OSError:
            return False
        try:
            flow.frame(10, 10)
            if not self._ground.refuses:
                time.sleep(_BARRED)
                flow.frame(10, 10)
        except OSError:
            return False
        finally:
            flow.close()
        return True

    def _list(self) -> Iterator[str]:
        """Every user must be confirmed in the expected inbounds, with no change pending."""
        for key, row in self._listed.items():
            user = self._stored.get(key)
            expected = sorted(set(user.inbounds) & self._tags) if user and key not in self._off else []
            if sorted(row.confirmed) != expected or row.leaving or row.pending:
                yield f"ListUsers should have {key} confirmed in {expected}; {self._row(key)}"

    def _core(self) -> Iterator[str]:
        """Compare the core's own list, if it has one."""
        node = self._world.node
        for tag in self._tags if self._ground.refuses else ():
            names = self._ground.users(node.state, node.newest_core(), tag)
            known = {unaliased(name).lower() for name in names}
            expected = {key for key, user in self._stored.items() if tag in user.inbounds} - self._off
            if known != expected:
                yield f"the core has {sorted(known)} in {tag}, and should have {sorted(expected)}"

    def _row(self, email: str) -> str:
        row = self._listed.get(email)
        return "ListUsers has no such user" if row is None else f"ListUsers has {_brief(row)}"


def differences(world: World, controller: Controller) -> list[str]:
    """A line of text for each difference. Raises the errors of calls."""
    info = controller.info()
    if info.state == "stopped":
        left = world.node.core_pids()
        return [f"the node is stopped, but cores run: {left}"] if left else []
    if info.state != "running":
        return [f"the node is {info.state}: {info.reason}"]
    [ground] = [ground for ground in world.grounds if ground.name == info.core_type]
    return list(Compared(world, controller, ground).differences())


def _brief(row: ListedUser) -> str:
    lists = f"inbounds {list(row.inbounds)} confirmed {list(row.confirmed)} leaving {list(row.leaving)}"
    return f"{lists} pending {row.pending} refused {list(row.refused)}"


def on_disk(world: World) -> tuple[Mapping[str, User], set[str]]:
    """The users by name and the configuration's tags from the state file, as the next node would read them."""
    path = (world.node.state / "state.db").as_uri()
    with closing(sqlite3.connect(f"{path}?mode=ro", uri=True)) as base:
        users = [User.FromString(packed) for (packed,) in base.execute("SELECT packed FROM users")]
        [row] = base.execute("SELECT * FROM backend")
    [packed] = [value for value in row if isinstance(value, bytes) and len(value) > 50]
    config = loads(Backend.FromString(packed).config)
    return {user.email.lower(): user for user in users}, {each["tag"] for each in config["inbounds"]} & set(world.kinds)
