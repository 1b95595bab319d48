"""Applies changed users to one run of a core, one batch at a time, always towards the newest target.

Changes that arrive while a batch is under way are batched for the next one. Within a batch all removals come before
all additions, so a credential can move from one user to another, whatever the order on the wire. No batch waits for
another run of the core: changes that this run cannot take are left, and the next batch goes on.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

from twisted.internet.defer import Deferred, DeferredLock
from twisted.python.failure import Failure

from node.contract.accounts import Change, Refusal, key_of
from node.contract.driver import Applied

Pairs = set[tuple[str, str]]


class Core(Protocol):
    """The run that a reconciler applies changes to; it computes the differences for each batch."""

    def changes(self, touched: Iterable[tuple[str, str]]) -> list[Change]:
        """The changes that these (tag, key) pairs need now."""

    async def apply(self, changes: list[Change]) -> Applied:
        """Apply these changes to the running core."""


class Reconciler:
    """Batches and applies changes; nothing else changes the users of its run."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._dirty: Pairs = set()
        # Pairs of changes that the core has not confirmed yet: they may be in force or not.
        self._asked: Pairs = set()
        self._waiting: list[tuple[Pairs, Deferred[Applied]]] = []
        self._turn = DeferredLock()

    def settle(self, touched: Pairs) -> Deferred[Applied]:
        """Apply what these (tag, key) pairs need. Fires with the refused users and the changes left for another run."""
        done: Deferred[Applied] = Deferred()
        self._dirty |= touched
        self._waiting.append((touched, done))
        if len(self._waiting) == 1:
            self._turn.run(self._batch)
        return done

    def unsettled(self, differences: Iterable[Change]) -> Pairs:
        """The pairs of these changes, and those that may differ when the batch under way is done."""
        return self._asked | pairs(differences)

    def busy(self, touched: Pairs) -> bool:
        """Whether some of these pairs wait or are being applied."""
        return not all(map(touched.isdisjoint, (self._dirty, self._asked)))

    async def idle(self) -> None:
        """Wait until the changes so far are applied."""
        await self._turn.run(lambda: None)

    @property
    def under_way(self) -> Pairs:
        """The pairs that wait or are being applied."""
        return self._dirty | self._asked

    async def _batch(self) -> None:
        dirty, self._dirty = self._dirty, set()
        waiting, self._waiting = self._waiting, []
        try:
            applied = await self._apply(dirty)
        except Exception:  # noqa: BLE001 - every caller that waits gets it
            fault = Failure()
            for _, done in waiting:
                done.errback(fault)
        else:
            _answer(waiting, applied)

    async def _apply(self, touched: Pairs) -> Applied:
        changes = self._core.changes(touched)
        if not changes:
            return Applied([], [])
        self._asked = pairs(changes)
        try:
            return await self._core.apply(changes)
        finally:
            self._asked = set()


def _answer(waiting: list[tuple[Pairs, Deferred[Applied]]], applied: Applied) -> None:
    """Give each caller the outcome of its pairs."""
    left, refused = {(change.tag, change.key): change for change in applied.left}, by_user(applied.refused)
    for touched, done in waiting:
        here = [left[pair] for pair in touched if pair in left] if left else []
        done.callback(Applied(concerning(touched, refused), here))


def by_user(refused: Iterable[Refusal]) -> dict[str, list[Refusal]]:
    """Group refusals by the user's key, without duplicates."""
    found: dict[str, list[Refusal]] = {}
    for refusal in dict.fromkeys(refused):
        found.setdefault(key_of(refusal.email), []).append(refusal)
    return found


def concerning(touched: Pairs, refused: Mapping[str, list[Refusal]]) -> list[Refusal]:
    """The refusals of the touched users."""
    keys = sorted({key for _, key in touched} if refused else ())
    return [refusal for key in keys for refusal in refused.get(key, ())]


def pairs(changes: Iterable[Change]) -> Pairs:
    """The (tag, key) pairs of these changes."""
    return {(change.tag, change.key) for change in changes}
