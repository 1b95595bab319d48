"""The parts of the node that a hand-over uses."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import ClassVar

from node.base.logs import Logger, LogRing
from node.base.part import Parts
from node.events.journal import Journal
from node.events.kinds import Kind
from node.machine.systemd import Systemd
from node.state.store import Store


@dataclass(frozen=True)
class House:
    """`sweep` ends all cores but those with these PIDs, and returns the PIDs of those that it has ended."""

    log: ClassVar = Logger()

    ring: LogRing
    journal: Journal
    store: Store
    parts: Parts
    systemd: Systemd
    sweep: Callable[[Collection[int]], Collection[int]]

    def refuse(self, reason: str) -> None:
        """Report that there is no upgrade, and why."""
        self.report(Kind.NODE_UPGRADE_FAILED, f"the node was not upgraded: {reason}", reason=reason)

    def report(self, kind: Kind, text: str, **fields: str) -> None:
        """Report an event in the journal, in the ring of log lines and in the log."""
        self.ring.event(text)
        self.journal.tell(kind, text, **fields)
        (self.log.info if kind is Kind.NODE_UPGRADING else self.log.error)("{text}", text=text)
