"""The engine with its operations, as a node has them, and its parts by themselves."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from dataclasses import replace
from typing import Any

from node.api.operations import Operations
from node.backend.desired import Desired
from node.backend.options import BackendOptions
from node.backend.runner import Runner
from node.base.logs import LogRing
from node.base.part import Parts
from node.base.sockets import Passed
from node.contract.driver import Driver, Generation
from node.contract.generations import Generations
from node.contract.saved import Changes, Lasting, Saved
from node.engine.engine import Engine
from node.engine.options import EngineOptions
from node.events.journal import Journal
from node.machine.interfaces import Carried, Interfaces
from node.machine.system import SystemStats

OPTIONS = BackendOptions()
ENGINE = EngineOptions()
# The interfaces of a machine that carries nothing; its clocks stand still.
IDLE = Interfaces("boot", {"eth0": Carried(1, 1)}, frozenset({"eth0"}))


def make_runner(
    clock: Any,
    ring: LogRing,
    record: Any,
    generations: Generations,
    read: Callable[[Generation], Coroutine[Any, Any, bool]],
    options: BackendOptions = OPTIONS,
) -> Runner:
    """A runner whose events are in memory alone."""
    return Runner(clock, ring, Desired(clock, record), generations, read, options, Journal(clock))


def everything(part: Lasting) -> Changes:
    """All that a part keeps on disk."""
    changes = Changes()
    part.save(changes)
    return changes


class Whole(Operations):
    """All operations over an engine. Further `parts` may be given."""

    def __init__(
        self,
        clock: Any,
        ring: LogRing,
        drivers: Mapping[int, Driver],
        store: Any,
        options: EngineOptions = ENGINE,
        parts: Parts | None = None,
    ) -> None:
        self.parts = parts or Parts()
        self.journal = Journal(clock)
        self.engine = Engine(clock, ring, drivers, store, self.journal, options, Passed())
        bill: Any = self.engine.bill
        bill._sources = replace(bill._sources, read=lambda: (1.0, IDLE), now=lambda: 1.0)
        self.parts.add(*self.engine.parts)
        super().__init__(self.engine, SystemStats(clock), self.parts)

    def begin(self, saved: Saved) -> None:
        """Begin with what an earlier node has saved."""
        for part in self.parts:
            if isinstance(part, Lasting):
                part.restore(saved)
        self.parts.start()
        self.parts.begin()

    async def close(self) -> None:
        """End."""
        await self.parts.stop()
