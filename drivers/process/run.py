"""The base class of generations: a process, and the core's API."""

from __future__ import annotations

import signal
from typing import Generic, Protocol, TypeVar

from twisted.internet.defer import Deferred

from drivers.process.child import CoreProcess
from node.base.logs import Logger
from node.contract.driver import Exit, Host


class Api(Protocol):
    """The part of a core's API that all cores have."""

    async def ready(self, seconds: float) -> bool: ...

    async def close(self) -> None: ...


A = TypeVar("A", bound=Api)


class Run(Generic[A]):
    """The part of `node.contract.driver.Generation` that is the same for all cores."""

    log = Logger()

    def __init__(self, host: Host, process: CoreProcess, api: A) -> None:
        self._host = host
        self._process = process
        self._api = api

    @property
    def alive(self) -> bool:
        return self._process.exit is None

    @property
    def pid(self) -> int | None:
        return self._process.pid

    def when_exited(self) -> Deferred[Exit]:
        return self._process.when_exited()

    async def answers(self, seconds: float) -> bool:
        return await self._api.ready(seconds)

    def kill(self) -> None:
        self._process.signal(signal.SIGKILL)

    async def stop(self) -> None:
        await self._process.stop()
        await self._close()

    async def _close(self) -> None:
        """Close the connections to the core. May be called again meanwhile."""
        await self._api.close()
