"""Applies changes of users to every run of the core that serves.

There are two lanes. What a run can take while it runs is applied at once; so users are removed. Additions that the
current run cannot take wait for a new run (`node.backend.pending`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from twisted.internet.defer import ensureDeferred
from twisted.python.failure import Failure

from node.backend.context import Context, Worker
from node.backend.faults import in_background
from node.backend.keeper import Keeper, Keepers
from node.backend.pending import Pending
from node.backend.reconcile import Pairs, pairs
from node.backend.state import State
from node.backend.wind_down import WindDown
from node.base.errors import CoreFailed
from node.base.logs import Logger
from node.base.waiting import lasting, outcomes
from node.contract.accounts import Change, Refusal
from node.contract.driver import Applied, Generation
from node.contract.generations import Follower

# Users that an error names at most.
LISTED = 20

_Differences = Mapping[Keeper, list[Change]]


class Unsettled(NamedTuple):
    """One user's changes that are not in force yet.

    `leaving`: inbounds that a core still lets them into though it should not, or by an old credential. `busy`: a change
    is under way. `refused`: why the core did not take the last one.
    """

    leaving: list[str]
    busy: bool
    refused: list[str]


class Settling(Worker, Follower):
    """Applies changes through all keepers."""

    log = Logger()

    def __init__(self, context: Context, pending: Pending, keepers: Keepers, wind_down: WindDown) -> None:
        super().__init__(context)
        self._pending = pending
        self._keepers = keepers
        self._wind_down = wind_down
        # The accounts that the last Start takes away.
        self._leaving: list[Change] = []
        self._generations.follow(self)

    @property
    def warnings(self) -> list[str]:
        """A warning if wanted users are missing from the core."""
        reasons = self._pending.left_out.reasons
        out = sorted({key for _, key in self.differing(reasons.keys())}) if reasons and self._status.running else []
        if not out:
            return []
        return [f"{len(out)} users are missing from the core, or have an old credential there: {reasons[out[0]][0]}"]

    async def settle(self, touched: Pairs) -> list[Refusal]:
        """Wait until every run has applied these pairs. Returns the refusals. A starting core comes up with them."""
        if not touched:
            return []
        keys = {key for _, key in touched}
        return await self._everywhere(lambda keeper: touched | keeper.touched(keys), touched)

    async def put_out(self, keys: Collection[str]) -> None:
        """Take barred users (`Desired.barring`) out of every run."""
        await self.settle({(tag, key) for tag in self._desired.target for key in keys})

    async def settle_all(self) -> list[Refusal]:
        """Wait until every run has applied all differences. Returns the refusals."""
        return await self._settle(self._differences())

    async def settle_start(self, wait: bool = False) -> list[Refusal]:
        """Do the same at the end of a Start; `require_out` then checks the users whom the Start removed.

        Waits for a new run that has to bring users only with `wait`.
        """
        differences = self._differences()
        self._leaving = _kept(differences)
        return await self._settle(differences, wait)

    def require_out(self) -> None:
        """Raise `CoreFailed` if the core did not answer and may still let in users whom the Start removed."""
        # Only the Start's own removals: those by other calls since then are still under way.
        keys = sorted({change.key for change in set(self._leaving).intersection(_kept(self._differences()))})
        if keys:
            listed = ", ".join(map(repr, keys[:LISTED])) + (" and others" if len(keys) > LISTED else "")
            raise CoreFailed(
                f"the core did not answer: {listed} may still get in; the node removes them when it answers"
            )

    def differing(self, keys: Collection[str]) -> Pairs:
        """The pairs of these users that some run has not applied yet; without a current run, all wanted ones."""
        current = self._generations.current
        confirmed = current.accounts if current else {}
        here = {
            (tag, key)
            for tag, target in self._desired.target.items()
            for key in keys
            if confirmed.get(tag, {}).get(key) != target.get(key)
        }
        for keeper in self._keepers:
            if not keeper.serves:
                here |= pairs(keeper.changes(keeper.touched(keys)))
        return here

    def unsettled(self, key: str) -> Unsettled:
        """Return the user's changes that are not in force yet."""
        leaving, busy = set[str](), False
        for keeper in self._keepers:
            touched = keeper.touched((key,))
            leaving.update(change.tag for change in keeper.kept(keeper.changes(touched)))
            busy = busy or keeper.busy(touched) or self._pending.busy(touched)
        reasons = self._pending.left_out.reasons.get(key, ())
        return Unsettled(sorted(leaving), busy, list(dict.fromkeys(reasons)))

    def unsettled_keys(self) -> set[str]:
        """The keys of users whose changes are under way or were refused."""
        under_way = self._pending.under_way.union(*(keeper.under_way for keeper in self._keepers))
        return {key for _, key in under_way} | self._pending.left_out.reasons.keys()

    async def repair(self, run: Generation) -> None:
        """Apply all differences to a run, except changes that a core has refused: no new run would start with them."""
        keeper = self._keepers.of(run)
        if keeper is not None:
            differences = keeper.differences()
            if keeper.admits:
                differences = self._pending.left_out.besides(differences)
            touched = pairs(differences)
            if touched:
                await self._everywhere(lambda each: touched if each is keeper else set(), touched)
            self._pending.refresh.soon()

    def drains(self, run: Generation) -> None:
        """Repair a run that begins to drain: the removals that it left for the next run are still due on it."""
        in_background(self.repair(run), "removed users could not be taken out of a draining core")

    async def idle(self) -> None:
        """Wait until the changes so far are applied and no new run is starting."""
        for keeper in self._keepers:
            await keeper.idle()
        await self._pending.idle()

    def forget(self) -> None:
        """Clear everything, to free memory: no run is left, and none is to start."""
        self._leaving = []
        self._pending.forget()

    def _differences(self) -> _Differences:
        return {keeper: keeper.differences() for keeper in self._keepers}

    async def _settle(self, differences: _Differences, wait: bool = True) -> list[Refusal]:
        def touched(keeper: Keeper) -> Pairs:
            known = differences.get(keeper)
            return keeper.unsettled(keeper.differences() if known is None else known)

        return await self._everywhere(touched, Pairs(), wait)

    async def _everywhere(self, touched: Callable[[Keeper], Pairs], wanted: Pairs, wait: bool = True) -> list[Refusal]:
        """Apply pairs to every run, also to those that take over or begin to drain meanwhile.

        If the current run is just being replaced, the new one brings `wanted`. With `wait`, and for removals, this
        waits for the new run that brings what the current one left. Returns the refusals. Raises the first fault at the
        end.
        """
        known, found = set[tuple[Keeper, bool, bool]](), _Found()
        if self._status.running and self._generations.current is None:
            found.left.append(wanted)
        while (asked := self._asked(known)) or found.left:
            if asked:
                these = [touched(keeper) for keeper in asked]
                found.touched.update(*these)
                work = [keeper.settle(some) for keeper, some in zip(asked, these, strict=True)]
                settled = await outcomes(work)
                for keeper, pairs_of, outcome in zip(asked, these, settled, strict=True):
                    if isinstance(outcome, Failure):
                        self._fail(keeper, pairs_of, outcome, found)
                    else:
                        await self._take(keeper, outcome, found)
            else:
                await self._bring(found, wait)
        self._pending.left_out.note(found.touched, found.refused)
        self._pending.refresh.soon()
        for fault in found.faults:
            fault.raiseException()
        return found.refused

    def _asked(self, known: set[tuple[Keeper, bool, bool]]) -> list[Keeper]:
        """The keepers to ask: those that were not asked yet in the role that they have now."""
        roles = {keeper: (keeper, keeper.serves, keeper.takes_over) for keeper in self._keepers if keeper.is_asked}
        asked = [keeper for keeper, role in roles.items() if role not in known]
        known.update(roles.values())
        return asked

    def _fail(self, keeper: Keeper, touched: Pairs, fault: Failure, found: _Found) -> None:
        found.faults.append(fault)
        if keeper.serves:
            self._pending.try_again(touched)

    async def _take(self, keeper: Keeper, outcome: Applied, found: _Found) -> None:
        found.refused += outcome.refused
        if outcome.left and keeper.admits and not found.brought:
            found.left.append(pairs(outcome.left))
            found.removes = found.removes or bool(keeper.kept(outcome.left))
        elif keeper.drains and keeper.kept(keeper.changes(pairs(outcome.left))):
            # It may have left additions only, as the current run that it was.
            await self._end_draining(keeper)

    async def _bring(self, found: _Found, wait: bool) -> None:
        left, found.left, found.brought = Pairs().union(*found.left), [], True
        bringing = self._pending.bring(left)
        if wait or found.removes:
            found.refused += (await bringing).refused
        else:
            in_background(bringing, "changes of users could not be applied to the core; the next audit retries")

    async def _end_draining(self, keeper: Keeper) -> None:
        """End a draining run that cannot remove a user while it runs; it gets no new connections anyway.

        A run that a Start may fall back on, or that waits for a Start, is not ended for that.
        """
        if self._status.stopped or self._status.state is State.STARTING:
            self.log.warn(
                "a removed user's connections last until the core ends: it cannot cut them, and a Start may need it"
            )
        else:
            self.log.info("ending a draining core, because it cannot cut a removed user's connections alone")
            # Goes on if the call is aborted meanwhile.
            await lasting(ensureDeferred(self._wind_down.end(keeper.run)))


@dataclass
class _Found:
    """The outcome so far; `left` are the pairs that the current run, or one that takes over, left for a new one.

    `removes`: some of these remove a user who is in until then.
    """

    touched: Pairs = field(default_factory=set)
    refused: list[Refusal] = field(default_factory=list)
    faults: list[Failure] = field(default_factory=list)
    left: list[Pairs] = field(default_factory=list)
    removes: bool = False
    brought: bool = False


def _kept(differences: _Differences) -> list[Change]:
    """Removals and replaced credentials that are not in force yet."""
    return [change for keeper, changes in differences.items() for change in keeper.kept(changes)]
