"""Paces new connections of an inbound whose users all have a speed limit, to the greatest of these limits.

So the limit holds from the first byte, before the node knows the user, and for connections that the core never reports.
"""

from __future__ import annotations

from collections.abc import Mapping

from twisted.internet.interfaces import IReactorTime

from node.base.slices import slices
from node.contract.accounts import Accounts
from node.limits.connections import Connections, PacedRun
from node.limits.in_force import InForce

# Users checked before the reactor gets a turn, and largest part of the time that the checks may take.
TURN, SHARE = 2000, 0.02
# Seconds within which a core reports the user of a connection that it has accepted.
KNOWN = 60.0


class NewConnections:
    """Sets the pace of new connections by inbound."""

    def __init__(self, reactor: IReactorTime, in_force: InForce, connections: Connections) -> None:
        self._reactor = reactor
        self._in_force = in_force
        self._connections = connections
        # Bytes a second, and the number of users, by core and tag.
        self._told: dict[tuple[PacedRun, str], int] = {}
        self._sizes: dict[tuple[PacedRun, str], int] = {}
        # By tag of an inbound that was paced before: until when connections from that time may still be reported.
        self._ended: dict[str, float] = {}
        self._stale = True
        self._rest_until = float("-inf")

    def changed(self) -> None:
        """Called when users came or went, or have another speed."""
        self._stale = True

    def may_be_held(self, key: str) -> bool:
        """Whether a new connection of this user, who has no speed limit, may come from a paced inbound."""
        if not self._told and not self._ended:
            return False
        now = self._reactor.seconds()
        self._ended = {tag: until for tag, until in self._ended.items() if until > now}
        tags = {tag for _, tag in self._told} | self._ended.keys()
        return any(key in run.accounts.get(tag, ()) for run in self._connections.paced for tag in tags)

    async def settle(self) -> None:
        """Apply changed paces to the cores, unless the last round was too short a time ago."""
        runs = self._connections.paced
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
        # Connections of these inbounds may be of anybody.
        untold = run.unseen.keys() | run.unpaced.keys()
        users = {tag: {} if tag in untold else accounts for tag, accounts in run.accounts.items()}
        rates = {tag: await self._greatest(accounts) for tag, accounts in users.items()}
        changed = {tag: rate for tag, rate in rates.items() if rate != self._told.get((run, tag))}
        if not changed:
            return
        before = {tag: self._told.get((run, tag)) for tag in changed}
        self._note(run, changed)
        if not await run.pace_new(changed):
            # The listeners are unchanged: try again.
            self._note(run, before)
            self._stale = True

    def _note(self, run: PacedRun, rates: Mapping[str, int | None]) -> None:
        for tag, rate in rates.items():
            if rate is not None:
                self._told[run, tag] = rate
            elif self._told.pop((run, tag), None):
                self._ended[tag] = self._reactor.seconds() + KNOWN

    async def _greatest(self, accounts: Accounts) -> int | None:
        """The greatest speed limit of these users; None if a user has none, or there are no users."""
        greatest = 0
        async for part in slices(self._reactor, list(accounts), TURN):
            for key in part:
                speed = self._in_force.of(key).down // 8
                if not speed:
                    return None
                greatest = max(greatest, speed)
        return greatest or None
