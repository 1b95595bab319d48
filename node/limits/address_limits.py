"""Enforces address limits: when a user has too many addresses, closes the connections of the excess ones."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from twisted.internet.interfaces import IReactorTime

from node.base.errors import CoreFailed
from node.base.logs import Logger
from node.base.periodic import Periodic
from node.contract.connections import Address, Live, SeesConnections
from node.limits.address_events import AddressEvents
from node.limits.addresses import Grouping, giving_way, silences
from node.limits.batches import Batches
from node.limits.limits import Limit

# Seconds after a user was cut in which they are checked less often: clients reconnect at once, some for ever.
JUST_NOW = 10.0
# Seconds between two rounds that forget disconnected users, and users checked in a round.
TIDY, TIDIED = 5.0, 2_000
# Addresses remembered of a user before the node checks which of them are still connected.
ROOM = 64


@dataclass(slots=True)
class _Addresses:
    """A user's addresses, numbered by arrival: all that are connected, and some that were.

    With more than `room` addresses the node checks which are still connected, even below the limit. `cut`: when
    connections of this user were last closed, in seconds of the reactor.
    """

    order: dict[Address, int] = field(default_factory=dict)
    room: int = ROOM
    cut: float = -math.inf


class AddressLimits:
    """Checks users when they connect from a new address, and closes the connections of excess addresses.

    `runs` are the cores that serve now, including draining ones: a user's addresses count over all of them together.
    No address is banned: one that was cut may come again at any time, as a newcomer.
    """

    log = Logger()

    def __init__(
        self,
        reactor: IReactorTime,
        *,
        runs: Callable[[], Sequence[SeesConnections]],
        limit_of: Callable[[str], Limit],
        events: AddressEvents,
        grouping: Grouping,
        grace: float,
    ) -> None:
        self._reactor = reactor
        self._runs = runs
        self._limit_of = limit_of
        self._events = events
        self._grouping = grouping
        self._grace = grace
        self._known: dict[str, _Addresses] = {}
        self._numbers = itertools.count()
        self._batches = Batches(reactor, "enforcing address limits", self._hold)
        self._tidy = Periodic("forgetting addresses of disconnected users", self._forget_gone, TIDY, reactor)
        self._to_tidy: list[str] = []
        self._fault = ""
        # Connections closed so far.
        self.ended = 0

    def __len__(self) -> int:
        """The number of users whose addresses are remembered."""
        return len(self._known)

    @property
    def warnings(self) -> list[str]:
        """Warnings for `info`."""
        return [f"address limits cannot be enforced: {self._fault}"] if self._fault else self._tidy.warnings

    def start(self) -> None:
        self._tidy.start()

    def stop(self) -> None:
        """Stop all checks; report what was collected."""
        self._tidy.stop()
        self._batches.stop()
        self._events.close()

    def arrived(self, key: str, address: Address) -> None:
        """Called for each new connection of a user."""
        limit = self._limit_of(key)
        if not limit.addresses:
            return
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = _Addresses()
        group = self._grouping.of(address)
        # A check under way may cut this address without having seen this connection.
        looked_at = key in self._batches.under_way
        if group in known.order and not looked_at and (limit.addresses_tells or len(known.order) <= limit.addresses):
            return
        known.order.setdefault(group, next(self._numbers))
        if looked_at or len(known.order) > min(limit.addresses, known.room):
            self._batches.ask([key], later=self._reactor.seconds() < known.cut + JUST_NOW)

    def changed(self, keys: Iterable[str]) -> None:
        """Called when the limits of these users may have changed."""
        over = []
        for key in keys:
            if not self._limit_of(key).addresses:
                self._known.pop(key, None)
            elif self._may_carry(key):
                over.append(key)
        self._batches.ask(over)

    async def addresses(self, keys: Collection[str]) -> dict[str, list[str]]:
        """The groups of addresses that these users are connected from now, by key, as far as the cores know them."""
        groups: defaultdict[str, set[Address]] = defaultdict(set)
        for _, connections in (await self._look(keys))[0]:
            for live in connections:
                groups[live.key].add(self._grouping.of(live.address))
        return {key: [self._grouping.shown(group) for group in sorted(groups[key])] for key in groups}

    async def _hold(self, keys: frozenset[str]) -> None:
        """Check these users once, and close the connections of excess addresses."""
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
            self._batches.ask(keys, later=True)

    def _judge(self, key: str, connections: Iterable[Live], began: int) -> set[Address]:
        """Return the addresses of a user to disconnect, and remember the others."""
        limit = self._limit_of(key)
        if not limit.addresses:
            return set()
        known = self._known.setdefault(key, _Addresses())
        silent = silences(connections, self._grouping)
        # If a core did not answer, an address that looks silent may be busy there: then only newcomers are cut.
        grace = math.inf if self._fault else self._grace
        leaving = giving_way(limit.addresses, grace, silent, known.order)
        if leaving:
            self._events.over(key, limit)
        if limit.addresses_tells:
            leaving = set()
        if leaving:
            known.cut = self._reactor.seconds()
        self._remember(known, silent.keys() - leaving, leaving, -1 if self._fault else began)
        return leaving

    def _remember(self, known: _Addresses, staying: Iterable[Address], leaving: set[Address], began: int) -> None:
        """Keep the addresses that stay and those that arrived since the check `began`.

        An address that comes again after a cut counts as the newest.
        """
        order = {group: number for group, number in known.order.items() if number > began or group in staying}
        for group in sorted(staying):
            if group not in order:
                order[group] = next(self._numbers)
        for group in leaving:
            order.pop(group, None)
        known.order, known.room = order, max(ROOM, 2 * len(order))

    async def _end(self, run: SeesConnections, connections: Sequence[Live]) -> None:
        if not connections:
            return
        try:
            ended = await run.end(connections)
        except CoreFailed as error:
            ended, self._fault = 0, error.text
        self.ended += ended
        if ended < len(connections):
            # The others may have closed already; the next check finds out.
            self._batches.ask({live.key for live in connections}, later=True)

    async def _look(self, keys: Collection[str]) -> tuple[list[tuple[SeesConnections, list[Live]]], str]:
        """Return the connections of these users by core, and why some are unknown, or ""."""
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
        """Forget users without a connection or an address limit, some at a time."""
        self._to_tidy = self._to_tidy or [*self._known]
        some, self._to_tidy = self._to_tidy[:TIDIED], self._to_tidy[TIDIED:]
        for key in some:
            if not (self._limit_of(key).addresses and self._may_carry(key)):
                self._known.pop(key, None)


def notes(limit: Limit, tags: Iterable[str], unseen: Mapping[str, str], *, blind: bool) -> list[str]:
    """Explain where an address limit is not enforced for a user of these inbounds, and why.

    `unseen` has the inbounds whose connections the core cannot attribute to users, and why; `blind`: some core cannot
    attribute any.
    """
    if not limit.addresses:
        return []
    if blind:
        return ["addresses are not enforced: the core does not report the users of its connections"]
    return [f"addresses are not enforced in inbound {tag!r}: {unseen[tag]}" for tag in sorted(tags) if tag in unseen]
