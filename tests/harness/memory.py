"""What tests of the backend have beside the scripted driver: users, cores that share listeners, and a record."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

from twisted.internet.interfaces import IReactorTime

from drivers.pretended.scripted import Gate, MemoryDriver, MemoryGeneration, MemoryPlan
from node.base.errors import CoreFailed
from node.contract.abilities import NotShared
from node.contract.accounts import Accounts
from node.contract.driver import Plan
from protos.service_pb2 import Proxy, Trojan, User


def person(email: str, password: str = "", *inbounds: str) -> User:
    return User(email=email, proxies=Proxy(trojan=Trojan(password=password)), inbounds=inbounds)


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


class MemoryRecord:
    """What would be on disk; stands in for `node.state.store.Store`. `flush` waits at `gate`."""

    def __init__(self) -> None:
        self.request = self.changes = b""
        self.kept: dict[str, bytes] = {}
        self.staged: dict[str, bytes] = {}
        self.written = 0
        self.gate = Gate()

    def accept(self, request: bytes, routing: bytes = b"") -> None:
        self.request, self.changes = request, routing

    def routing(self, packed: bytes) -> None:
        self.changes = packed

    def forget(self) -> None:
        self.request, self.changes, self.kept = b"", b"", {}

    def users(self, changed: Mapping[str, bytes | None], clean: bool = False) -> None:
        if clean:
            self.kept = {}
        for key, packed in changed.items():
            self.written += 1
            self.kept.pop(key, None)
            if packed is not None:
                self.kept[key] = packed

    def stage(self, users: Mapping[str, bytes]) -> None:
        """Keep staged users apart from `kept`."""
        self.staged = dict(users)

    async def flush(self) -> None:
        await self.gate.passed()


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
