"""Has no user connected from more addresses than they may: who is over the limit is looked at, and some give way."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from twisted.internet.interfaces import IReactorTime

from node.contract.connections import Address, Live, SeesConnections
from node.errors import CoreFailed
from node.limits.addresses import Grouping, giving_way, silences
from node.limits.crowd_events import CrowdEvents
from node.limits.limits import Limit
from node.limits.turns import Turns
from node.logs import Logger
from node.periodic import Periodic

# Seconds after somebody was cut in which a newcomer may wait a little: clients come again at once, some for ever.
JUST_NOW = 10.0
# Seconds between two looks at who is forgotten, and at how many.
TIDY, TIDIED = 5.0, 2_000
# Addresses of a user that are remembered before it is looked which of them are still there.
ROOM = 64


@dataclass(slots=True)
class _Crowd:
    """A user's addresses, numbered as they came: all that are connected, and some that were.

    With more than `room` it is looked which are there, under the limit too. `cut`: when one of them was last.
    """

    order: dict[Address, int] = field(default_factory=dict)
    room: int = ROOM
    cut: float = -math.inf


class Crowds:
    """`runs` are those that serve now, draining ones too: a user's addresses count over all of them together.

    A newcomer over the limit is looked at soon; where nobody comes nothing is done. Nobody is banned: an address that
    was cut may come again at any time, as the newcomer that it is then.
    """

    log = Logger()

    def __init__(
        self,
        reactor: IReactorTime,
        *,
        runs: Callable[[], Sequence[SeesConnections]],
        limit_of: Callable[[str], Limit],
        events: CrowdEvents,
        grouping: Grouping,
        grace: float,
    ) -> None:
        self._reactor = reactor
        self._runs = runs
        self._limit_of = limit_of
        self._events = events
        self._grouping = grouping
        self._grace = grace
        self._crowds: dict[str, _Crowd] = {}
        self._numbers = itertools.count()
        self._turns = Turns(reactor, "holding users to their addresses", self._hold)
        self._tidy = Periodic("forgetting the addresses of users who are gone", self._forget_gone, TIDY, reactor)
        self._to_tidy: list[str] = []
        self._fault = ""
        # Connections that were ended so far.
        self.ended = 0

    def __len__(self) -> int:
        """The users of whom anything is remembered."""
        return len(self._crowds)

    @property
    def warnings(self) -> list[str]:
        """What an operator should know of it."""
        return [f"users are not held to their addresses: {self._fault}"] if self._fault else self._tidy.warnings

    def start(self) -> None:
        self._tidy.start()

    def stop(self) -> None:
        """End nothing any more."""
        self._tidy.stop()
        self._turns.stop()
        self._events.close()

    def arrived(self, key: str, address: Address) -> None:
        """The user has a new connection from there; told of each."""
        limit = self._limit_of(key)
        if not limit.addresses:
            return
        crowd = self._crowds.get(key)
        if crowd is None:
            crowd = self._crowds[key] = _Crowd()
        group = self._grouping.of(address)
        # While the user is looked at, this address may be one that is cut, without this connection.
        looked_at = key in self._turns.under_way
        if group in crowd.order and not looked_at and (limit.addresses_told or len(crowd.order) <= limit.addresses):
            return
        crowd.order.setdefault(group, next(self._numbers))
        if looked_at or len(crowd.order) > min(limit.addresses, crowd.room):
            self._turns.ask([key], later=self._reactor.seconds() < crowd.cut + JUST_NOW)

    def changed(self, keys: Iterable[str]) -> None:
        """The limits of these users are others."""
        over = []
        for key in keys:
            if not self._limit_of(key).addresses:
                self._crowds.pop(key, None)
            elif self._may_carry(key):
                over.append(key)
        self._turns.ask(over)

    async def addresses(self, keys: Collection[str]) -> dict[str, list[str]]:
        """Where these users are connected from now, by key, as addresses count; as far as it can be known."""
        groups: defaultdict[str, set[Address]] = defaultdict(set)
        for _, connections in (await self._look(keys))[0]:
            for live in connections:
                groups[live.key].add(self._grouping.of(live.address))
        return {key: [self._grouping.shown(group) for group in sorted(groups[key])] for key in groups}

    async def _hold(self, keys: frozenset[str]) -> None:
        """Look at these users, once, and have those addresses give way that are too many."""
        began = next(self._numbers)
        found, self._fault = await self._look(keys)
        by_user: dict[str, list[Live]] = {key: [] for key in keys}
        for _, connections in found:
            for live in connections:
                by_user[live.key].append(live)
        leaving = {key: self._judge(key, connections, began) for key, connections in by_user.items()}
        for run, connections in found:
            await self._end(run, [live for live in connections if self._grouping.of(live.address) in leaving[live.key]])
        if self._fault:
            self._turns.ask(keys, later=True)

    def _judge(self, key: str, connections: Iterable[Live], began: int) -> set[Address]:
        """The addresses of a user that give way; the others are remembered."""
        limit = self._limit_of(key)
        if not limit.addresses:
            return set()
        crowd = self._crowds.setdefault(key, _Crowd())
        silent = silences(connections, self._grouping)
        # Where a run did not tell, any address may be busy with it: then only newcomers give way.
        grace = math.inf if self._fault else self._grace
        leaving = giving_way(limit.addresses, grace, silent, crowd.order)
        if leaving:
            self._events.over(key, limit)
        if limit.addresses_told:
            leaving = set()
        if leaving:
            crowd.cut = self._reactor.seconds()
        self._remember(crowd, silent.keys() - leaving, leaving, -1 if self._fault else began)
        return leaving

    def _remember(self, crowd: _Crowd, staying: Iterable[Address], leaving: set[Address], began: int) -> None:
        """Those who stay, and who came since the look began. Who comes again after a cut is the newest then."""
        order = {group: number for group, number in crowd.order.items() if number > began or group in staying}
        for group in sorted(staying):
            if group not in order:
                order[group] = next(self._numbers)
        for group in leaving:
            order.pop(group, None)
        crowd.order, crowd.room = order, max(ROOM, 2 * len(order))

    async def _end(self, run: SeesConnections, connections: Sequence[Live]) -> None:
        if not connections:
            return
        try:
            ended = await run.end(connections)
        except CoreFailed as error:
            ended, self._fault = 0, error.text
        self.ended += ended
        if ended < len(connections):
            # They may have ended by themselves; a look tells.
            self._turns.ask({live.key for live in connections}, later=True)

    async def _look(self, keys: Collection[str]) -> tuple[list[tuple[SeesConnections, list[Live]]], str]:
        """The connections of these users, by run; and why not all of them could be known, if so."""
        found, fault = [], ""
        for run in self._runs():
            carrying = {key for key in keys if run.may_carry(key)}
            try:
                connections = await run.look(carrying) if carrying else []
            except CoreFailed as error:
                fault = error.text
            else:
                found.append((run, [live for live in connections if live.key in carrying]))
        return found, fault

    def _may_carry(self, key: str) -> bool:
        return any(run.may_carry(key) for run in self._runs())

    def _forget_gone(self) -> None:
        """Users without a connection are forgotten, some at a time."""
        self._to_tidy = self._to_tidy or [*self._crowds]
        some, self._to_tidy = self._to_tidy[:TIDIED], self._to_tidy[TIDIED:]
        for key in some:
            if not (self._limit_of(key).addresses and self._may_carry(key)):
                self._crowds.pop(key, None)


def notes(limit: Limit, tags: Iterable[str], unseen: Mapping[str, str], *, blind: bool) -> list[str]:
    """What of an address limit does not hold for a user of these inbounds, and why.

    `unseen` are the inbounds of whose connections no run can tell whose they are; `blind`: of none at all.
    """
    if not limit.addresses:
        return []
    if blind:
        return ["addresses: the core does not tell whose its connections are"]
    return [f"addresses, in inbound {tag!r}: {unseen[tag]}" for tag in sorted(tags) if tag in unseen]
