"""A disk that fails for a while loses nothing: afterwards it has what a disk that never failed would have."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from hypothesis import example, given, settings
from hypothesis import strategies as st
from twisted.internet.defer import ensureDeferred
from twisted.internet.task import Clock
from twisted.python.failure import Failure

from drivers.pretended.scripted import MemoryDriver
from node.api.auth import Dialect
from node.api.calls import Call
from node.api.methods import METHODS
from node.backend.options import BackendOptions
from node.base.errors import CoreFailed, NodeError
from node.base.logs import LogRing
from node.base.part import Parts
from node.contract.counters import Row, Scope, counter_name
from node.contract.saved import Changes, Saved
from node.engine.options import EngineOptions
from node.state import store as store_module
from node.state.database import Damaged, Database, Unwritable
from node.state.store import Store
from protos.service_pb2 import Backend as Request
from protos.service_pb2 import Empty, StatRequest, Users, UsersStat
from tests.harness.memory import person
from tests.harness.whole import Whole

[START] = [method for method in METHODS if method.call == "start"]
[STATS] = [method for method in METHODS if method.call == "stats"]
AGAIN = store_module.AGAIN
# Seconds: more than a step, or a core's restart, takes, and less than the retry interval of a failed disk.
BEAT = 9.0


class OneThread(Clock):
    """A reactor that runs work of threads inline."""

    def callFromThread(self, function: Callable[..., object], *arguments: object) -> None:
        self.callLater(0, function, *arguments)


class Inline:
    """A pool that runs everything at once."""

    def start(self) -> None: ...
    def stop(self) -> None: ...

    def callInThreadWithCallback(
        self, done: Callable[[bool, object], None], function: Callable[..., object], *arguments: object
    ) -> None:
        try:
            outcome = True, function(*arguments)
        except Exception:  # noqa: BLE001 - handed over
            outcome = False, Failure()
        done(*outcome)


class Disk:
    """How the disk of a file behaves.

    `fault` is raised by every write, and if `unreadable` by every read. `damaged`: the next write finds the file
    damaged and moves it aside.
    """

    def __init__(self) -> None:
        self.fault: Exception | None = None
        self.unreadable = False
        self.damaged = False


class FaultyDatabase(Database):
    def __init__(self, path: Path, disk: Disk) -> None:
        super().__init__(path)
        self._disk = disk

    def load(self) -> Saved:
        if self._disk.unreadable or self._disk.fault:
            raise Unwritable("disk I/O error")
        return super().load()

    def peek(self) -> Saved | None:
        return None if self._disk.unreadable else super().peek()

    def write(self, changes: Changes) -> None:
        if self._disk.unreadable:
            raise Unwritable("disk I/O error")
        if self._disk.fault:
            raise self._disk.fault
        if self._disk.damaged:
            self._disk.damaged = False
            raise Damaged(self._move_aside(ValueError("odd")))
        super().write(changes)


class Machine:
    """One node after another over one state file, with in-memory cores."""

    def __init__(self, directory: Path) -> None:
        self.file = directory / "state.db"
        self.disk = Disk()
        # What the next cores fail with, also those of the next node.
        self.faults: list[Exception] = []
        self.begin()

    def begin(self, resume: bool = True) -> None:
        """Start another node, new except for the file."""
        self.clock = cast(Any, OneThread())
        parts = Parts()
        self.store = Store(self.clock, self.file, parts)
        any_store: Any = self.store
        any_store._pool, any_store._database = Inline(), FaultyDatabase(self.file, self.disk)
        self.driver = MemoryDriver(self.clock)
        self.driver.faults = self.faults
        ring, options = LogRing(self.clock, 10), EngineOptions(BackendOptions(resume=resume))
        self.backend = Whole(self.clock, ring, {0: self.driver}, self.store, options, parts)
        self.backend.begin(self.store.open())
        self.clock.advance(0)

    def wait(self, work: Any) -> object:
        """The outcome of some work, for which time passes."""
        result: list[object] = []
        ensureDeferred(work).addBoth(result.append)
        for _ in range(1000):
            if result:
                break
            self.clock.advance(0.05)
        [outcome] = result
        if isinstance(outcome, Failure):
            outcome.trap(NodeError)
        return outcome

    def start(self, config: str, *names: str, keep_alive: int = 0) -> None:
        request = Request(config=config, users=[person(name, name, "a") for name in names], keep_alive=keep_alive)
        self.wait(self.backend.start(request, Call(START, Dialect.DOCUMENT)))

    def stop(self) -> None:
        self.wait(self.backend.stop(Empty(), Call(START, Dialect.DOCUMENT)))

    def sync(self, *names: str) -> None:
        users = [person(name, name, "a") for name in names]
        self.wait(self.backend.sync_users(Users(users=users), Call(START, Dialect.DOCUMENT)))

    def put(self, name: str, there: bool) -> None:
        feed = self.backend.sync_user()
        self.wait(feed.feed(person(name, name, *(["a"] if there else []))))
        self.wait(feed.finish())

    def count(self, name: str) -> None:
        """A user transfers bytes, which are read."""
        for core in self.driver.running:
            counter = counter_name(Scope.USER, name, "uplink")
            core.counts[counter] = core.counts.get(counter, 0) + 5
        self.clock.pump([1] * 12)

    def take(self, delivered: bool) -> None:
        call = Call(STATS, Dialect.DOCUMENT)
        self.wait(self.backend.stats(StatRequest(type=UsersStat, reset=True), call))
        call.outcome.callback(delivered)

    def crash(self) -> None:
        for core in self.driver.running:
            core.die()

    def pass_time(self) -> None:
        """A disk that works again is noticed."""
        self.clock.advance(AGAIN)
        self.wait(self.store.flush())

    def close(self) -> None:
        self.wait(self.backend.close())
        self.wait(self.store.stop())

    @property
    def saved(self) -> Saved:
        database = Database(self.file)
        try:
            return database.load()
        finally:
            database.close()


@contextmanager
def machine() -> Iterator[Machine]:
    # In memory: each example writes some dozen transactions.
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        yield Machine(Path(directory))


FULL = Unwritable("database or disk is full")


def test_a_disk_that_failed_and_then_a_shutdown() -> None:
    """What ran until the end is there for the next node: backend, users, the rest of its keep-alive, traffic."""
    with machine() as node:
        node.start("a", "ann", "bob", keep_alive=100)
        node.count("ann")
        node.disk.fault = FULL
        node.put("bob", there=False)
        node.count("ann")
        node.disk.fault = None
        node.close()
        saved = node.saved
        assert Request.FromString(saved.request).config == "a"
        assert [user for user in saved.users if b"ann" in user] == list(saved.users)
        assert saved.rows == (Row(Scope.USER, "ann", 10, 0),)
        assert saved.left is not None
        assert 0 < saved.left < 100


def test_a_disk_that_is_back_while_a_resume_is_pending() -> None:
    """A loaded backend that does not run yet stays in the file."""
    with machine() as node:
        node.start("a", "ann")
        node.close()
        before = node.saved
        node.disk.fault = FULL
        node.faults += [CoreFailed("no")] * 9
        node.begin()
        node.disk.fault = None
        node.pass_time()
        assert not node.driver.running
        assert node.saved == before
        node.close()
        assert node.saved == before


def test_a_disk_that_is_back_where_nothing_is_resumed() -> None:
    """A backend that is not resumed, by the operator's wish, stays in the file until a controller changes that."""
    with machine() as node:
        node.start("a", "ann")
        node.close()
        before = node.saved
        node.disk.fault = FULL
        node.begin(resume=False)
        node.disk.fault = None
        node.pass_time()
        assert node.saved == before
        node.stop()
        node.pass_time()
        assert (node.saved.request, node.saved.users) == (b"", ())


def test_what_could_not_be_read() -> None:
    """It is read when the disk is back, and runs then, with its traffic; it is never overwritten unread."""
    with machine() as node:
        node.start("a", "ann")
        node.count("ann")
        node.close()
        node.disk.unreadable = True
        node.begin()
        assert not node.driver.running
        node.pass_time()
        node.disk.unreadable = False
        node.pass_time()
        assert [core.accounts for core in node.driver.running] == [{"a": {"ann": b"ann"}}]
        assert node.saved.rows == (Row(Scope.USER, "ann", 5, 0),)
        node.count("ann")
        node.close()
        assert node.saved.rows == (Row(Scope.USER, "ann", 10, 0),)


def test_what_could_not_be_read_and_was_replaced() -> None:
    """A controller that came meanwhile decides the backend; traffic is added."""
    with machine() as node:
        node.start("a", "ann")
        node.count("ann")
        node.close()
        node.disk.unreadable = True
        node.begin()
        node.start("a", "bob")
        node.count("ann")
        node.disk.unreadable = False
        node.close()
        assert [user for user in node.saved.users if b"bob" in user] == list(node.saved.users)
        assert node.saved.rows == (Row(Scope.USER, "ann", 10, 0),)


names = st.sampled_from(["ann", "bob", "cal"])
steps = st.one_of(
    st.tuples(st.just("start"), st.sampled_from(["a", "a,b", "a bad"]), names),
    st.tuples(st.just("sync"), names, names),
    st.tuples(st.just("put"), names, st.booleans()),
    st.tuples(st.just("count"), names),
    st.tuples(st.just("take"), st.booleans()),
    st.sampled_from(
        [("stop",), ("crash",), ("fail",), ("damage",), ("back",), ("pass_time",), ("end",), ("kill",), ("hard",)]
    ),
)


@settings(max_examples=2 * settings().max_examples)
@given(st.lists(steps, max_size=14))
@example([("start", "a", "ann"), ("damage",), ("end",)])
@example([("start", "a", "ann"), ("hard",), ("end",), ("damage",), ("end",)])
@example([("start", "a", "ann"), ("fail",), ("count", "ann"), ("end",)])
@example([("start", "a", "ann"), ("hard",), ("fail",), ("end",), ("pass_time",), ("back",), ("pass_time",)])
def test_what_a_disk_has_that_was_away(plan: list[tuple[Any, ...]]) -> None:
    """Whatever is called, counted and delivered, whatever crashes and whenever the disk fails."""
    with machine() as steady, machine() as faulty:
        for name, *arguments in plan:
            for node in (steady, faulty):
                perform(node, node is faulty, name, *arguments)
        for node in (steady, faulty):
            node.disk.fault = None
            node.close()
        assert in_any_order(faulty.saved) == in_any_order(steady.saved)


def in_any_order(saved: Saved) -> Saved:
    """The order of users counts only if several claim one credential, which none does here."""
    return replace(saved, users=tuple(sorted(saved.users)), rows=tuple(sorted(saved.rows, key=lambda row: row.key)))


def perform(node: Machine, faulty: bool, name: str, *arguments: Any) -> None:
    """Perform a step; a disk fails only if it is `faulty`. The same time passes with either."""
    step(node, faulty, name, *arguments)
    beat = (node.clock.seconds() // BEAT + 1) * BEAT
    while (left := beat - node.clock.seconds()) > 1e-6:
        node.clock.advance(min(0.5, left))


def step(node: Machine, faulty: bool, name: str, *arguments: Any) -> None:
    if name == "fail":
        node.disk.fault = FULL if faulty else None
    elif name == "damage":
        node.disk.damaged = faulty
    elif name == "back":
        node.disk.fault = None
    elif name == "hard":
        # Cores do not start for a while, so that a resume or a restart is pending.
        node.faults[:] = [CoreFailed("no")] * 3
    elif name == "end":
        # A node can end well only with a disk that takes its last changes, if late.
        node.disk.fault = None
        node.close()
        node.disk.fault = FULL if faulty else None
        node.begin()
    elif name == "kill":
        node.disk.fault, node.disk.damaged = None, False
        node.pass_time()
        node.pass_time()
        node.begin()
    else:
        getattr(node, name)(*arguments)
