"""Runs the backend: brings it up, keeps it up, takes it down, and changes its users meanwhile.

Two sets of users: the desired one (`roster`, what controllers say) and the confirmed one (what the core acknowledged).
While a core is on its way, syncs change the desired set and succeed; the confirmed one follows.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from twisted.internet.defer import CancelledError, ensureDeferred
from twisted.internet.interfaces import IDelayedCall
from twisted.internet.task import deferLater
from twisted.internet.threads import deferToThreadPool
from twisted.logger import Logger

from drivers.interface import Driver, Exit, Generation
from node.control import Control, Settled
from node.errors import (
    CoreFailed,
    InvalidConfig,
    NodeError,
    NotInitialized,
    NotStarted,
    PortTaken,
    ShuttingDown,
    UsersRefused,
)
from node.logs import LogRing
from node.reconcile import Pairs, Reconciler
from node.restart import Backoff
from node.users import Account, Accounts, Change, Refusal, Roster, diff, key_of
from node.watch import Watch
from protos.service_pb2 import Backend, User

# Seconds that a core has to come up; deployed panels give up at 10.
START_TIMEOUT = 8.0
# Seconds between two tries to get a port that is taken, within START_TIMEOUT.
PORT_RETRY = 0.25
# Above this many users a roster is built in the reactor's pool.
BUILD_INLINE = 5000


@dataclass(frozen=True)
class Accepted:
    """A backend that was asked for and accepted: what a core is run from, again and again if need be."""

    driver: Driver
    plan: Any
    version: str
    # The configuration by its meaning; equal ones need no other core.
    fingerprint: tuple[str, str, frozenset[str]]


class Runner:
    """One backend at most, and everything that changes it."""

    log = Logger()

    def __init__(self, reactor: Any, ring: LogRing, settle_counters: Callable[[], Awaitable[None]]) -> None:
        self._reactor = reactor
        self._ring = ring
        self._settle_counters = settle_counters
        self._control = Control()
        self._reconciler = Reconciler(lambda: self.roster.target, self._confirmed, self._apply)
        self._backoff = Backoff(reactor)
        self._watch = Watch(reactor, self._hung, self._drifted)
        self._grace: IDelayedCall | None = None
        self._ending: set[Generation] = set()
        self._closed = False
        self.roster = Roster((), _nobody)
        self.accepted: Accepted | None = None
        # Newest first.
        self.generations: list[Generation] = []
        self.state = "stopped"
        self.reason = ""

    def require(self) -> None:
        """Raises what a call that needs a running core fails with."""
        if self.state in ("starting", "restarting"):
            raise NotStarted(self.reason or self.state)
        if self.state == "failed":
            raise CoreFailed(f"the core is down: {self.reason}")
        if self.state != "running":
            raise NotInitialized

    # Lifecycle

    async def start(self, driver: Driver, request: Backend) -> None:
        """Run a backend. One that runs and means the same goes on, with these users; nobody notices."""
        await self._control.run(lambda settled: self._start(driver, request, settled), request, core=True)

    async def stop(self, reason: str, grace: float = 0.0) -> None:
        """Stop the backend, and whatever is under way. Its core ends after `grace` seconds, unless a Start wants it."""
        self._control.abort()
        await self._control.run(lambda settled: self._stop(reason, grace, settled), core=True)

    async def close(self) -> None:
        """The node ends: the core goes, and no other comes."""
        self._closed = True
        await self.stop("the node is shutting down")

    async def _start(self, driver: Driver, request: Backend, settled: Settled) -> None:
        if self._closed:
            raise ShuttingDown
        fingerprint = (driver.name, driver.fingerprint(request.config), frozenset(request.exclude_inbounds))
        if self._serves(fingerprint):
            await self._take_back(request, settled)
            return
        wanted, roster, refused = await self._prepare(driver, request, fingerprint)
        await self._replace_core(wanted, roster, settled)
        self._tell(wanted.plan.warnings, refused)

    def _serves(self, fingerprint: tuple[str, str, frozenset[str]]) -> bool:
        current = self.accepted
        return bool(current and current.fingerprint == fingerprint and self.generations and self.generations[0].alive)

    async def _take_back(self, request: Backend, settled: Settled) -> None:
        """The core that runs is the one that is asked for: only its users follow."""
        assert self.accepted is not None
        roster, refused = await self._build(self.accepted.plan, request.users)
        self._install(roster, settled)
        self._cancel_grace()
        if self.state != "running":
            self._say("running", "the same configuration was asked for again")
        await self._settle_all()
        self._tell((), refused)

    async def _prepare(
        self, driver: Driver, request: Backend, fingerprint: tuple[str, str, frozenset[str]]
    ) -> tuple[Accepted, Roster, list[Refusal]]:
        """Everything that can refuse a Start, before anything is destroyed."""
        version = await driver.version()
        plan = await driver.prepare(request.config, frozenset(request.exclude_inbounds))
        if self.generations:
            await driver.check(plan)
        roster, refused = await self._build(plan, request.users)
        return Accepted(driver, plan, version, fingerprint), roster, refused

    async def _replace_core(self, wanted: Accepted, roster: Roster, settled: Settled) -> None:
        before = (self.accepted, self.roster, self.state, self.reason)
        ran = bool(self.generations)
        self._backoff.cancel()
        self._cancel_grace()
        self.accepted = wanted
        self._install(roster, settled)
        try:
            await self._end_generations()
            self._say("starting", "")
            await self._launch(wanted)
        except BaseException as fault:
            self.accepted, self.roster = before[:2]
            if isinstance(fault, NodeError) and ran:
                raise await self._put_back(fault) from fault
            if not isinstance(fault, CancelledError):
                self._say(*_after_failure(fault, before))
            raise
        await self._settle_all()

    async def _launch(self, wanted: Accepted) -> None:
        """Start a core; a port that is taken is tried again for as long as there is time."""
        deadline = self._reactor.seconds() + START_TIMEOUT
        while True:
            try:
                left = deadline - self._reactor.seconds()
                generation = await wanted.driver.launch(wanted.plan, self.roster.target, left)
                break
            except PortTaken:
                if self._reactor.seconds() + PORT_RETRY > deadline:
                    raise
                await deferLater(self._reactor, PORT_RETRY)
        self._say("running", "")
        self._adopt(generation)

    async def _put_back(self, fault: NodeError) -> CoreFailed:
        """The new core did not come up after the old one had ended: run the old backend again."""
        assert self.accepted is not None
        self._say("restarting", fault.text)
        try:
            await self._launch(self.accepted)
        except NodeError as second:
            self._again(second)
            return CoreFailed(f"{fault.text}; the backend before it did not come up at once either: {second.text}")
        return CoreFailed(f"{fault.text}; the backend before it runs again")

    async def _stop(self, reason: str, grace: float, settled: Settled) -> None:
        self._backoff.cancel()
        self._cancel_grace()
        settled()
        if self.state != "stopped":
            self._say("stopped", reason)
        if grace and self.generations:
            self._grace = self._reactor.callLater(grace, self._grace_over)
            return
        self.accepted = None
        self.roster = Roster((), _nobody)
        await self._end_generations()

    def _grace_over(self) -> None:
        """Nobody came to take the core back."""
        self._grace = None
        self._in_background(self.stop(self.reason), "the core was not stopped after its grace")

    def _cancel_grace(self) -> None:
        if self._grace is not None:
            self._grace.cancel()
            self._grace = None

    async def _end_generations(self) -> None:
        """Read the counters, then end every process; those that an aborted operation was about to end, too."""
        await self._reconciler.idle()
        if self.generations:
            await self._settle_counters()
        self._ending |= set(self.generations)
        self.generations = []
        for generation in list(self._ending):
            await generation.stop()
            self._ending.discard(generation)

    # Crashes

    def _adopt(self, generation: Generation) -> None:
        self.generations.insert(0, generation)
        self._watch.begin(generation)
        generation.when_exited().addCallback(self._exited, generation)

    def _exited(self, ended: Exit, generation: Generation) -> None:
        """A process is gone. If nobody asked it to go it comes again."""
        if generation not in self.generations:
            return
        self.generations.remove(generation)
        if not self.generations and self.state == "running":
            self._again(CoreFailed(ended.reason))

    def _again(self, fault: NodeError) -> None:
        self._say("restarting", fault.text)
        self._backoff.later(lambda: self._in_background(self._restart(), "the core was not started again"))

    async def _restart(self) -> None:
        async def work(settled: Settled) -> None:
            settled()
            if self.state != "restarting" or self.accepted is None:
                return
            try:
                await self._launch(self.accepted)
                await self._settle_all()
            except InvalidConfig as fault:
                self._say("failed", fault.text)
            except NodeError as fault:
                self._again(fault)

        await self._control.run(work, core=True)

    def _hung(self, generation: Generation, reason: str) -> None:
        """It lives and does not answer: as good as gone."""
        self._ring.event(f"the core is ended: {reason}")
        generation.kill()

    async def _drifted(self, generation: Generation) -> None:
        """The core's own list of users was not what it had confirmed: bring it back to what is wanted."""
        if generation in self.generations and self.state == "running":
            await self._settle_all()

    # Users

    async def put(self, user: User) -> tuple[Pairs, list[Refusal]]:
        """Take one user into the desired set, behind what came before. `settle` brings him into force."""
        await self._control.settled()
        if self._grace is not None:
            self._remove_in_grace(user)
        self._require_desired()
        return self.roster.put(user)

    async def settle(self, touched: Pairs) -> list[Refusal]:
        """Wait until what was touched is in force; what the core refused of it. A core on its way takes it along."""
        if not touched or self.state != "running":
            return []
        return await self._reconciler.settle(touched)

    async def replace(self, users: Sequence[User]) -> None:
        """The users are these and no others. Raises `UsersRefused` after all others were applied."""

        async def work(settled: Settled) -> None:
            self._require_desired()
            assert self.accepted is not None
            roster, refused = await self._build(self.accepted.plan, users)
            self._install(roster, settled)
            raise_refused(refused + await self._settle_all())

        await self._control.run(work)

    async def update(self, users: Iterable[User]) -> None:
        """Add, change or remove these users, as one. Raises `UsersRefused` after all others were applied."""
        await self._control.settled()
        self._require_desired()
        touched, refused = self.roster.put_all(users)
        raise_refused(refused + await self.settle(touched))

    def _require_desired(self) -> None:
        """Users can be taken in while a core is on its way, too."""
        if self.state not in ("starting", "restarting"):
            self.require()

    def _remove_in_grace(self, user: User) -> None:
        """After a Stop that waits for a Start nobody comes in, but who is removed is out."""
        if not any(tag in self.roster.target for tag in user.inbounds):
            touched = self.roster.remove(key_of(user.email))
            if touched:
                self._reconciler.settle(touched).addErrback(
                    lambda failure: self.log.failure("a user was not removed", failure)
                )

    async def _settle_all(self) -> list[Refusal]:
        return await self.settle({(tag, key) for tag, key, _ in diff(self._confirmed(), self.roster.target)})

    def _install(self, roster: Roster, settled: Settled) -> None:
        self.roster = roster
        settled()

    async def _build(self, plan: Any, users: Sequence[User]) -> tuple[Roster, list[Refusal]]:
        if len(users) <= BUILD_INLINE:
            return Roster.of(users, plan.tags, plan.account)
        pool = self._reactor.getThreadPool()
        return await deferToThreadPool(self._reactor, pool, Roster.of, users, plan.tags, plan.account)

    def _confirmed(self) -> Mapping[str, Accounts]:
        return self.generations[0].accounts if self.generations else {tag: {} for tag in self.roster.target}

    async def _apply(self, changes: list[Change]) -> list[Refusal]:
        """A core that went away meanwhile takes the changes along when it comes again."""
        if not self.generations or self.accepted is None:
            return []
        asked = self.generations[0]
        generation, refused = await self.accepted.driver.apply(asked, changes)
        if generation is not asked:
            self._adopt(generation)
        return refused if generation.alive else []

    # What is told

    def _say(self, state: str, reason: str) -> None:
        """Enter a state: `info` tells it, and so do the logs."""
        self.state, self.reason = state, reason
        self._ring.event(f"backend {state}" + (f": {reason}" if reason else ""))
        self.log.info("backend {state} {reason}", state=state, reason=reason)

    def _tell(self, warnings: Iterable[str], refused: list[Refusal]) -> None:
        for warning in warnings:
            self._ring.event(warning)
        for email, reason in refused:
            self._ring.event(f"user {email!r} is left out: {reason}")

    def _in_background(self, work: Any, text: str) -> None:
        ensureDeferred(work).addErrback(lambda failure: self.log.failure(text, failure))


def raise_refused(refused: list[Refusal]) -> None:
    """Report users that could not be applied, if any."""
    if refused:
        raise UsersRefused([(email, reason) for email, reason in refused])


def _after_failure(fault: BaseException, before: tuple[Any, ...]) -> tuple[str, str]:
    """The state after a Start that failed where nothing ran before: a refused one changes nothing."""
    if isinstance(fault, InvalidConfig):
        return before[2], before[3]
    return "failed", str(fault) or "aborted"


def _nobody(_: str, __: User) -> Account | None:
    return None
