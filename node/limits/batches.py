"""Batches work for users: keys are collected, and one turn handles many."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Coroutine
from typing import Any

from twisted.internet.defer import Deferred, ensureDeferred
from twisted.internet.interfaces import IDelayedCall, IReactorTime
from twisted.python.failure import Failure

from node.base.logs import Logger

# Seconds for which users are collected; the second for those who may wait.
SOON, LATER = 0.1, 1.0
# Users in one turn.
MOST = 500


class Batches:
    """Calls `work` with batches of user keys, one at a time. `what` completes "… failed"."""

    log = Logger()

    def __init__(self, reactor: IReactorTime, what: str, work: Callable[[frozenset[str]], Coroutine[Any, Any, None]]):
        self._reactor = reactor
        self._what = what
        self._work = work
        self._due: set[str] = set()
        self._patient: set[str] = set()
        self._call: IDelayedCall | None = None
        self._turn: Deferred[None] | None = None
        self._stopped = False
        # The users of the turn under way.
        self.under_way: frozenset[str] = frozenset()

    def ask(self, keys: Collection[str], *, later: bool = False) -> None:
        """Add users to the next turn. With `later` they may wait LATER seconds for it."""
        (self._patient if later else self._due).update(keys)
        self._arm()

    def stop(self) -> None:
        """Cancel the turn under way, and begin no more."""
        self._stopped = True
        if self._call is not None:
            self._call.cancel()
            self._call = None
        if self._turn is not None:
            self._turn.cancel()

    def _arm(self) -> None:
        if self._stopped or self._turn is not None or not (self._due or self._patient):
            return
        wait = SOON if self._due else LATER
        if self._call is None:
            self._call = self._reactor.callLater(wait, self._begin)
        elif self._call.getTime() > self._reactor.seconds() + wait:
            self._call.reset(wait)

    def _begin(self) -> None:
        self._call = None
        self.under_way = frozenset(itertools.islice(itertools.chain(self._due, self._patient), MOST))
        self._due -= self.under_way
        self._patient -= self.under_way
        turn = self._turn = ensureDeferred(self._work(self.under_way))
        turn.addErrback(self._failed).addBoth(self._over)

    def _failed(self, failure: Failure) -> None:
        if not self._stopped:
            self.log.failure("{what} failed", failure, what=self._what)

    def _over(self, _: object) -> None:
        self._turn, self.under_way = None, frozenset()
        self._arm()
