"""One run of sing-box: its process, its APIs, and the users that it lets in."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterable, Mapping, Sequence

from twisted.internet.defer import Deferred
from twisted.internet.threads import deferToThreadPool
from twisted.logger import Logger

from drivers.api import ApiFailed
from drivers.interface import Exit, Host
from drivers.process import CoreProcess
from drivers.sing_box.api import Api
from drivers.sing_box.config import Plan
from drivers.sockets import Unreachable, deafen, run_dry
from node.errors import CoreFailed
from node.ledger import Reading, Scope
from node.users import Accounts, Change, apply
from protos.service_pb2 import BackendStatsResponse

# Seconds for which connections may come to their end: what is cut in the middle of a write is not counted.
DRY = 0.5


class SingBoxGeneration:
    """Satisfies `drivers.interface.Generation`."""

    log = Logger()
    uncounted: frozenset[Scope] = frozenset()
    warnings: Sequence[str] = ()

    def __init__(self, host: Host, plan: Plan, process: CoreProcess, api: Api, users: Mapping[str, Accounts]) -> None:
        self._host = host
        self.plan = plan
        self._process = process
        self._api = api
        # Who is in its configuration, and of them those who may come in.
        self._configured = users
        self.accounts: dict[str, Accounts] = {tag: dict(accounts) for tag, accounts in users.items()}

    @property
    def alive(self) -> bool:
        return self._process.exit is None

    @property
    def pid(self) -> int | None:
        return self._process.pid

    def when_exited(self) -> Deferred[Exit]:
        return self._process.when_exited()

    async def counters(self) -> Reading:
        try:
            return self.plan.silent | await self._host.aio.run(self._api.counters())
        except ApiFailed as fault:
            raise CoreFailed(f"the core did not give its counters: {fault}") from fault

    async def online(self, key: str) -> Mapping[str, int]:
        try:
            return await self._host.aio.run(self._api.online(key))
        except ApiFailed as fault:
            raise CoreFailed(f"the core did not say who is online: {fault}") from fault

    async def online_count(self, key: str) -> int:
        return len(await self.online(key))

    async def backend_stats(self) -> BackendStatsResponse:
        """All of it where the build has v2ray_api; else what the api service and the kernel know."""
        try:
            figures = await self._host.aio.run(self._api.sys_stats())
            if figures is not None:
                return BackendStatsResponse.FromString(figures.SerializeToString())
            status = await self._host.aio.run(self._api.status())
            started = await self._host.aio.run(self._api.started_at())
        except ApiFailed as fault:
            # Deployed controllers know how this text begins, and leave a node that says it alone.
            raise CoreFailed(f"failed to get sys stats: {fault}") from fault
        return BackendStatsResponse(
            num_goroutine=status.goroutines,
            sys=status.memory,
            uptime=max(0, int(time.time() - started)),
        )

    async def answers(self, seconds: float) -> bool:
        return await self._host.aio.run(self._api.ready(seconds))

    async def audit(self) -> int:
        """The core's users are those of its configuration: it has no call that changes them."""
        return 0

    def kill(self) -> None:
        self._process.signal(signal.SIGKILL)

    def admits(self, change: Change) -> bool:
        """Whether a change needs no other configuration: a removal, or somebody who is in it as he shall be."""
        return change.packed in (None, self._configured[change.tag].get(change.key))

    async def admit(self, changes: Iterable[Change]) -> None:
        """Bring changes into force that need no other configuration."""
        changes = [change for change in changes if self.admits(change)]
        gone = [(change.tag, change.key) for change in changes if change.packed is None]
        back = [(change.tag, change.key) for change in changes if change.packed is not None]
        self.accounts.update(apply(changes, self.accounts))
        try:
            await self._host.aio.run(self._api.admit(back))
            if gone:
                await self._host.aio.run(self._api.bar(gone))
        except ApiFailed as fault:
            raise CoreFailed(f"the core did not end connections of removed users: {fault}") from fault

    async def wind_down(self) -> None:
        try:
            if self.pid is not None:
                pool = self._host.reactor.getThreadPool()
                await deferToThreadPool(self._host.reactor, pool, deafen, self.pid, self.plan.ports)
                await deferToThreadPool(self._host.reactor, pool, run_dry, self.pid, self._api.ports)
        except Unreachable as fault:
            self.log.warn("the core goes on accepting: {fault}", fault=fault)
        try:
            await self._host.aio.run(self._api.until_idle(DRY))
            await self._host.aio.run(self._api.end_all())
        except ApiFailed as fault:
            self.log.warn("the core goes on serving: {fault}", fault=fault)

    async def stop(self) -> None:
        await self._process.stop()
        await self._host.aio.run(self._api.close())
