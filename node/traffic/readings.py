"""Schedules readings of counters: one of each run at a time, independently of other runs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Coroutine
from dataclasses import dataclass, field
from typing import Any

from twisted.internet.defer import Deferred, TimeoutError, ensureDeferred
from twisted.internet.interfaces import IReactorTime
from twisted.python.failure import Failure

from node.base.waiting import together
from node.contract.counters import Asked
from node.contract.driver import Generation

# Seconds that a caller who wants all counters waits for a run; a slower reading is booked when it comes.
PATIENCE = 5.0


# The counters to read; None for all.
Wanted = frozenset[Asked] | None
# Up to this many names are read one by one; for more, all counters are read.
FEW = 32


@dataclass
class Batch:
    """The callers that wait for one reading of a run, the names that they want, and when the reading began."""

    wanted: Wanted
    began: float = 0.0
    waiting: list[Deferred[bool]] = field(default_factory=list)

    def join(self, wanted: Wanted) -> Deferred[bool]:
        self.wanted = _both(self.wanted, wanted)
        self.waiting.append(Deferred())
        return self.waiting[-1]


class Readings:
    """Schedules readings. `read` reads one run; it continues even if no caller waits for it any more.

    No caller gets a reading that began before its request: callers that come while a run is read share its next one.
    """

    def __init__(self, reactor: IReactorTime, read: Callable[[Generation, Wanted], Coroutine[Any, Any, bool]]) -> None:
        self._reactor = reactor
        self._read = read
        self.under_way: dict[Generation, Batch] = {}
        self._next: dict[Generation, Batch] = {}

    def one(self, run: Generation, wanted: Wanted = None) -> Deferred[bool]:
        """The result of a reading that begins now, or after the one under way. Each caller gets its own Deferred."""
        if run in self.under_way:
            return self._next.setdefault(run, Batch(wanted)).join(wanted)
        batch = Batch(wanted)
        result = batch.join(wanted)
        self._begin(run, batch)
        return result

    async def all(self, runs: Collection[Generation], wanted: Wanted = None) -> bool:
        """Read several runs. Returns whether any reading returned True, or takes longer than PATIENCE."""
        now = self._reactor.seconds()
        # No caller waits for a core that hangs already: else callers would queue behind it.
        slow = {run for run, batch in self.under_way.items() if run in runs and now - batch.began >= PATIENCE}
        awaited = [self.one(run, wanted) for run in runs if run not in slow]
        try:
            moved = await ensureDeferred(together(awaited)).addTimeout(PATIENCE, self._reactor)
        except TimeoutError:
            return True
        return any(moved) or bool(slow)

    def _begin(self, run: Generation, batch: Batch) -> None:
        batch.began = self._reactor.seconds()
        self.under_way[run] = batch
        ensureDeferred(self._read(run, batch.wanted)).addBoth(self._done, run)

    def _done(self, outcome: bool | Failure, run: Generation) -> None:
        batch = self.under_way.pop(run)
        if run in self._next:
            self._begin(run, self._next.pop(run))
        for waiter in batch.waiting:
            waiter.callback(outcome)


def _both(one: Wanted, other: Wanted) -> Wanted:
    names = None if one is None or other is None else one | other
    return None if names is None or len(names) > FEW else names
