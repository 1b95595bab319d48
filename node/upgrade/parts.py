"""The parts of a node that one version leaves to another, or ends, as a succession sees them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol

from node.contract.driver import Heirs
from protos.handover_pb2 import Handover


class Backend(Protocol):
    """What runs: see `node.api.operations`."""

    def unsteady(self, several: bool) -> str: ...

    async def rehearse(self) -> None: ...

    async def leave(self, several: bool, go: Callable[[Handover], Awaitable[None]]) -> None: ...

    def inherit(self, left: Handover, heirs: Heirs) -> None: ...

    def rest(self) -> None: ...

    async def close(self) -> None: ...


class Calls(Protocol):
    """What controllers ask."""

    def end_readers(self) -> None: ...

    def idle(self) -> bool: ...

    def close(self) -> None: ...


class Connections(Protocol):
    """What they ask by."""

    async def finish(self, seconds: float, idle: Callable[[], bool]) -> None: ...


class Store(Protocol):
    """What outlives the process."""

    @property
    def fault(self) -> str: ...

    def go_back(self) -> None: ...

    async def flush(self) -> None: ...

    async def close(self) -> None: ...


class Systemd(Protocol):
    """Is told of it."""

    def reloading(self) -> None: ...

    @property
    def silence(self) -> float | None: ...


class State(Protocol):
    """The node's own directory."""

    @property
    def lock(self) -> int: ...
