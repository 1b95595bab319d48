"""Brings what is said of users into every run of the core that has connections: one keeper for each."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from itertools import chain
from typing import NamedTuple

from twisted.internet.defer import Deferred

from node.backend.desired import Desired
from node.backend.generations import Generations
from node.backend.keeper import Keeper
from node.backend.reconcile import Pairs
from node.backend.state import Status
from node.contract.accounts import Change, Refusal
from node.contract.driver import Generation
from node.errors import CoreFailed
from node.waiting import together

# Users that are named in an error.
LISTED = 20

_Differences = Mapping[Keeper, list[Change]]


class Unsettled(NamedTuple):
    """Of one user: inbounds that a core still lets them into though it should not, or by what it should not.

    `busy`: a change of them is under way. `refused`: why the core did not take the last one.
    """

    leaving: list[str]
    busy: bool
    refused: list[str]


class Settling:
    """The keepers of all runs. `keep` makes one."""

    def __init__(
        self, status: Status, desired: Desired, generations: Generations, keep: Callable[[Generation], Keeper]
    ) -> None:
        self._status = status
        self._desired = desired
        self._generations = generations
        self._keep = keep
        # The last one is that of the current run, also while another run takes its place.
        self._keepers: list[Keeper] = []
        # What the last Start takes away that was in force.
        self._leaving: list[Change] = []
        generations.watch(self._follow)

    async def settle(self, touched: Pairs) -> list[Refusal]:
        """Wait until what was touched is in force in all runs; what a core refused of it.

        A core on its way takes it along.
        """
        if not touched:
            return []
        keys = {key for _, key in touched}
        return await self._everywhere(lambda keeper: keeper.settle(touched | keeper.touched(keys)))

    async def settle_all(self) -> list[Refusal]:
        """The same for whatever differs."""
        return await self._settle(self._differences())

    async def settle_start(self) -> list[Refusal]:
        """The same at the end of a Start; `require_out` tells what became of those whom it took out."""
        differences = self._differences()
        self._leaving = _kept(differences)
        refused = await self._settle(differences)
        for keeper in self._asked:
            keeper.refresh_soon()
        return refused

    def require_out(self) -> None:
        """Raises if the core may still let in somebody whom the Start took out: it did not answer then."""
        # Not whom somebody else took out meanwhile: that is on its way.
        keys = sorted({change.key for change in set(self._leaving).intersection(_kept(self._differences()))})
        if keys:
            listed = ", ".join(map(repr, keys[:LISTED])) + (" and others" if len(keys) > LISTED else "")
            raise CoreFailed(f"the core did not answer: {listed} may still be in; the node puts them out when it does")

    def differing(self, keys: Collection[str]) -> Pairs:
        """What of these users is not as it should be in some run, or in the one that is on its way."""
        current = self._generations.current
        confirmed = current.accounts if current else {}
        here = {
            (tag, key)
            for tag, target in self._desired.target.items()
            for key in keys
            if confirmed.get(tag, {}).get(key) != target.get(key)
        }
        for keeper in self._draining:
            here |= {(change.tag, change.key) for change in keeper.changes(keeper.touched(keys))}
        return here

    def unsettled(self, key: str) -> Unsettled:
        """What of this user is not as it should be."""
        leaving, busy, refused = set[str](), False, list[str]()
        for keeper in self._keepers:
            touched = keeper.touched((key,))
            leaving.update(change.tag for change in keeper.kept(keeper.changes(touched)))
            busy = busy or keeper.busy(touched)
            refused += keeper.reasons.get(key, ())
        return Unsettled(sorted(leaving), busy, list(dict.fromkeys(refused)))

    def restless(self) -> set[str]:
        """The users, by key, of whom something is under way or was refused."""
        return set[str]().union(*(keeper.restless() for keeper in self._keepers))

    async def repair(self, run: Generation) -> None:
        """Bring a run to what is wanted, whatever it has refused or lost."""
        for keeper in self._keepers:
            if keeper.run is run:
                await keeper.repair()
                return

    async def idle(self) -> None:
        """Wait until all that was touched so far is settled."""
        for keeper in tuple(self._keepers):
            await keeper.idle()

    def forget(self) -> None:
        """No run is left, and none comes by itself: what is known of many users takes much memory."""
        self._keepers, self._leaving = [], []

    @property
    def _draining(self) -> list[Keeper]:
        return [keeper for keeper in self._keepers if keeper.drains]

    @property
    def _asked(self) -> list[Keeper]:
        """Those of the runs that go on."""
        return self._draining + (self._keepers[-1:] if self._status.running else [])

    def _differences(self) -> _Differences:
        return {keeper: keeper.differences() for keeper in self._keepers}

    async def _settle(self, differences: _Differences) -> list[Refusal]:
        def settle(keeper: Keeper) -> Deferred[list[Refusal]]:
            known = differences.get(keeper)
            return keeper.settle(keeper.unsettled(keeper.differences() if known is None else known))

        return await self._everywhere(settle)

    async def _everywhere(self, settle: Callable[[Keeper], Deferred[list[Refusal]]]) -> list[Refusal]:
        """Settle something in every run, and in those that come or are left behind meanwhile. Returns who is refused.

        What a run cannot do while the core of a Start comes up is asked for again when that is there.
        """
        known, refused = set[tuple[Keeper, bool]](), list[Refusal]()
        while asked := [each for keeper in self._asked if (each := (keeper, self._status.running)) not in known]:
            known.update(asked)
            outcomes: list[list[Refusal]] = await together([settle(keeper) for keeper, _ in asked])
            refused += chain.from_iterable(outcomes)
        return refused

    def _follow(self) -> None:
        """A run came or went."""
        known = [keeper.run for keeper in self._keepers]
        self._keepers += [self._keep(run) for run in reversed(self._generations.serving) if run not in known]
        self._keepers = [
            keeper
            for keeper in self._keepers
            if keeper.run in self._generations.counting or keeper is self._keepers[-1]
        ]
        self._keepers.sort(key=lambda keeper: keeper.run is self._generations.current)


def _kept(differences: _Differences) -> list[Change]:
    """What of them takes something away that is in force."""
    return [change for keeper, changes in differences.items() for change in keeper.kept(changes)]
