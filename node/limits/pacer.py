"""Enforces speed limits: shares each user's speed among their connections, and has the cores' sockets paced."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from collections.abc import Set as AbstractSet

from twisted.internet.defer import DeferredLock, ensureDeferred
from twisted.internet.interfaces import IReactorTime

from node.base.alarm import Alarm
from node.base.errors import CoreFailed, shown
from node.base.governor import Governor
from node.base.logs import Logger
from node.base.slices import slices
from node.contract.connections import Address, Handle, Live, Paces
from node.limits.connections import Connections, Enforcer, NewConnections, PacedRun, look
from node.limits.speed import Down, Up

# Seconds between two rounds for users with an upload limit, and between two rounds for all users; the latter grow up to
# the third number, …
TICK, EVERYBODY, LONGEST = 0.5, 1.0, 3.0
# … so that they take at most this part of the time. Seconds for which new connections are collected.
SHARE, GATHER = 0.03, 0.12
# Users handled before the reactor gets a turn: some two milliseconds.
TURN = 100
NOT_PACED = "speed is not enforced: this core's connections cannot be paced"
NOT_THERE = "speed is not enforced in inbound {}: {}"

# A connection: its core, and its handle there.
Flow = tuple[PacedRun, Handle]
Flows = Mapping[Flow, Live]
# `Paces.pace` or `Paces.narrow` of a core.
Setting = Callable[[Mapping[Handle, int | None]], Awaitable[set[Handle]]]


class Pacer(Enforcer):
    """Enforces speed limits."""

    log = Logger()

    def __init__(self, reactor: IReactorTime, connections: Connections) -> None:
        super().__init__(reactor, connections, "enforcing speed limits", TICK)
        # Users who may be connected and have a speed limit, or had one; and those of them to handle in the next round.
        self._users: set[str] = set()
        self._soon: set[str] = set()
        self._down, self._up = Down[Flow](), Up[Flow]()
        self._new_connections = NewConnections(reactor, connections)
        self._lock = DeferredLock()
        self._alarm = Alarm(reactor, self._wake)
        self._governor = Governor(reactor, SHARE, longest=LONGEST)
        self._all_users = Governor(reactor, SHARE, EVERYBODY, LONGEST)
        self._looked = self._due = float("-inf")

    def start(self) -> None:
        super().start()
        self.cores_changed()

    def stop(self) -> None:
        """The node ends: connections keep their pace."""
        super().stop()
        self._alarm.cancel()

    def notes(self, key: str) -> list[str]:
        """Where this user's speed limit is not enforced, and why."""
        limit, run = self._in_force.of(key), self._connections.current
        if run is None or not (limit.down or limit.up):
            return []
        if not isinstance(run, Paces):
            return [NOT_PACED]
        places = {**run.unseen, **run.unpaced}
        return [NOT_THERE.format(shown(tag), why) for tag, why in places.items() if key in run.accounts.get(tag, ())]

    def arrived(self, key: str, address: Address) -> None:
        limit = self._in_force.of(key)
        if limit.down or limit.up or self._new_connections.may_be_held(key):
            self._look_at({key}, max(GATHER, self._governor.left))

    def changed(self, keys: Iterable[str]) -> None:
        self._new_connections.changed()
        self._look_at({key for key in keys if key in self._users or self._may_matter(key)}, 0)

    def cores_changed(self) -> None:
        self._new_connections.changed()
        self._look_at(frozenset(), 0)

    def _may_matter(self, key: str) -> bool:
        limit = self._in_force.of(key)
        return bool(limit.down or limit.up) and self._connections.may_carry(key)

    # Timing

    def _look_at(self, keys: AbstractSet[str], seconds: float) -> None:
        """Handle these users in a round after so many seconds, or before."""
        self._soon |= keys
        self._users |= keys
        if self._periodic.running:
            self._alarm.within(seconds)

    def _wake(self) -> None:
        ensureDeferred(self._look_soon()).addErrback(
            lambda failure: self.log.failed(
                "speed limits could not be applied to new connections; the node tries again", failure
            )
        )

    async def _look_soon(self) -> None:
        async with self._lock:
            began = self._reactor.seconds()
            await self._new_connections.settle()
            if soon := self._take_soon():
                await self._round(soon, soon, 0.0)
            self._governor.worked(began)

    async def _tick(self) -> None:
        async with self._lock:
            await self._new_connections.settle()
            now = self._reactor.seconds()
            since, self._looked, all_users = now - self._looked, now, now >= self._due
            soon = self._take_soon()
            keys = soon | {key for key in self._users if all_users or self._in_force.of(key).up}
            flows = await self._round(keys, soon, since) if keys else {}
            self._up.look(flows, keys)
            if all_users:
                # Connections that no user with a limit has any more: a reverse proxy's may carry other users now, and
                # an idle one may carry something after its user's limit is gone.
                self._down.look(flows)
                await self._apply(dict.fromkeys(self._down.lose(flows)), dict.fromkeys(self._up.lose(flows)))
                took = self._reactor.seconds() - now
                # Half a tick less, because a tick may come a little early.
                self._due = now + self._all_users.rest(took) - TICK / 2

    def _take_soon(self) -> set[str]:
        soon, self._soon = self._soon, set()
        return soon

    # Rounds

    async def _round(self, keys: Collection[str], soon: Collection[str], seconds: float) -> Flows:
        """Apply the limits of these users to their connections; `seconds` have passed since the last tick.

        `soon`: those of them with new connections or changed limits. Raises `CoreFailed` if a core does not answer,
        after the others are done.
        """
        found, faults = await self._see(keys)
        rates: dict[Flow, int | None] = {}
        windows: dict[Flow, int | None] = {}
        async for part in slices(self._reactor, keys, TURN):
            for key in part:
                limit, flows = self._in_force.of(key), found.get(key, {})
                rates |= self._down.plan(limit.down // 8, flows, key in soon)
                windows |= self._up.plan(key, limit.up // 8, flows, seconds)
                if not faults and not ((limit.down or limit.up) and (flows or self._connections.may_carry(key))):
                    self._users.discard(key)
        await self._apply(rates, windows)
        self._users |= self._soon
        if faults:
            self._soon |= {*soon}
            raise faults[0]
        return {flow: live for flows in found.values() for flow, live in flows.items()}

    async def _see(self, keys: Collection[str]) -> tuple[dict[str, dict[Flow, Live]], list[CoreFailed]]:
        """Return the connections of these users over all cores, and the failures of cores that did not answer."""
        by_core, faults = await look(self._connections.paced, keys)
        found: dict[str, dict[Flow, Live]] = {}
        for run, lives in by_core:
            for live in lives:
                found.setdefault(live.key, {})[run, live.handle] = live
        return found, faults

    async def _apply(self, rates: Mapping[Flow, int | None], windows: Mapping[Flow, int | None]) -> None:
        """Set these speeds and windows on the connections; None: no limit."""
        for run in self._connections.paced:
            await _set(run, run.pace, rates, self._down.held)
            await _set(run, run.narrow, windows, self._up.held)


async def _set(run: PacedRun, setting: Setting, wanted: Mapping[Flow, int | None], held: dict[Flow, int]) -> None:
    """Apply the wanted values to this core's connections, and note in `held` which ones were applied."""
    some = {handle: value for (other, handle), value in wanted.items() if other is run}
    if not some:
        return
    for handle in await setting(some):
        value = some[handle]
        if value is None:
            held.pop((run, handle), None)
        else:
            held[run, handle] = value
