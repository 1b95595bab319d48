"""Enforces address limits: when a user has too many addresses, closes the connections of the excess ones."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from twisted.internet.defer import Deferred, ensureDeferred
from twisted.internet.interfaces import IReactorTime
from twisted.python.failure import Failure

from node.base.alarm import Alarm
from node.base.errors import CoreFailed, Unsupported
from node.base.governor import Governor
from node.base.logs import Logger
from node.contract.connections import Address, KeepsOut, Live, SeesConnections
from node.limits.connections import Connections, Enforcer, forwarded, look
from node.limits.events import LimitEvents
from node.limits.options import Grouping

# Seconds for which users are collected for a check; the second for those who may wait. Users in one check.
SOON, LATER = 0.1, 1.0
MOST = 500
# Seconds after a user was cut in which they are checked less often: clients reconnect at once, some for ever.
JUST_NOW = 10.0
# Seconds between two rounds that forget disconnected users, and users checked in a round.
TIDY, TIDIED = 5.0, 2_000
# Users with barred addresses who are checked in a round: some of these may come in again. The most barred addresses of
# one user; and the share of time in which cores may change their rules for that.
BARRED, MOST_BARRED, SHARE = 200, 1000, 0.05
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


class AddressLimits(Enforcer):
    """Checks users when they connect from a new address, and closes the connections of excess addresses.

    A user's addresses count over all cores together. No address is banned: one that was cut may come again at any time,
    as a newcomer. `grace`: seconds for which an address is silent before it gives way to another one.

    Connections that come through a reverse proxy cannot be closed, and are never known to be silent. So the cores
    refuse new connections from an excess address that the proxy reports (it is barred), until another address is free.
    """

    def __init__(
        self,
        reactor: IReactorTime,
        connections: Connections,
        events: LimitEvents,
        grouping: Grouping,
        grace: float,
    ) -> None:
        super().__init__(reactor, connections, "forgetting addresses of disconnected users", TIDY)
        self._events = events
        self._grouping = grouping
        self._grace = grace
        self._known: dict[str, _Addresses] = {}
        self._numbers = itertools.count()
        self._checks = Checks(reactor, self._hold)
        self._to_tidy: list[str] = []
        # The barred addresses of users, in the order in which they were barred.
        self._barred: dict[str, dict[Address, None]] = {}
        self._to_let_in: list[str] = []
        self._keeping: Sequence[KeepsOut] = ()
        # Whether a core may not know who is barred; and until when the cores get no new list.
        self._untold = False
        self._governor = Governor(reactor, SHARE)
        self._fault = ""
        # Connections closed so far.
        self.ended = 0

    @property
    def warnings(self) -> Sequence[str]:
        return [f"address limits cannot be enforced: {self._fault}"] if self._fault else super().warnings

    def stop(self) -> None:
        """Stop all checks."""
        super().stop()
        self._checks.stop()

    def arrived(self, key: str, address: Address) -> None:
        limit = self._in_force.of(key)
        if not limit.addresses:
            return
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = _Addresses()
        group = self._grouping.of(address)
        if group in self._barred.get(key, ()):
            return
        # A check under way may cut this address without having seen this connection.
        looked_at = key in self._checks.under_way
        if group in known.order and not looked_at and (limit.addresses_tells or len(known.order) <= limit.addresses):
            return
        known.order.setdefault(group, next(self._numbers))
        if looked_at or len(known.order) > min(limit.addresses, known.room):
            self._checks.ask([key], later=self._reactor.seconds() < known.cut + JUST_NOW)

    def changed(self, keys: Iterable[str]) -> None:
        over = []
        for key in keys:
            if not self._in_force.of(key).addresses:
                self._known.pop(key, None)
            if key in self._barred or (self._in_force.of(key).addresses and self._connections.may_carry(key)):
                over.append(key)
        self._checks.ask(over)

    def cores_changed(self) -> None:
        before, self._keeping = self._keeping, [run for run in self._connections.runs if isinstance(run, KeepsOut)]
        for run in self._keeping:
            if run not in before:
                for key, networks in run.barred.items():
                    self._barred.setdefault(key, {}).update(dict.fromkeys(map(self._grouping.read, networks)))
        if self._barred:
            self._untold = True
            self._checks.ask([*self._barred][:BARRED])

    async def addresses(self, keys: Collection[str]) -> dict[str, list[str]]:
        """The groups of addresses that these users are connected from now, by key, as far as the cores know them."""
        groups: defaultdict[str, set[Address]] = defaultdict(set)
        found, _ = await look(self._connections.runs, keys)
        for _, connections in found:
            for live in connections:
                groups[live.key].add(self._grouping.of(live.address))
        for key, some in (await self._forwarded(keys))[0].items():
            groups[key] |= some - self._barred.get(key, {}).keys()
        return {key: [self._grouping.shown(group) for group in sorted(groups[key])] for key in groups}

    def notes(self, key: str) -> list[str]:
        """Where this user's address limit is not enforced, and why."""
        if not self._in_force.of(key).addresses:
            return []
        if self._connections.blind:
            return ["addresses are not enforced: the core does not report the users of its connections"]
        unseen = {tag: why for run in self._connections.runs for tag, why in run.unseen.items()}
        fronted = {tag: why for run in self._keeping for tag, why in run.fronted.items()}
        tags = sorted(self._in_force.tags_of(key))
        return [
            *(f"addresses in inbound {tag!r}: {fronted[tag]}" for tag in tags if tag in fronted),
            *(
                f"addresses are not enforced in inbound {tag!r}: {unseen[tag]}"
                for tag in tags
                if tag in unseen and tag not in fronted
            ),
        ]

    async def _hold(self, keys: frozenset[str]) -> None:
        """Check these users once, and close the connections of excess addresses."""
        began = next(self._numbers)
        found, faults = await look(self._connections.runs, keys)
        believed, more_faults = await self._forwarded(keys)
        self._fault = next((fault.text for fault in (*more_faults, *faults)), "")
        by_user: dict[str, list[Live]] = {key: [] for key in keys}
        for _, connections in found:
            for live in connections:
                by_user[live.key].append(live)
        leaving = {
            key: self._judge(key, connections, believed.get(key, set()), began) for key, connections in by_user.items()
        }
        for run, connections in found:
            await self._end(run, [live for live in connections if self._grouping.of(live.address) in leaving[live.key]])
        if self._untold:
            await self._keep_out()
        if self._fault or self._untold:
            self._checks.ask(keys, later=True)

    async def _forwarded(self, keys: Collection[str]) -> tuple[dict[str, set[Address]], list[CoreFailed]]:
        """The groups of addresses that reverse proxies report for these users."""
        found, faults = await forwarded(self._connections.runs, keys)
        return {key: set(map(self._grouping.of, some)) for key, some in found.items()}, faults

    def _judge(self, key: str, connections: Iterable[Live], believed: set[Address], began: int) -> set[Address]:
        """Return the addresses of a user to disconnect, remember the others, and bar those to keep out."""
        limit = self._in_force.of(key)
        if not limit.addresses:
            self._bar(key, ())
            return set()
        barred = self._barred.get(key, {})
        known = self._known.setdefault(key, _Addresses())
        silent = {**silences(connections, self._grouping), **dict.fromkeys(believed, 0.0)}
        silent = {group: seconds for group, seconds in silent.items() if group not in barred}
        # If a core did not answer, an address that looks silent may be busy there: then only newcomers are cut.
        grace = math.inf if self._fault else self._grace
        leaving = giving_way(limit.addresses, grace, silent, known.order)
        if leaving:
            self._events.too_many_addresses(key, limit)
        if limit.addresses_tells:
            leaving = set()
        if leaving:
            known.cut = self._reactor.seconds()
        staying = silent.keys() - leaving
        free = 0 if self._fault else limit.addresses - len(staying)
        out = _most([*barred, *sorted(leaving & believed)], believed)
        if limit.addresses_tells:
            out = []
        elif free > 0:
            # First the addresses that are connected, or try to be.
            there = [group for group in out if group in believed][:free]
            out = [group for group in out if group not in there] if len(there) == free else []
            staying |= {*there}
        self._bar(key, out)
        leaving |= {*out}
        self._remember(known, staying, leaving, -1 if self._fault else began)
        return leaving

    def _bar(self, key: str, groups: Collection[Address]) -> None:
        """Keep the user out from these addresses, and from no others."""
        if {*groups} != self._barred.get(key, {}).keys():
            self._untold = True
        self._barred.pop(key, None)
        if groups:
            self._barred[key] = dict.fromkeys(groups)

    async def _keep_out(self) -> None:
        """Tell the cores who is barred, unless the last time was too short a time ago."""
        now = self._reactor.seconds()
        if self._governor.left:
            return
        self._untold = False
        barred = {key: list(map(self._grouping.shown, groups)) for key, groups in self._barred.items()}
        for run in self._keeping:
            try:
                await run.keep_out(barred)
            except (CoreFailed, Unsupported) as error:
                self._fault, self._untold = error.text, True
        self._governor.worked(now)

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
            self._checks.ask({live.key for live in connections}, later=True)

    def _tick(self) -> None:
        """Forget users without a connection or an address limit, some at a time."""
        self._to_tidy = self._to_tidy or [*self._known]
        some, self._to_tidy = self._to_tidy[:TIDIED], self._to_tidy[TIDIED:]
        for key in some:
            known = self._known.get(key)
            carries = self._in_force.of(key).addresses and self._connections.may_carry(key)
            if known is not None and not (known.order and carries):
                del self._known[key]
        self._to_let_in = self._to_let_in or [*self._barred]
        some, self._to_let_in = self._to_let_in[:BARRED], self._to_let_in[BARRED:]
        self._checks.ask(some, later=True)


class Checks:
    """Calls `check` with users: many at once, and one call after the other."""

    log = Logger()

    def __init__(self, reactor: IReactorTime, check: Callable[[frozenset[str]], Coroutine[Any, Any, None]]) -> None:
        self._check = check
        self._due: set[str] = set()
        self._patient: set[str] = set()
        self._alarm = Alarm(reactor, self._begin)
        self._going: Deferred[None] | None = None
        self._stopped = False
        # The users of the check under way.
        self.under_way: frozenset[str] = frozenset()

    def ask(self, keys: Collection[str], *, later: bool = False) -> None:
        """Add users to the next check. With `later` they may wait LATER seconds for it."""
        (self._patient if later else self._due).update(keys)
        self._arm()

    def stop(self) -> None:
        """Cancel the check under way, and begin no more."""
        self._stopped = True
        self._alarm.cancel()
        if self._going is not None:
            self._going.cancel()

    def _arm(self) -> None:
        if not self._stopped and self._going is None and (self._due or self._patient):
            self._alarm.within(SOON if self._due else LATER)

    def _begin(self) -> None:
        self.under_way = frozenset(itertools.islice(itertools.chain(self._due, self._patient), MOST))
        self._due -= self.under_way
        self._patient -= self.under_way
        going = self._going = ensureDeferred(self._check(self.under_way))
        going.addErrback(self._failed).addBoth(self._over)

    def _failed(self, failure: Failure) -> None:
        if not self._stopped:
            self.log.failed("enforcing address limits failed", failure)

    def _over(self, _: object) -> None:
        self._going, self.under_way = None, frozenset()
        self._arm()


def _most(barred: Sequence[Address], connected: Collection[Address]) -> list[Address]:
    """As many of the barred addresses of a user as may be: the oldest ones make room that are not connected."""
    idle = [group for group in barred if group not in connected]
    gone = {*idle[: max(0, len(barred) - MOST_BARRED)]}
    return [group for group in barred if group not in gone][:MOST_BARRED]


def silences(connections: Iterable[Live], grouping: Grouping) -> dict[Address, float]:
    """Seconds without traffic by group: a group is as silent as its least silent connection."""
    silent: dict[Address, float] = {}
    for live in connections:
        group = grouping.of(live.address)
        silent[group] = min(live.silent, silent.get(group, math.inf))
    return silent


def giving_way(limit: int, grace: float, silent: Mapping[Address, float], order: Mapping[Address, int]) -> set[Address]:
    """Return the groups to disconnect, so that at most `limit` stay; 0 is no limit.

    Groups that were silent for longer than the grace go first, the most silent one before the others; then newcomers,
    the newest first. By age alone, four devices of a user with a limit of three would disconnect each other for ever.
    `order` numbers groups by arrival; a group that is not in it has just arrived.
    """
    excess = len(silent) - limit if limit else 0
    if excess <= 0:
        return set()

    def came(group: Address) -> tuple[float, float, Address]:
        return order.get(group, math.inf), silent[group], group

    dead = [group for group, seconds in silent.items() if seconds > grace]
    leaving = sorted(dead, key=lambda group: (silent[group], came(group)), reverse=True)[:excess]
    newest = sorted(silent.keys() - set(leaving), key=came, reverse=True)
    return {*leaving, *newest[: excess - len(leaving)]}
