"""The interface's methods, one coroutine each, over the runner, the traffic and the machine's figures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from twisted.internet.defer import ensureDeferred
from twisted.internet.interfaces import IDelayedCall
from twisted.logger import Logger

from drivers.interface import Driver
from node import __version__
from node.auth import Dialect
from node.calls import Call
from node.errors import CoreFailed, NodeError, UnknownName, Unsupported
from node.feeds import ChunkFeed, UserFeed
from node.logs import LogRing
from node.runner import Runner
from node.system import SystemStats
from node.traffic import Traffic
from node.users import key_of
from protos import service_pb2
from protos.service_pb2 import BackendType, BaseInfoResponse, Empty, StatRequest, SystemStatsResponse


class Backend:
    """Everything that a controller can ask. Satisfies `node.calls.Backend`; METHODS names its coroutines."""

    log = Logger()

    def __init__(
        self, reactor: Any, ring: LogRing, drivers: Mapping[int, Driver], system: SystemStats, stop_grace: float
    ) -> None:
        # For deployed panels, which say Stop and then Start whenever they are touched.
        self._stop_grace = stop_grace
        self._reactor = reactor
        self._drivers = drivers
        self._system = system
        self._traffic = Traffic(lambda: self._runner.generations, self._is_user)
        self._runner = Runner(reactor, ring, self._traffic.read)
        self._keep_alive = 0.0
        self._expiry: IDelayedCall | None = None

    def touch(self) -> None:
        """A controller said something: keep-alive starts anew."""
        if self._expiry is not None and self._expiry.active():
            self._expiry.reset(self._keep_alive)

    async def close(self) -> None:
        """The node ends, and the core with it."""
        self._set_keep_alive(0)
        await self._runner.close()

    # Lifecycle

    async def start(self, request: service_pb2.Backend, _: Call) -> BaseInfoResponse:
        driver = self._drivers.get(request.type)
        if driver is None:
            raise Unsupported(f"this node has no core of type {type_name(request.type)}")
        before = self._keep_alive
        # The one before must not expire while its successor comes up.
        self._set_keep_alive(0)
        try:
            await self._runner.start(driver, request)
        except NodeError:
            if not self._keep_alive and self._runner.generations:
                self._set_keep_alive(before)
            raise
        self._set_keep_alive(request.keep_alive)
        return await self._info()

    async def stop(self, _: Empty, call: Call) -> Empty:
        self._set_keep_alive(0)
        grace = self._stop_grace if call.dialect is Dialect.DEPLOYED else 0
        await self._runner.stop("a controller asked for it", grace)
        return Empty()

    async def info(self, _: Empty, __: Call) -> BaseInfoResponse:
        return await self._info()

    # Statistics

    async def system_stats(self, _: Empty, __: Call) -> SystemStatsResponse:
        return SystemStatsResponse(**asdict(self._system.current()))

    async def backend_stats(self, _: Empty, __: Call) -> service_pb2.BackendStatsResponse:
        self._runner.require()
        return await self._runner.generations[0].backend_stats()

    async def stats(self, request: StatRequest, _: Call) -> service_pb2.StatResponse:
        return await self._traffic.stats(request)

    async def online(self, request: StatRequest, _: Call) -> service_pb2.OnlineStatResponse:
        return service_pb2.OnlineStatResponse(name=request.name, value=len(await self._addresses(request.name)))

    async def online_ips(self, request: StatRequest, _: Call) -> service_pb2.StatsOnlineIpListResponse:
        return service_pb2.StatsOnlineIpListResponse(name=request.name, ips=await self._addresses(request.name))

    # Users

    async def sync_users(self, request: service_pb2.Users, _: Call) -> Empty:
        await self._runner.replace(request.users)
        return Empty()

    def sync_user(self) -> UserFeed:
        return UserFeed(self._runner)

    def sync_chunked(self) -> ChunkFeed:
        return ChunkFeed(self._runner)

    def _is_user(self, name: str) -> bool:
        return key_of(name) in self._runner.roster.users

    async def _addresses(self, name: str) -> dict[str, int]:
        """Where a user is connected from, over all generations, and when each address was last seen."""
        self._runner.require()
        if not self._is_user(name):
            raise UnknownName(f"there is no user {name!r}")
        addresses: dict[str, int] = {}
        for generation in self._runner.generations:
            for address, seen in (await generation.online(key_of(name))).items():
                addresses[address] = max(seen, addresses.get(address, 0))
        return addresses

    async def _info(self) -> BaseInfoResponse:
        accepted = self._runner.accepted if self._runner.state != "stopped" else None
        driver = accepted.driver if accepted else self._drivers[service_pb2.XRAY]
        warnings = list(accepted.plan.warnings) if accepted else []
        try:
            version = accepted.version if accepted else await driver.version()
        except CoreFailed as fault:
            version = "none"
            warnings.append(fault.text)
        return BaseInfoResponse(
            running=self._runner.state == "running",
            core_version=version,
            version=__version__,
            core_type=driver.name,
            state=self._runner.state,
            reason=self._runner.reason,
            warnings=warnings,
        )

    def _set_keep_alive(self, seconds: float) -> None:
        if self._expiry is not None and self._expiry.active():
            self._expiry.cancel()
        self._keep_alive = seconds
        self._expiry = self._reactor.callLater(seconds, self._expire) if seconds else None

    def _expire(self) -> None:
        reason = f"no controller was heard of for {self._keep_alive:g} s"
        ensureDeferred(self._runner.stop(reason)).addErrback(
            lambda failure: self.log.failure("the backend was not stopped after keep-alive", failure)
        )


def type_name(number: int) -> str:
    """A backend type as in the interface, or its number."""
    try:
        return BackendType.Name(number)
    except ValueError:
        return str(number)
