"""Runs the backend: its generations, its users, and the order in which control happens.

Starts, stops and full syncs go one at a time, in order of arrival. State is held here, on the reactor.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from twisted.internet.defer import DeferredLock
from twisted.internet.threads import deferToThreadPool
from twisted.logger import Logger

from drivers.interface import Driver, Exit, Generation
from node.errors import CoreFailed, InvalidConfig, NotInitialized, NotStarted, ShuttingDown, UsersRefused
from node.logs import LogRing
from node.reconcile import Pairs, Reconciler
from node.users import Account, Accounts, Change, Refusal, Roster, diff
from protos.service_pb2 import Backend, User

T = TypeVar("T")

# Seconds that a core has to come up; deployed panels give up at 10.
START_TIMEOUT = 8.0
# Above this many users a roster is built in the reactor's pool.
BUILD_INLINE = 5000


@dataclass(frozen=True)
class Accepted:
    """A backend that was asked for and accepted."""

    driver: Driver
    plan: Any
    version: str


class Runner:
    """One backend at most, and everything that changes it."""

    log = Logger()

    def __init__(self, reactor: Any, ring: LogRing, settle_counters: Callable[[], Awaitable[None]]) -> None:
        self._reactor = reactor
        self._ring = ring
        self._settle_counters = settle_counters
        self._turn = DeferredLock()
        self._reconciler = Reconciler(lambda: self.roster.target, self._confirmed, self._apply)
        self.roster = Roster((), _nobody)
        self.accepted: Accepted | None = None
        # Newest first.
        self.generations: list[Generation] = []
        self.state = "stopped"
        self.reason = ""
        self._closed = False

    def require(self) -> None:
        """Raises what a call that needs a running core fails with."""
        if self.state in ("starting", "restarting"):
            raise NotStarted(self.reason or self.state)
        if self.state == "failed":
            raise CoreFailed(f"the core is down: {self.reason}")
        if self.state != "running":
            raise NotInitialized

    async def start(self, driver: Driver, request: Backend) -> None:
        """Run a backend. One that runs goes on untouched if the core refuses the new configuration."""
        await self._in_turn(lambda: self._start(driver, request))

    async def stop(self, reason: str) -> None:
        """End the backend; its counters are read first. Without one there is nothing to do."""
        await self._in_turn(lambda: self._stop(reason))

    async def close(self) -> None:
        """The node ends: the core goes, and no other comes."""
        self._closed = True
        await self.stop("the node is shutting down")

    async def put(self, user: User) -> tuple[Pairs, list[Refusal]]:
        """Take one user into the roster, behind whatever control is under way. `settle` brings him into force."""

        async def put() -> tuple[Pairs, list[Refusal]]:
            self.require()
            return self.roster.put(user)

        return await self._in_turn(put)

    async def settle(self, touched: Pairs) -> list[Refusal]:
        """Wait until what was touched is in force; what the core refused of it."""
        return await self._reconciler.settle(touched) if touched else []

    async def replace(self, users: Sequence[User]) -> None:
        """The users are these and no others. Raises `UsersRefused` after all others were applied."""

        async def swap() -> tuple[Pairs, list[Refusal]]:
            self.require()
            assert self.accepted is not None
            self.roster, refused = await self._build(self.accepted.plan, users)
            return {(tag, key) for tag, key, _ in diff(self._confirmed(), self.roster.target)}, refused

        touched, refused = await self._in_turn(swap)
        raise_refused(refused + await self.settle(touched))

    async def update(self, users: Iterable[User]) -> None:
        """Add, change or remove these users, as one. Raises `UsersRefused` after all others were applied."""

        async def put_all() -> tuple[Pairs, list[Refusal]]:
            self.require()
            return self.roster.put_all(users)

        touched, refused = await self._in_turn(put_all)
        raise_refused(refused + await self.settle(touched))

    async def _in_turn(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run `work` when all control before it is done."""
        return await self._turn.run(work)

    async def _start(self, driver: Driver, request: Backend) -> None:
        if self._closed:
            raise ShuttingDown
        version = await driver.version()
        plan = await driver.prepare(request.config, frozenset(request.exclude_inbounds))
        if self.generations:
            await driver.check(plan)
        roster, refused = await self._build(plan, request.users)
        ran, before = bool(self.generations), (self.state, self.reason)
        await self._end_generations()
        self._say("starting", "")
        try:
            generation = await driver.launch(plan, roster.target, START_TIMEOUT)
        except InvalidConfig as fault:
            # Where something ran it is gone by now; where nothing did nothing has changed.
            self._say(*(("failed", fault.text) if ran else before))
            raise
        except Exception as fault:
            self._say("failed", str(fault))
            raise
        self.accepted, self.roster = Accepted(driver, plan, version), roster
        self._say("running", "")
        self._adopt(generation)
        self._tell_start(plan.warnings, refused)

    async def _stop(self, reason: str) -> None:
        await self._end_generations()
        self.accepted, self.roster = None, Roster((), _nobody)
        if self.state != "stopped":
            self._say("stopped", reason)

    async def _end_generations(self) -> None:
        """Read the counters, then end every process."""
        await self._reconciler.idle()
        if not self.generations:
            return
        await self._settle_counters()
        ending, self.generations = self.generations, []
        for generation in ending:
            await generation.stop()

    async def _build(self, plan: Any, users: Sequence[User]) -> tuple[Roster, list[Refusal]]:
        if len(users) <= BUILD_INLINE:
            return Roster.of(users, plan.tags, plan.account)
        pool = self._reactor.getThreadPool()
        return await deferToThreadPool(self._reactor, pool, Roster.of, users, plan.tags, plan.account)

    def _adopt(self, generation: Generation) -> None:
        self.generations.insert(0, generation)
        generation.when_exited().addCallback(self._exited, generation)

    def _exited(self, ended: Exit, generation: Generation) -> None:
        """A process is gone. If nobody asked it to go, that is the end of the backend for now."""
        if generation not in self.generations:
            return
        self.generations.remove(generation)
        if not self.generations:
            self._say("failed", ended.reason)

    def _confirmed(self) -> Mapping[str, Accounts]:
        return self.generations[0].accounts if self.generations else {tag: {} for tag in self.roster.target}

    async def _apply(self, changes: list[Change]) -> list[Refusal]:
        self.require()
        assert self.accepted is not None
        generation, refused = await self.accepted.driver.apply(self.generations[0], changes)
        if generation not in self.generations:
            self._adopt(generation)
        if refused and not generation.alive:
            self.require()
        return refused

    def _say(self, state: str, reason: str) -> None:
        """Enter a state: `info` tells it, and so do the logs."""
        self.state, self.reason = state, reason
        self._ring.event(f"backend {state}" + (f": {reason}" if reason else ""))
        self.log.info("backend {state} {reason}", state=state, reason=reason)

    def _tell_start(self, warnings: Iterable[str], refused: list[Refusal]) -> None:
        for warning in warnings:
            self._ring.event(warning)
        for email, reason in refused:
            self._ring.event(f"user {email!r} is left out: {reason}")


def raise_refused(refused: list[Refusal]) -> None:
    """Report users that could not be applied, if any."""
    if refused:
        raise UsersRefused([(email, reason) for email, reason in refused])


def _nobody(_: str, __: User) -> Account | None:
    return None
