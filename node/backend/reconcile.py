"""Applies changed users to one run of a core, one batch at a time, always towards the newest target.

Changes that arrive while a batch is under way are batched for the next one. Within a batch all removals come before
all additions, so a credential can move from one user to another, whatever the order on the wire. No batch waits for
another run of the core: changes that this run cannot take are left, and the next batch goes on.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from twisted.internet.defer import Deferred, DeferredLock
from twisted.python.failure import Failure

from node.contract.accounts import Change, Refusal, key_of
from node.contract.driver import Applied

Pairs = set[tuple[str, str]]
# A caller who waits for pairs.
Waiting = tuple[Pairs, Deferred[Applied]]


class Batches:
    """Pairs that wait or are being applied, and the callers that wait for them."""

    def __init__(self) -> None:
        self._dirty: Pairs = set()
        # Pairs of changes that the core has not confirmed yet: they may be in force or not.
        self._asked: Pairs = set()
        self._waiting: list[Waiting] = []
        self._turn = DeferredLock()

    def _add(self, touched: Pairs) -> Deferred[Applied]:
        """Have a batch apply these. Fires with the refused users and the changes left for another run."""
        done: Deferred[Applied] = Deferred()
        self._dirty |= touched
        self._waiting.append((touched, done))
        return done

    def busy(self, touched: Pairs) -> bool:
        """Whether some of these pairs wait or are being applied."""
        return not all(map(touched.isdisjoint, (self._dirty, self._asked)))

    async def idle(self) -> None:
        """Wait until the batch under way, and those that wait for their turn, are done."""
        await self._turn.run(lambda: None)

    @property
    def under_way(self) -> Pairs:
        """The pairs that wait or are being applied."""
        return self._dirty | self._asked


class Reconciler(Batches):
    """Batches and applies the changes of one run; nothing else changes its users."""

    def changes(self, touched: Iterable[tuple[str, str]]) -> list[Change]:
        """The changes that these (tag, key) pairs need now."""
        raise NotImplementedError

    async def apply(self, changes: list[Change]) -> Applied:
        """Apply these changes to the running core."""
        raise NotImplementedError

    def settle(self, touched: Pairs) -> Deferred[Applied]:
        """Apply what these pairs need. Fires with the refused users and the changes left for another run."""
        done = self._add(touched)
        if len(self._waiting) == 1:
            self._turn.run(self._batch)
        return done

    def unsettled(self, differences: Iterable[Change]) -> Pairs:
        """The pairs of these changes, and those that may differ when the batch under way is done."""
        return self._asked | pairs(differences)

    async def _batch(self) -> None:
        dirty, self._dirty = self._dirty, set()
        waiting, self._waiting = self._waiting, []
        try:
            applied = await self._reconcile(dirty)
        except Exception:  # noqa: BLE001 - every caller that waits gets it
            fault = Failure()
            for _, done in waiting:
                done.errback(fault)
        else:
            answer(waiting, applied)

    async def _reconcile(self, touched: Pairs) -> Applied:
        changes = self.changes(touched)
        if not changes:
            return Applied([], [])
        self._asked = pairs(changes)
        try:
            return await self.apply(changes)
        finally:
            self._asked = set()


def answer(waiting: Iterable[Waiting], applied: Applied) -> None:
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
