"""What all parts of the backend work on."""

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


class Common:
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
    """The base of a class that works on `Common`."""

    def __init__(self, common: Common) -> None:
        self._reactor = common.reactor
        self._ring = common.ring
        self._desired = common.desired
        self._generations = common.generations
        self._options = common.options
        self._journal = common.journal
        self._events = common.events
        self._status = common.status
        self._control = common.control
