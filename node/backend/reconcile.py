"""Brings changed users into force, one batch at a time, always towards the newest target.

Changes that arrive while a batch is under way wait for the next one together. Within a batch all removals come before
all additions, so a credential that moves from one user to another arrives whole, whatever the order on the wire.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping

from twisted.internet.defer import Deferred, DeferredLock
from twisted.python.failure import Failure

from node.contract.accounts import Accounts, Change, Refusal, diff, key_of

Pairs = set[tuple[str, str]]


class Reconciler:
    """The only one who changes the users of a running core. `target` and `confirmed` are asked anew for each batch."""

    def __init__(
        self,
        target: Callable[[], Mapping[str, Accounts]],
        confirmed: Callable[[], Mapping[str, Accounts]],
        apply: Callable[[list[Change]], Awaitable[list[Refusal]]],
        window: Callable[[], float] = lambda: 0.0,
        sleep: Callable[[float], Awaitable[None]] | None = None,
        free: Callable[[list[Change]], list[Change]] = list,
    ) -> None:
        # Seconds that a batch with changes which are not free waits for more of them.
        self._window = window
        self._free = free
        self._sleep = sleep
        self._target = target
        self._confirmed = confirmed
        self._apply = apply
        self._dirty: Pairs = set()
        # What the core is being asked for now; nobody knows yet whether it is in force.
        self._asked: Pairs = set()
        # The changes that the core refused last, of those that still differ at a repair.
        self._refused: set[Change] = set()
        self._waiting: list[tuple[Pairs, Deferred[list[Refusal]]]] = []
        self._turn = DeferredLock()

    def settle(self, touched: Pairs) -> Deferred[list[Refusal]]:
        """Fires when these (tag, key) pairs are in force, with those of them that the core refused."""
        done: Deferred[list[Refusal]] = Deferred()
        self._dirty |= touched
        self._waiting.append((touched, done))
        if len(self._waiting) == 1:
            self._turn.run(self._batch)
        return done

    def differences(self) -> list[Change]:
        """What is not as it should be; with many users it takes a while to find."""
        return diff(self._confirmed(), self._target())

    def unsettled(self, differences: Iterable[Change]) -> Pairs:
        """What these are of, and what may not be as it should be when the batch under way is done."""
        return self._asked | pairs(differences)

    async def repair(self) -> list[Refusal]:
        """Settle whatever differs. What was refused is asked for again only where that costs nobody anything."""
        changes = self.differences()
        self._refused &= set(changes)
        asked = set(self._free(changes)) | set(changes) - self._refused
        return await self.settle(pairs(asked)) if asked else []

    async def idle(self) -> None:
        """Wait until all that was touched so far is settled."""
        await self._turn.run(lambda: None)

    async def _batch(self) -> None:
        waiting = self._waiting
        try:
            try:
                changes = await self._collect()
            finally:
                dirty, self._dirty, self._waiting = self._dirty, set(), []
            refused = await self._bring(self._changes(dirty) if changes is None else changes)
        except Exception:  # noqa: BLE001 - handed to everybody who waits for it
            fault = Failure()
            for _, done in waiting:
                done.errback(fault)
            return
        for touched, done in waiting:
            done.callback([refusal for key in sorted({key for _, key in touched}) for refusal in refused.get(key, ())])

    async def _collect(self) -> list[Change] | None:
        """Where a batch is dear it takes along what comes soon. What is free does not wait for that.

        Returns what differs, where nothing was waited for: with many users it takes a while to find.
        """
        window = self._window()
        if not window or self._sleep is None:
            return None
        changes = self._changes(self._dirty)
        free = self._free(changes)
        if len(free) == len(changes):
            return changes
        if free:
            await self._ask(free)
        await self._sleep(window)
        return None

    def _changes(self, dirty: Iterable[tuple[str, str]]) -> list[Change]:
        """What of it differs."""
        target, confirmed = self._target(), self._confirmed()
        wanted = [Change(tag, key, target[tag].get(key)) for tag, key in dirty if tag in target]
        return [change for change in wanted if confirmed[change.tag].get(change.key) != change.packed]

    async def _bring(self, changes: list[Change]) -> dict[str, list[Refusal]]:
        """Apply what differs; the refusals by key."""
        refused: dict[str, list[Refusal]] = {}
        if changes:
            for refusal in await self._ask(changes):
                refused.setdefault(key_of(refusal.email), []).append(refusal)
        return refused

    async def _ask(self, changes: list[Change]) -> list[Refusal]:
        self._asked = pairs(changes)
        try:
            refused = await self._apply(changes)
        finally:
            self._asked = set()
        names = {key_of(refusal.email) for refusal in refused}
        self._refused |= {change for change in changes if change.key in names}
        return refused


def pairs(changes: Iterable[Change]) -> Pairs:
    """What the changes are of."""
    return {(change.tag, change.key) for change in changes}
