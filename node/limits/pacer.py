"""Holds users to their speeds: looks at the connections of those who have one, and says how fast each may be."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Protocol

from twisted.internet.defer import DeferredLock, ensureDeferred
from twisted.internet.interfaces import IDelayedCall, IReactorTime
from twisted.internet.task import deferLater

from node.backend.generations import Generations
from node.contract.connections import Address, Handle, Live, Paces
from node.errors import CoreFailed, shown
from node.limits.limits import Limit
from node.limits.newcomers import Newcomers, PacedRun
from node.limits.speed import Down, Up
from node.logs import Logger
from node.periodic import Periodic

# Seconds between two looks: at who has a speed for what they send, and at everybody; these are fewer where they take
# long, …
TICK, EVERYBODY, LONGEST = 0.5, 1.0, 3.0
# … so that they take no more than this part of the time. Seconds for which new connections are gathered.
SHARE, GATHER = 0.03, 0.12
# Users after whom others have their turn: some two milliseconds.
TURN = 100
NOT_PACED = "the speed does not hold: this core's connections cannot be paced"
NOT_THERE = "the speed does not hold by the inbound {}: {}"

# A connection: of which run, and what tells it from others there.
Flow = tuple[PacedRun, Handle]
Flows = Mapping[Flow, Live]


class Setting(Protocol):
    """`Paces.pace` or `Paces.narrow` of a run."""

    async def __call__(self, some: Mapping[Handle, int | None], /) -> set[Handle]: ...


class Pacer:
    """`limits_of` tells what holds for a user, by key."""

    log = Logger()

    def __init__(self, reactor: IReactorTime, generations: Generations, limits_of: Callable[[str], Limit]) -> None:
        self._reactor = reactor
        self._generations = generations
        self._limits_of = limits_of
        self._runs: Sequence[PacedRun] = ()
        # Who may be connected and has a speed, or had one; and those of them who are to be looked at soon.
        self._users: set[str] = set()
        self._soon: set[str] = set()
        self._down, self._up = Down[Flow](), Up[Flow]()
        self._newcomers = Newcomers(reactor, lambda key: limits_of(key).down // 8)
        self._lock = DeferredLock()
        self._call: IDelayedCall | None = None
        self._rest_until = self._looked = self._due = float("-inf")
        self._periodic = Periodic("holding users to their speeds", self._tick, TICK, reactor)
        generations.watch(self._follow)

    @property
    def warnings(self) -> list[str]:
        """What an operator should know of it."""
        return self._periodic.warnings

    def start(self) -> None:
        self._periodic.start()
        self._follow()

    def stop(self) -> None:
        """The node ends: connections stay as they are."""
        self._periodic.stop()
        self._cancel()

    def notes(self, key: str) -> list[str]:
        """Where this user's speed does not hold, and why."""
        limit, run = self._limits_of(key), self._generations.current
        if run is None or not (limit.down or limit.up):
            return []
        paced = next((one for one in self._runs if one is run), None)
        if paced is None:
            return [NOT_PACED]
        places = {**paced.unseen, **paced.unpaced}
        return [NOT_THERE.format(shown(tag), why) for tag, why in places.items() if key in run.accounts.get(tag, ())]

    def arrived(self, key: str, _: Address) -> None:
        """The user has a connection that is new, or of which the run has just heard."""
        limit = self._limits_of(key)
        if limit.down or limit.up or self._newcomers.may_be_held(key, self._runs):
            self._look_at({key}, max(GATHER, self._rest_until - self._reactor.seconds()))

    def changed(self, keys: Iterable[str]) -> None:
        """Users of these keys came or went, or other limits hold for them."""
        self._newcomers.changed()
        self._look_at({key for key in keys if key in self._users or self._may_matter(key)}, 0)

    def _may_matter(self, key: str) -> bool:
        limit = self._limits_of(key)
        return bool(limit.down or limit.up) and self._may_carry(key)

    def _may_carry(self, key: str) -> bool:
        return any(run.may_carry(key) for run in self._runs)

    def _follow(self) -> None:
        """A run came or went."""
        self._runs = [run for run in self._generations.serving if isinstance(run, Paces)]
        self._newcomers.changed()
        self._look_at(frozenset(), 0)

    # When

    def _look_at(self, keys: AbstractSet[str], seconds: float) -> None:
        """Look at these in a while, with all others who are to be looked at then."""
        self._soon |= keys
        self._users |= keys
        if not self._periodic.running:
            return
        if self._call is not None and self._call.getTime() <= self._reactor.seconds() + seconds:
            return
        self._cancel()
        self._call = self._reactor.callLater(seconds, self._wake)

    def _cancel(self) -> None:
        if self._call is not None:
            self._call.cancel()
            self._call = None

    def _wake(self) -> None:
        self._call = None
        ensureDeferred(self._look_soon()).addErrback(
            lambda failure: self.log.failure("users are not held to their speeds yet", failure)
        )

    async def _look_soon(self) -> None:
        async with self._lock:
            began = self._reactor.seconds()
            await self._newcomers.settle(self._runs)
            if soon := self._take_soon():
                await self._round(soon, soon, 0.0)
            now = self._reactor.seconds()
            self._rest_until = now + min((now - began) / SHARE, LONGEST)

    async def _tick(self) -> None:
        async with self._lock:
            await self._newcomers.settle(self._runs)
            now = self._reactor.seconds()
            since, self._looked, everybody = now - self._looked, now, now >= self._due
            soon = self._take_soon()
            keys = soon | {key for key in self._users if everybody or self._limits_of(key).up}
            flows = await self._round(keys, soon, since) if keys else {}
            self._up.look(flows, keys)
            if everybody:
                await self._let_go(self._down.look(flows), self._up.lose(flows))
                took = self._reactor.seconds() - now
                # A tick may come a little early.
                self._due = now + min(max(EVERYBODY, took / SHARE), LONGEST) - TICK / 2

    def _take_soon(self) -> set[str]:
        soon, self._soon = self._soon, set()
        return soon

    # What

    async def _round(self, keys: Collection[str], soon: Collection[str], seconds: float) -> Flows:
        """Have the connections of these users be as fast as they may; `seconds` have gone since the last tick.

        `soon`: those of them of whom there is something new.
        """
        found, faults = await self._see(keys)
        rates: dict[Flow, int | None] = {}
        windows: dict[Flow, int | None] = {}
        for number, key in enumerate(keys, 1):
            if number % TURN == 0:
                await deferLater(self._reactor, 0)
            limit, flows = self._limits_of(key), found.get(key, {})
            rates |= self._down.plan(limit.down // 8, flows, key in soon)
            windows |= self._up.plan(key, limit.up // 8, flows, seconds)
            if not faults and not ((limit.down or limit.up) and (flows or self._may_carry(key))):
                self._users.discard(key)
        for run in self._runs:
            await _set(run, run.pace, rates, self._down.held)
            await _set(run, run.narrow, windows, self._up.held)
        self._users |= self._soon
        if faults:
            self._soon |= {*soon}
            raise faults[0]
        return {flow: live for flows in found.values() for flow, live in flows.items()}

    async def _let_go(self, lost: Collection[Flow], wide: Collection[Flow]) -> None:
        """Others may come by these connections, too, as by a reverse proxy's: they are not this user's alone.

        Or they are, and idle: by the time that they carry something the user may have no speed any more.
        """
        for run in self._runs:
            await _set(run, run.pace, dict.fromkeys(lost), self._down.held)
            await _set(run, run.narrow, dict.fromkeys(wide), self._up.held)

    async def _see(self, keys: Collection[str]) -> tuple[dict[str, dict[Flow, Live]], list[CoreFailed]]:
        """The connections of these users, over all runs, and why some of these do not tell."""
        found: dict[str, dict[Flow, Live]] = {}
        faults = []
        for run in self._runs:
            try:
                lives = await run.look(keys)
            except CoreFailed as error:
                faults.append(error)
                continue
            for live in lives:
                found.setdefault(live.key, {})[run, live.handle] = live
        return found, faults


async def _set(run: PacedRun, setting: Setting, wanted: Mapping[Flow, int | None], held: dict[Flow, int]) -> None:
    """Set what is wanted of this run's connections, and note in `held` what came of it."""
    some = {handle: value for (other, handle), value in wanted.items() if other is run}
    if not some:
        return
    for handle in await setting(some):
        value = some[handle]
        if value is None:
            held.pop((run, handle), None)
        else:
            held[run, handle] = value
