"""Readings of counters that are under way: one of each run at a time, and none that waits for another run."""

from __future__ import annotations

from collections.abc import Callable, Collection, Coroutine
from dataclasses import dataclass, field
from typing import Any

from twisted.internet.defer import Deferred, TimeoutError, ensureDeferred
from twisted.internet.interfaces import IReactorTime
from twisted.python.failure import Failure

from node.contract.counters import Scope
from node.contract.driver import Generation
from node.waiting import together

# Seconds that somebody who wants all counters waits for a run. What a slower one says is booked when it comes.
PATIENCE = 5.0


# Names of which a run is to say the counters; None for all that it has.
Wanted = frozenset[tuple[Scope, str]] | None
# Of how many names a run is asked one by one: of more, all counters are read.
FEW = 32


@dataclass
class Batch:
    """Who waits for one reading of a run, and what they want of it."""

    wanted: Wanted
    waiting: list[Deferred[bool]] = field(default_factory=list)

    def join(self, wanted: Wanted) -> Deferred[bool]:
        self.wanted = _both(self.wanted, wanted)
        self.waiting.append(Deferred())
        return self.waiting[-1]


class Readings:
    """`read` reads one run; it goes on when nobody waits for it any more.

    Nobody gets a reading that began before they asked: those who come while a run is read share the next one of it.
    """

    def __init__(self, reactor: IReactorTime, read: Callable[[Generation, Wanted], Coroutine[Any, Any, bool]]) -> None:
        self._reactor = reactor
        self._read = read
        self._under_way: dict[Generation, Batch] = {}
        self._since: dict[Generation, float] = {}
        self._next: dict[Generation, Batch] = {}

    @property
    def under_way(self) -> Collection[Generation]:
        return self._under_way.keys()

    def one(self, run: Generation, wanted: Wanted = None) -> Deferred[bool]:
        """What a reading says that begins now, or when the one under way is over; a Deferred for each caller."""
        if run in self._under_way:
            return self._next.setdefault(run, Batch(wanted)).join(wanted)
        batch = Batch(wanted)
        result = batch.join(wanted)
        self._begin(run, batch)
        return result

    async def all(self, runs: Collection[Generation], wanted: Wanted = None) -> bool:
        """Whether such a reading of one of these says so; or may, because it takes too long."""
        now = self._reactor.seconds()
        # Nobody waits for a core that hangs, nor do callers gather behind it.
        slow = {run for run in runs if now - self._since.get(run, now) >= PATIENCE}
        awaited = [self.one(run, wanted) for run in runs if run not in slow]
        try:
            told = await ensureDeferred(together(awaited)).addTimeout(PATIENCE, self._reactor)
        except TimeoutError:
            return True
        return any(told) or bool(slow)

    def _begin(self, run: Generation, batch: Batch) -> None:
        self._under_way[run], self._since[run] = batch, self._reactor.seconds()
        ensureDeferred(self._read(run, batch.wanted)).addBoth(self._done, run)

    def _done(self, outcome: bool | Failure, run: Generation) -> None:
        del self._since[run]
        batch = self._under_way.pop(run)
        if run in self._next:
            self._begin(run, self._next.pop(run))
        for waiter in batch.waiting:
            waiter.callback(outcome)


def _both(one: Wanted, other: Wanted) -> Wanted:
    names = None if one is None or other is None else one | other
    return None if names is None or len(names) > FEW else names
