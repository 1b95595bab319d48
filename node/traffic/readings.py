"""Readings of counters that are under way: one of each run at a time, and none that waits for another run."""

from __future__ import annotations

from collections.abc import Callable, Collection, Coroutine, Iterable
from typing import Any

from twisted.internet.defer import Deferred, TimeoutError, ensureDeferred
from twisted.internet.interfaces import IReactorTime
from twisted.python.failure import Failure

from node.contract.driver import Generation
from node.waiting import together

# Seconds that somebody who wants all counters waits for a run. What a slower one says is booked when it comes.
PATIENCE = 5.0


class Readings:
    """`read` reads one run; it goes on when nobody waits for it any more. Nobody gets one that began before they asked:
    who comes while a run is read waits for the next reading of it, which all who came meanwhile share."""

    def __init__(self, reactor: IReactorTime, read: Callable[[Generation], Coroutine[Any, Any, bool]]) -> None:
        self._reactor = reactor
        self._read = read
        # Who waits for each that is under way, since when it is, and who waits for the next one.
        self._waiting: dict[Generation, list[Deferred[bool]]] = {}
        self._since: dict[Generation, float] = {}
        self._next: dict[Generation, list[Deferred[bool]]] = {}

    @property
    def under_way(self) -> Collection[Generation]:
        return self._waiting.keys()

    def one(self, run: Generation) -> Deferred[bool]:
        """What a reading says that begins now, or when the one under way is over; a Deferred for each caller."""
        waiter: Deferred[bool] = Deferred()
        if run in self._waiting:
            self._next.setdefault(run, []).append(waiter)
        else:
            self._begin(run, [waiter])
        return waiter

    async def all(self, runs: Iterable[Generation]) -> bool:
        """Whether such a reading of one of these says so; or may, because it takes too long."""
        readings = {run: self.one(run) for run in runs}
        now = self._reactor.seconds()
        awaited = [reading for run, reading in readings.items() if now - self._since.get(run, now) < PATIENCE]
        try:
            told = await ensureDeferred(together(awaited)).addTimeout(PATIENCE, self._reactor)
        except TimeoutError:
            return True
        return any(told) or len(awaited) < len(readings)

    def _begin(self, run: Generation, waiting: list[Deferred[bool]]) -> None:
        self._waiting[run], self._since[run] = waiting, self._reactor.seconds()
        ensureDeferred(self._read(run)).addBoth(self._done, run)

    def _done(self, outcome: bool | Failure, run: Generation) -> None:
        del self._since[run]
        waiting = self._waiting.pop(run)
        if run in self._next:
            self._begin(run, self._next.pop(run))
        for waiter in waiting:
            waiter.callback(outcome)
