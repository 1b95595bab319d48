"""The objects that all parts of the backend share."""

from __future__ import annotations

from dataclasses import dataclass

from node.backend.control import Control
from node.backend.desired import Desired
from node.backend.options import BackendOptions
from node.backend.state import Status
from node.base.logs import LogRing
from node.base.reactor import PooledReactor
from node.contract.driver import Generation
from node.contract.generations import Generations
from node.events.journal import Tells
from node.events.users import UserEvents


@dataclass
class Context:
    """The backend that is wanted, its runs and its state; the operations on it; and where the node reports them."""

    reactor: PooledReactor
    ring: LogRing
    desired: Desired
    generations: Generations
    options: BackendOptions
    journal: Tells

    def __post_init__(self) -> None:
        self.events = UserEvents(self.journal, self.reactor)
        self.status = Status(self.ring, self.journal)
        self.control = Control()


class Worker:
    """The base of a class that works on `Context`."""

    def __init__(self, context: Context) -> None:
        self._reactor = context.reactor
        self._ring = context.ring
        self._desired = context.desired
        self._generations = context.generations
        self._options = context.options
        self._journal = context.journal
        self._events = context.events
        self._status = context.status
        self._control = context.control

    @property
    def _running(self) -> Generation | None:
        """The current run, while the backend is running."""
        return self._generations.current if self._status.running else None
