"""Brings changed users into a core, one batch at a time, always towards the newest target.

Changes that arrive while a batch is under way wait for the next one together. Within a batch all removals come before
all additions, so a credential that moves from one user to another arrives whole, whatever the order on the wire.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable
from contextlib import suppress
from typing import Any, Protocol

from twisted.internet.defer import CancelledError, Deferred, DeferredLock, ensureDeferred
from twisted.python.failure import Failure

from node.contract.accounts import Change, Refusal, key_of
from node.contract.driver import Applied

Pairs = set[tuple[str, str]]


class Core(Protocol):
    """What a reconciler brings users into. Asked anew for each batch what differs."""

    def window(self, collected: float) -> float:
        """Seconds for which changes that take a new run are collected, more than these; 0 when it is enough."""

    def changes(self, touched: Iterable[tuple[str, str]]) -> list[Change]:
        """What of these (tag, key) pairs is not as it should be now."""

    def differences(self) -> list[Change]:
        """All that is not as it should be; with many users it takes a while to find."""

    async def apply(self, changes: list[Change]) -> Applied:
        """Have the core take these changes while it runs."""

    async def renew(self, left: list[Change]) -> list[Refusal]:
        """Bring in what `apply` left, by a new run. Returns who is refused."""


class Reconciler:
    """The only one that changes the users of its core. `sleep` waits so many seconds."""

    def __init__(self, core: Core, sleep: Callable[[float], Deferred[None] | Coroutine[Any, Any, None]]) -> None:
        self._core = core
        self._sleep = sleep
        self._dirty: Pairs = set()
        # What the core is being asked for now; nobody knows yet whether it is in force.
        self._asked: Pairs = set()
        # What a new run refused, of those that still differ at a repair.
        self._refused: set[Change] = set()
        # What another run is to bring, while changes are collected for it.
        self._left: Pairs = set()
        # Why the core refused what was touched last of a user, by key.
        self.reasons: dict[str, list[str]] = {}
        self._waiting: list[tuple[Pairs, Deferred[list[Refusal]]]] = []
        self._turn = DeferredLock()
        self._collecting: Deferred[None] | None = None

    def settle(self, touched: Pairs) -> Deferred[list[Refusal]]:
        """Fires when these (tag, key) pairs are in force, with those of them that the core refused."""
        done: Deferred[list[Refusal]] = Deferred()
        self._dirty |= touched
        self._waiting.append((touched, done))
        if len(self._waiting) == 1:
            self._turn.run(self._batch)
        return done

    def unsettled(self, differences: Iterable[Change]) -> Pairs:
        """What these are of, and what may not be as it should be when the batch under way is done."""
        return self._asked | pairs(differences)

    def busy(self, touched: Pairs) -> bool:
        """Whether some of this is under way."""
        return not all(map(touched.isdisjoint, (self._dirty, self._asked, self._left)))

    def restless(self) -> set[str]:
        """The users, by key, of whom something is under way or was refused."""
        return {key for some in (self._dirty, self._asked, self._left) for _, key in some} | self.reasons.keys()

    async def repair(self) -> None:
        """Settle whatever differs, but not what a new run refused: another one would end everybody's connections."""
        changes = set(self._core.differences())
        self._refused &= changes
        if asked := changes - self._refused:
            await self.settle(pairs(asked))

    def alone(self, work: Callable[[], Coroutine[Any, Any, object]]) -> Deferred[object]:
        """Do this while no batch is under way."""
        return self._turn.run(lambda: ensureDeferred(work()))

    async def idle(self) -> None:
        """Wait until all that was touched so far is settled, and not for more to come."""
        if self._collecting is not None:
            self._collecting.cancel()
        await self._turn.run(lambda: None)

    async def _collect(self) -> None:
        collected = 0.0
        try:
            with suppress(CancelledError):  # somebody is in a hurry
                while seconds := self._core.window(collected):
                    self._collecting = ensureDeferred(self._sleep(seconds))
                    await self._collecting
                    collected += seconds
        finally:
            self._collecting = None

    async def _batch(self) -> None:
        dirty, waiting = self._take()
        try:
            refused, left = await self._apply(dirty)
            if left:
                self._left = pairs(left)
                # What is dear takes along what comes soon.
                await self._collect()
                more, joined = self._take()
                waiting += joined
                dirty |= more
                refused += await self._bring(pairs(left) | more)
        except Exception:  # noqa: BLE001 - handed to everybody who waits for it
            fault = Failure()
            for _, done in waiting:
                done.errback(fault)
            return
        finally:
            self._left = set()
        self._note(dirty, refused)
        _tell(waiting, refused)

    def _note(self, dirty: Pairs, refused: list[Refusal]) -> None:
        if self.reasons:
            for _, key in dirty:
                self.reasons.pop(key, None)
        for refusal in dict.fromkeys(refused):
            self.reasons.setdefault(key_of(refusal.email), []).append(refusal.reason)

    def _take(self) -> tuple[Pairs, list[tuple[Pairs, Deferred[list[Refusal]]]]]:
        dirty, self._dirty = self._dirty, set()
        waiting, self._waiting = self._waiting, []
        return dirty, waiting

    async def _bring(self, touched: Pairs) -> list[Refusal]:
        """Bring it into the core that runs as far as that can be, and then the rest into the next."""
        refused, left = await self._apply(touched)
        if left:
            self._asked = pairs(left)
            try:
                not_taken = await self._core.renew(left)
            finally:
                self._asked = set()
            names = {key_of(refusal.email) for refusal in not_taken}
            self._refused |= {change for change in left if change.key in names}
            refused += not_taken
        return refused

    async def _apply(self, touched: Pairs) -> Applied:
        changes = self._core.changes(touched)
        if not changes:
            return Applied([], [])
        self._asked = pairs(changes)
        try:
            return await self._core.apply(changes)
        finally:
            self._asked = set()


def _tell(waiting: list[tuple[Pairs, Deferred[list[Refusal]]]], refused: list[Refusal]) -> None:
    """Tell each waiter of those that it touched."""
    by_key: dict[str, list[Refusal]] = {}
    for refusal in dict.fromkeys(refused):
        by_key.setdefault(key_of(refusal.email), []).append(refusal)
    for touched, done in waiting:
        keys = sorted({key for _, key in touched} if by_key else ())
        done.callback([refusal for key in keys for refusal in by_key.get(key, ())])


def pairs(changes: Iterable[Change]) -> Pairs:
    """What the changes are of."""
    return {(change.tag, change.key) for change in changes}
