"""The parts of the node that a hand-over closes or hands over."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import ClassVar, Protocol

from node.base.logs import Logger, LogRing
from node.base.part import Parts
from node.door.connections import Connections
from node.events.journal import Journal
from node.events.kinds import Kind
from node.machine.systemd import Systemd
from node.state.store import Store


class Calls(Protocol):
    """The calls of controllers: `node.api.calls`, which is above this room."""

    def end_readers(self) -> None: ...

    def idle(self) -> bool: ...

    @property
    def settled(self) -> bool: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class House:
    """`sweep` ends all cores but those with these PIDs."""

    log: ClassVar = Logger()

    ring: LogRing
    journal: Journal
    store: Store
    parts: Parts
    calls: Calls
    connections: Connections
    systemd: Systemd
    sweep: Callable[[Collection[int]], object]

    def refuse(self, reason: str) -> None:
        """Report that there is no upgrade, and why."""
        self.report(Kind.NODE_UPGRADE_FAILED, f"the node was not upgraded: {reason}", reason=reason)

    def report(self, kind: Kind, text: str, **fields: str) -> None:
        """Report an event in the journal, in the ring of log lines and in the log."""
        self.ring.event(text)
        self.journal.tell(kind, text, **fields)
        (self.log.info if kind is Kind.NODE_UPGRADING else self.log.error)("{text}", text=text)
