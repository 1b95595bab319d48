"""What connections to an inbound get until it is known whose they are: where all users have a speed, the greatest.

So a speed holds from the first byte, and for connections of which the core never told.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from collections.abc import Set as AbstractSet
from typing import Protocol

from twisted.internet.interfaces import IReactorTime
from twisted.internet.task import deferLater

from node.contract.accounts import Accounts
from node.contract.connections import Paces
from node.contract.driver import Generation

# Users that are looked at in one go, and the part of the time that looking at them takes.
TURN, SHARE = 2000, 0.02
# Seconds in which a connection that a core has accepted is said to be somebody's.
KNOWN = 60.0


class PacedRun(Generation, Paces, Protocol):
    """A run whose connections can be paced."""


class Newcomers:
    """`speed_of` tells the speed of a user, by key, in bytes a second; 0: none."""

    def __init__(self, reactor: IReactorTime, speed_of: Callable[[str], int]) -> None:
        self._reactor = reactor
        self._speed_of = speed_of
        self._told: dict[tuple[PacedRun, str], int] = {}
        self._sizes: dict[tuple[PacedRun, str], int] = {}
        # Until when connections may come to light that were accepted when an inbound was held to something, by tag.
        self._ended: dict[str, float] = {}
        self._stale = True
        self._rest_until = float("-inf")

    def changed(self) -> None:
        """Users came or went, or have another speed."""
        self._stale = True

    def may_be_held(self, key: str, runs: Iterable[PacedRun]) -> bool:
        """Whether a new connection of this user, who has no speed, may have come by an inbound that has."""
        if not self._told and not self._ended:
            return False
        tags = {tag for _, tag in self._told} | self._recent()
        return any(key in run.accounts.get(tag, ()) for run in runs for tag in tags)

    async def settle(self, runs: Collection[PacedRun]) -> None:
        """Tell the runs what has changed, if it is time to look."""
        now = self._reactor.seconds()
        sizes = {(run, tag): len(accounts) for run in runs for tag, accounts in run.accounts.items()}
        if now < self._rest_until or not (self._stale or sizes != self._sizes):
            return
        self._stale, self._sizes = False, sizes
        for place in [place for place in self._told if place not in sizes]:
            self._told.pop(place)
        for run in runs:
            await self._tell(run)
        self._rest_until = self._reactor.seconds() + (self._reactor.seconds() - now) / SHARE

    async def _tell(self, run: PacedRun) -> None:
        untold = run.unseen.keys() | run.unpaced.keys()
        rates = {tag: await self._greatest(accounts) for tag, accounts in self._some(run, untold)}
        changed = {tag: rate for tag, rate in rates.items() if rate != self._told.get((run, tag))}
        if not changed:
            return
        before = {tag: self._told.get((run, tag)) for tag in changed}
        self._note(run, changed)
        if not await run.pace_new(changed):
            # Listeners are as they were.
            self._note(run, before)
            self._stale = True

    def _note(self, run: PacedRun, rates: Mapping[str, int | None]) -> None:
        for tag, rate in rates.items():
            if rate is not None:
                self._told[run, tag] = rate
            elif self._told.pop((run, tag), None):
                self._ended[tag] = self._reactor.seconds() + KNOWN

    def _some(self, run: PacedRun, untold: AbstractSet[str]) -> list[tuple[str, Accounts]]:
        """In the other inbounds a connection may be one of many users."""
        return [(tag, {} if tag in untold else accounts) for tag, accounts in run.accounts.items()]

    async def _greatest(self, accounts: Accounts) -> int | None:
        """The greatest speed of these users; None if one has none."""
        greatest = 0
        for number, key in enumerate(list(accounts), 1):
            speed = self._speed_of(key)
            if not speed:
                return None
            greatest = max(greatest, speed)
            if number % TURN == 0:
                await deferLater(self._reactor, 0)
        return greatest or None

    def _recent(self) -> set[str]:
        now = self._reactor.seconds()
        self._ended = {tag: until for tag, until in self._ended.items() if until > now}
        return {*self._ended}
