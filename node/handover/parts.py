"""The parts of the node that a succession hands over or closes, as protocols."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol

from node.contract.driver import Heirs
from node.contract.saved import Margins
from node.handover.snapshots import Described
from protos.handover_pb2 import Handover


class HandoverBackend(Described, Protocol):
    """The backend: see `node.api.operations`."""

    def unsteady(self) -> str: ...

    async def rehearse(self) -> None: ...

    async def leave(self, go: Callable[[Handover], Awaitable[None]]) -> None: ...

    def inherit(self, left: Handover, heirs: Heirs) -> None: ...

    async def shut_down(self) -> None: ...


class Calls(Protocol):
    """The calls of controllers."""

    def end_readers(self) -> None: ...

    def idle(self) -> bool: ...

    @property
    def settled(self) -> bool: ...

    def close(self) -> None: ...


class Connections(Protocol):
    """The connections of controllers."""

    async def finish(self, seconds: float, idle: Callable[[], bool]) -> None: ...


class Jobs(Protocol):
    """Updates: see `node.updates.jobs`."""

    @property
    def under_way(self) -> str: ...

    async def leave(self) -> None: ...


class Store(Protocol):
    """The state file: see `node.state.store`."""

    @property
    def fault(self) -> str: ...

    def go_back(self) -> None: ...

    def event(self, margins: Margins) -> None: ...

    async def flush(self) -> None: ...


class Systemd(Protocol):
    """Notifies systemd."""

    def reloading(self) -> None: ...


class State(Protocol):
    """The node's own directory."""

    @property
    def lock(self) -> int: ...
