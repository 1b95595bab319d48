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
    """`read` reads one run; it goes on when nobody waits for it any more."""

    def __init__(self, reactor: IReactorTime, read: Callable[[Generation], Coroutine[Any, Any, bool]]) -> None:
        self._reactor = reactor
        self._read = read
        # Who waits for each, and since when it is under way.
        self._waiting: dict[Generation, list[Deferred[bool]]] = {}
        self._since: dict[Generation, float] = {}

    @property
    def under_way(self) -> Collection[Generation]:
        return self._waiting.keys()

    async def one(self, run: Generation) -> bool:
        """What a reading that begins now says."""
        while run in self._waiting:
            await self._of(run)
        return await self._of(run)

    async def all(self, runs: Iterable[Generation]) -> bool:
        """Whether a reading of one of these, begun or joined, says so; or may, because it takes too long."""
        readings = {run: self._of(run) for run in runs}
        now = self._reactor.seconds()
        awaited = [reading for run, reading in readings.items() if now - self._since.get(run, now) < PATIENCE]
        try:
            told = await ensureDeferred(together(awaited)).addTimeout(PATIENCE, self._reactor)
        except TimeoutError:
            return True
        return any(told) or len(awaited) < len(readings)

    def _of(self, run: Generation) -> Deferred[bool]:
        """The reading that is under way, or else a new one; a Deferred of its own for each caller."""
        waiter: Deferred[bool] = Deferred()
        if run in self._waiting:
            self._waiting[run].append(waiter)
        else:
            self._waiting[run], self._since[run] = [waiter], self._reactor.seconds()
            ensureDeferred(self._read(run)).addBoth(self._done, run)
        return waiter

    def _done(self, outcome: bool | Failure, run: Generation) -> None:
        del self._since[run]
        for waiter in self._waiting.pop(run):
            waiter.callback(outcome)
