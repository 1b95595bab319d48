"""Lists the users connected to cores, draining ones included, and reports connections to the limits."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Protocol, TypeVar

from twisted.internet.interfaces import IReactorTime

from node.base.errors import CoreFailed, Unsupported
from node.base.governor import Governor
from node.base.periodic import Periodic
from node.base.slices import slices
from node.contract.accounts import Accounts
from node.contract.connections import Address, KeepsOut, Live, Paces, SeesConnections
from node.contract.driver import Generation
from node.contract.generations import Follower, Generations
from node.limits.in_force import InForce

# Users checked before the reactor gets a turn, and largest part of the time that the checks may take.
TURN, SHARE = 2000, 0.02
# Seconds within which a core reports the user of a connection that it has accepted.
KNOWN = 60.0

Run = TypeVar("Run", bound=SeesConnections)


class PacedRun(Generation, Paces, Protocol):
    """A core whose connections can be paced."""


class Watcher:
    """A limit that concerns connections. A subclass overrides what it has to know."""

    def arrived(self, key: str, address: Address) -> None:
        """Called when the user has a new connection, or one that the core has just reported."""

    def changed(self, keys: Collection[str]) -> None:
        """Called when these users came or went, or may have other limits."""

    def cores_changed(self) -> None:
        """Called when a core came or went."""


class Connections(Follower):
    """The cores that see the connections of users: `runs`, and of these `paced`, whose connections can be paced.

    `blind`: some core that serves cannot attribute connections to users.
    """

    def __init__(self, generations: Generations, in_force: InForce) -> None:
        self._generations = generations
        self.in_force = in_force
        self._watchers: list[Watcher] = []
        self._listening = False
        self.runs: Sequence[SeesConnections] = ()
        self.paced: Sequence[PacedRun] = ()
        self.blind = False
        # The core that serves new connections.
        self.current: Generation | None = None
        generations.follow(self)

    def watch(self, watcher: Watcher) -> None:
        """Tell this limit from now on."""
        self._watchers.append(watcher)

    def may_carry(self, key: str) -> bool:
        """Whether the user may have a connection, as far as the cores know."""
        return any(run.may_carry(key) for run in self.runs)

    def changed(self, keys: Collection[str]) -> None:
        """Tell all limits that these users came or went, or may have other limits."""
        if not self._listening:
            self._listen()
        for watcher in self._watchers:
            watcher.changed(keys)

    def moved(self) -> None:
        serving = self._generations.serving
        self.runs = [run for run in serving if isinstance(run, SeesConnections)]
        self.paced = [run for run in serving if isinstance(run, Paces)]
        self.blind = len(self.runs) < len(serving)
        self.current = self._generations.current
        self._listen()
        for watcher in self._watchers:
            watcher.cores_changed()

    def _listen(self) -> None:
        """Have the cores report new connections once any user has limits; before that the cost is saved."""
        if self.in_force.any:
            for run in self.runs:
                run.arrived = self._arrived
            self._listening = True

    def _arrived(self, key: str, address: Address) -> None:
        for watcher in self._watchers:
            watcher.arrived(key, address)


class Enforcer(Watcher):
    """A limit that has something to do regularly, too: `_tick`."""

    def __init__(self, reactor: IReactorTime, connections: Connections, what: str, seconds: float) -> None:
        """`what` names it in the log and in warnings; `seconds` are between two ticks."""
        self._reactor = reactor
        self._connections = connections
        self._in_force = connections.in_force
        self._periodic = Periodic(what, self._tick, seconds, reactor)
        connections.watch(self)

    @property
    def warnings(self) -> Sequence[str]:
        return self._periodic.warnings

    def start(self) -> None:
        self._periodic.start()

    def stop(self) -> None:
        self._periodic.stop()

    def _tick(self) -> object:
        raise NotImplementedError


async def look(runs: Iterable[Run], keys: Collection[str]) -> tuple[list[tuple[Run, list[Live]]], list[CoreFailed]]:
    """Return the connections of these users by core, and the failures of cores that did not answer."""
    found, faults = [], []
    for run in runs:
        carrying = {key for key in keys if run.may_carry(key)}
        try:
            connections = await run.look(carrying) if carrying else []
        except CoreFailed as error:
            faults.append(error)
        else:
            found.append((run, [live for live in connections if live.key in carrying]))
    return found, faults


async def forwarded(
    runs: Iterable[SeesConnections], keys: Collection[str]
) -> tuple[dict[str, set[Address]], list[CoreFailed]]:
    """Return the addresses that reverse proxies report for these users, and the failures of cores."""
    found: dict[str, set[Address]] = {}
    faults: list[CoreFailed] = []
    for run in runs:
        if isinstance(run, KeepsOut) and run.fronted:
            try:
                for key, addresses in (await run.forwarded(keys)).items():
                    found.setdefault(key, set()).update(addresses)
            except CoreFailed as error:
                faults.append(error)
            except Unsupported:
                continue  # an old core: only the sockets' addresses count
    return found, faults


class NewConnections:
    """Paces new connections of an inbound whose users all have a speed limit, to the greatest of these limits.

    So the limit holds from the first byte, before the node knows the user, and for connections that the core never
    reports.
    """

    def __init__(self, reactor: IReactorTime, connections: Connections) -> None:
        self._reactor = reactor
        self._in_force = connections.in_force
        self._connections = connections
        # Bytes a second, and the number of users, by core and tag.
        self._told: dict[tuple[PacedRun, str], int] = {}
        self._sizes: dict[tuple[PacedRun, str], int] = {}
        # By tag of an inbound that was paced before: until when connections from that time may still be reported.
        self._ended: dict[str, float] = {}
        self._stale = True
        self._governor = Governor(reactor, SHARE)

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
        if self._governor.left or not (self._stale or sizes != self._sizes):
            return
        self._stale, self._sizes = False, sizes
        for place in [place for place in self._told if place not in sizes]:
            self._told.pop(place)
        for run in runs:
            await self._tell(run)
        self._governor.worked(now)

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
