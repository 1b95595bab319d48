"""A driver without processes: its cores are only their users, and its owner controls what they do.

Tests of the node script it as it is. `drivers.pretended.sandbox` makes it pretend traffic, for tests of controllers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IReactorTime
from twisted.internet.task import Clock, deferLater

from node.base.errors import CoreFailed, InvalidConfig
from node.base.waiting import Waiters
from node.contract.abilities import NotShared
from node.contract.accounts import Account, Accounts, Change, Refusal, Unusable, apply
from node.contract.counters import Reading, Scope, Seen
from node.contract.driver import Applied, Exit, Plan
from protos.service_pb2 import BackendStatsResponse, User


@dataclass(frozen=True)
class MemoryPlan:
    """Inbounds whose accounts are passwords. The driver is None if the test makes its core itself."""

    config: str
    tags: tuple[str, ...]
    driver: MemoryDriver | None = None
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def account(self, tag: str, user: User) -> Account | None:
        password = user.proxies.trojan.password
        if password == "bad":  # noqa: S105 - a word of tests
            raise Unusable("the password is bad")
        return Account(password.encode(), password.encode()) if password else None

    def same_credential(self, one: bytes, other: bytes) -> bool:
        return one == other

    def alike(self, other: Plan) -> bool:
        return self.tags == tuple(other.tags)

    async def check(self, target: Mapping[str, Accounts]) -> None:
        assert self.driver
        await self.driver.check(self, target)

    async def launch(self, target: Mapping[str, Accounts], seconds: float) -> MemoryGeneration:
        assert self.driver
        return await self.driver.launch(self, target, seconds)


class Gate:
    """A gate: while it is `shut`, callers of `passed` wait."""

    def __init__(self) -> None:
        self.shut = False
        self._waiters = Waiters()

    @property
    def waiting(self) -> int:
        return len(self._waiters)

    async def passed(self) -> None:
        if self.shut:
            await self._waiters.wait()

    def open(self) -> None:
        """Let the waiting callers and all later ones pass."""
        self.shut = False
        self.let_through()

    def let_through(self) -> None:
        """Let only the waiting callers pass."""
        self._waiters.wake()


class MemoryGeneration:
    """A core. `silent`: it lives but does not reply. `audits`: the results of the next audits, in order.

    `led`: it may have had connections.
    """

    def __init__(self, clock: IReactorTime, plan: MemoryPlan, accounts: Mapping[str, Accounts], stopping: Gate) -> None:
        self.plan = plan
        self.accounts = {tag: dict(users) for tag, users in accounts.items()}
        self.uncounted: frozenset[Scope] = frozenset()
        self.warnings: list[str] = []
        self.outdated = self.lingering = False
        self.cut = 0
        self.alive = True
        self.silent = False
        self.led = True
        self.wound_down = False
        self.counts: dict[str, int] = {}
        self.addresses: dict[str, int] = {}
        self.uptime = 0
        self.killed = False
        self.asked = 0
        self.audited = 0
        self.audits: list[Callable[[dict[str, Accounts]], int] | CoreFailed] = []
        self._clock = clock
        self._stopping = stopping
        self._exit: Exit | None = None
        self._waiting: list[Deferred[Exit]] = []

    @property
    def pid(self) -> int | None:
        """It has no process."""
        return None

    def when_exited(self) -> Deferred[Exit]:
        waiter: Deferred[Exit] = Deferred()
        self._waiting.append(waiter)
        if self._exit:
            waiter.callback(self._exit)
        return waiter

    def die(self, code: int = -9) -> None:
        """End the process."""
        if self.alive:
            self.alive, self._exit = False, Exit(code, ())
            for waiter in self._waiting:
                if not waiter.called:
                    waiter.callback(self._exit)

    async def counters(self, _: Seen | None = None) -> Reading:
        return dict(self.counts)

    async def online(self, key: str) -> Mapping[str, int]:
        await self._answered()
        return self.addresses

    async def apply(self, changes: Sequence[Change]) -> Applied:
        assert self.plan.driver
        return await self.plan.driver.apply(self, changes)

    async def backend_stats(self) -> BackendStatsResponse:
        await self._answered()
        return BackendStatsResponse(uptime=self.uptime)

    async def _answered(self) -> None:
        """Wait for the core's reply. Raises `CoreFailed` if it is silent, or ends before."""
        if self.plan.driver:
            await self.plan.driver.asking.passed()
        if self.silent or not self.alive:
            raise CoreFailed("the core ended before it answered")

    async def answers(self, seconds: float) -> bool:
        self.asked += 1
        late = self._clock.seconds() + seconds
        while self.alive and self.silent and self._clock.seconds() < late:
            await deferLater(self._clock, 0.125)
        return self.alive and not self.silent

    async def audit(self) -> int:
        self.audited += 1
        if not self.audits:
            return 0
        found = self.audits.pop(0)
        if isinstance(found, CoreFailed):
            raise found
        return found(self.accounts)

    def kill(self) -> None:
        self.killed = True
        self._note_end()
        self.die()

    def _note_end(self) -> None:
        """Record in `driver.unread` that the node ends this run without a last reading that was possible."""
        if self.plan.driver and self.alive and self.led and not (self.silent or self.wound_down):
            self.plan.driver.unread.append(self)

    async def wind_down(self) -> None:
        self.wound_down = True

    async def stop(self) -> None:
        await self._stopping.passed()
        self._note_end()
        self.die(0)


class SharedGeneration(MemoryGeneration):
    """A core that can share its listeners: `driver.led` is the one that gets new connections."""

    def __init__(self, clock: IReactorTime, plan: MemoryPlan, accounts: Mapping[str, Accounts], stopping: Gate) -> None:
        super().__init__(clock, plan, accounts, stopping)
        self.joined = self.lingering = self.ends_sessions = False
        # A core without others gets all connections.
        self.led = not (isinstance(plan.driver, MemoryDriver) and plan.driver.running)
        # The number of its connections, or the error of counting them.
        self.connections: int | CoreFailed = 1
        self.proof: Exception | None = None

    @property
    def driver(self) -> SharingDriver:
        assert isinstance(self.plan.driver, SharingDriver)
        return self.plan.driver

    async def obstacles(self, plan: Plan) -> Sequence[str]:
        return self.driver.obstacles

    async def join(self) -> None:
        if not self.alive:
            raise NotShared("it has gone")
        if self.driver.unshared:
            raise NotShared(self.driver.unshared)
        self.joined = True
        self.driver.led = self.driver.led or self

    async def prove(self, seconds: float) -> None:
        await self.driver.proving.passed()
        if self.proof or not self.alive:
            raise self.proof or CoreFailed("it has gone")

    async def lead(self) -> None:
        assert self.joined
        if not self.alive:
            raise NotShared("it has gone")
        self.led = True
        self.driver.led = self
        await self.driver.leading.passed()

    async def connected(self) -> int:
        if isinstance(self.connections, CoreFailed):
            raise self.connections
        return self.connections


class MemoryDriver:
    """Satisfies `Driver`. A configuration is a comma-separated list of inbound tags, followed by words.

    The word `bad` makes it fail when it is read, `unbuildable` when it is checked. `faults` are the errors of the
    next launches, `fault` is the error of batches, `unchecked` that of checks with users. `launching`, `stopping`,
    `applying` and `asking` are gates. A silent core refuses a batch after `CALL` seconds; `unable`: no core can remove
    users while it runs. `dear` selects the changes that need another run.
    """

    CALL = 5.0

    name = "memory"
    kind: type[MemoryGeneration] = MemoryGeneration

    def __init__(self, clock: IReactorTime | None = None) -> None:
        self.clock = clock or Clock()
        self.cores: list[MemoryGeneration] = []
        self.launches: list[float] = []
        self.patience: list[float] = []
        self.faults: list[Exception] = []
        self.batches: list[Sequence[Change]] = []
        self.checks: list[Mapping[str, Accounts]] = []
        # Cores that the node ended without a last reading, though one was possible.
        self.unread: list[MemoryGeneration] = []
        self.fault: Exception | None = None
        self.unchecked: Exception | None = None
        self.unable = False
        self.dear: Callable[[Change], bool] = lambda _: False
        self.reading, self.launching, self.stopping, self.applying = Gate(), Gate(), Gate(), Gate()
        self.asking = Gate()

    @property
    def running(self) -> list[MemoryGeneration]:
        return [core for core in self.cores if core.alive]

    def require_room(self) -> None:
        assert not self.running, "two cores at once"

    def fingerprint(self, config_text: str) -> str:
        return " ".join(config_text.split())

    async def version(self) -> str:
        return "1"

    async def prepare(self, config_text: str, exclude: frozenset[str]) -> MemoryPlan:
        await self.reading.passed()
        tags, *words = config_text.split() or ["a,b"]
        if "bad" in words:
            raise InvalidConfig("the core cannot read it")
        return MemoryPlan(config_text, tuple(tag for tag in tags.split(",") if tag not in exclude), self)

    async def check(self, plan: MemoryPlan, target: Mapping[str, Accounts]) -> None:
        self.checks.append(target)
        if "unbuildable" in plan.config.split():
            raise InvalidConfig("the core cannot build it")
        if self.unchecked and any(target.values()):
            raise self.unchecked

    async def launch(self, plan: MemoryPlan, target: Mapping[str, Accounts], seconds: float) -> MemoryGeneration:
        self.require_room()
        assert set(target) == set(plan.tags), "users of another configuration"
        self.launches.append(self.clock.seconds())
        self.patience.append(seconds)
        core = self.kind(self.clock, plan, target, self.stopping)
        await self.launching.passed()
        if self.faults:
            raise self.faults.pop(0)
        self.cores.append(core)
        return core

    async def apply(self, generation: MemoryGeneration, changes: Sequence[Change]) -> Applied:
        assert {change.tag for change in changes} <= set(generation.plan.tags), "changes for another configuration"
        self.batches.append(changes)
        await self.applying.passed()
        if self.fault:
            raise self.fault
        if generation.silent:
            await deferLater(self.clock, self.CALL)
        left = list(filter(self.dear, changes))
        refused = [change for change in changes if change not in left and self._refuses(generation, change)]
        done = [change for change in changes if change not in left and change not in refused]
        generation.accounts = apply(done, generation.accounts)
        return Applied([Refusal(change.key, "the core says no") for change in refused], left)

    def _refuses(self, core: MemoryGeneration, change: Change) -> bool:
        stuck = self.unable and change.key in core.accounts[change.tag]
        return stuck or core.silent or not core.alive or change.packed == b"refused"


class SharingDriver(MemoryDriver):
    """Cores can share their listeners. `obstacles` are reported before a launch, `unshared` fails a core's `join`."""

    kind: type[MemoryGeneration] = SharedGeneration

    def __init__(self, clock: IReactorTime | None = None) -> None:
        super().__init__(clock)
        self.led: SharedGeneration | None = None
        # How many of the next cores die after their launch.
        self.stillborn = 0
        self.obstacles: list[str] = []
        self.unshared = ""
        self.proving, self.leading = Gate(), Gate()

    async def launch(self, plan: MemoryPlan, target: Mapping[str, Accounts], seconds: float) -> MemoryGeneration:
        try:
            core = await super().launch(plan, target, seconds)
        except Exception:
            # A single remaining core no longer shares its listeners.
            for one in self.running[:1] if len(self.running) == 1 else ():
                cast(SharedGeneration, one).joined = False
            raise
        if self.stillborn:
            self.stillborn -= 1
            core.die()
        return core

    def require_room(self) -> None:
        assert all(isinstance(core, SharedGeneration) and core.joined for core in self.running), "a port is taken"
