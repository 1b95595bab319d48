"""The objects that all parts of the backend share."""

from __future__ import annotations

from node.backend.control import Control
from node.backend.desired import Desired
from node.backend.options import BackendOptions
from node.backend.state import Status
from node.base.logs import LogRing
from node.base.reactor import PooledReactor
from node.contract.generations import Generations
from node.events.journal import Tells
from node.events.users import UserEvents


class Context:
    """The backend that is wanted, its runs and its state; the operations on it; and where the node reports them."""

    def __init__(
        self,
        reactor: PooledReactor,
        ring: LogRing,
        desired: Desired,
        generations: Generations,
        options: BackendOptions,
        journal: Tells,
    ) -> None:
        self.reactor = reactor
        self.ring = ring
        self.desired = desired
        self.generations = generations
        self.options = options
        self.journal = journal
        self.events = UserEvents(journal, reactor)
        self.status = Status(ring, journal)
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
