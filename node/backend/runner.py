"""Runs the backend: brings it up, keeps it up, takes it down. Its users are `node.backend.desired`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Iterable
from dataclasses import replace
from typing import Any, TypeVar

from twisted.internet.defer import CancelledError, ensureDeferred
from twisted.internet.interfaces import IDelayedCall
from twisted.internet.task import deferLater
from twisted.internet.threads import deferToThreadPool
from twisted.python.failure import Failure

from node.backend.backoff import Backoff
from node.backend.control import Settled
from node.backend.desired import Accepted, Held, Members, no_users
from node.backend.generations import Generations
from node.backend.health import Watch
from node.backend.record import Record
from node.backend.roster import Roster
from node.backend.wind_down import WindDown
from node.contract.accounts import Refusal, diff
from node.contract.driver import Driver, Exit, Generation
from node.errors import CoreFailed, InvalidConfig, NodeError, PortTaken, ShuttingDown
from node.logs import Logger, LogRing
from node.reactor import PooledReactor
from node.waiting import together
from protos.service_pb2 import Backend

T = TypeVar("T")

# Bytes that a configuration may have, and characters above which it is read in the reactor's pool.
MAX_CONFIG = 8 * 1024**2
READ_INLINE = 64 * 1024

# Seconds that a Start may take; deployed panels give up at 10.
START_TIMEOUT = 8.0
# Seconds that the backend before it has to come back if it fails, while its caller waits.
BACK_TIMEOUT = 1.0
# Seconds between two tries to get a port that is taken, and what the last try must have left.
PORT_RETRY = 0.25
LAST_TRY = 1.0
# Users that are named in an error.
LISTED = 20


class Runner(Members):
    """One backend at most, and everything that changes it."""

    log = Logger()

    def __init__(
        self,
        reactor: PooledReactor,
        ring: LogRing,
        record: Record,
        generations: Generations,
        read: Callable[[Generation], Awaitable[bool]],
    ) -> None:
        super().__init__(reactor, ring, record, generations)
        self._backoff, self._resuming = Backoff(reactor), Backoff(reactor)
        self._watch = Watch(reactor, self._hung, self._repair)
        self._grace: IDelayedCall | None = None
        self._wind_down = WindDown(reactor, generations, read)
        self._closed = False

    async def start(self, driver: Driver, request: Backend) -> None:
        """Run a backend. One that runs and means the same goes on, with these users; nobody notices."""

        async def work(settled: Settled) -> None:
            await self._start(driver, request, settled)
            self._require_out()

        await self._control.run(work, request, core=True)
        await self.recorded()

    async def resume(self, driver: Driver, request: Backend, resumed: Callable[[], None]) -> None:
        """Run what ran when the node ended. If it does not come up it is tried again as after a crash.

        `resumed` is called when it runs, now or later; never if a controller was faster.
        """
        await self._control.run(lambda _: self._resume(driver, request, resumed), core=True)

    @property
    def keep_alive(self) -> int:
        """Seconds for which the backend goes on without a controller; 0 for ever, or where there is none."""
        if self.accepted is None or self.state == "stopped":
            return 0
        return self.accepted.keep_alive

    @property
    def warnings(self) -> list[str]:
        """What an operator should know about the watch over the cores."""
        return self._watch.warnings

    async def stop(self, reason: str, grace: float = 0.0) -> None:
        """Stop the backend, and whatever is under way. Its core ends after `grace` seconds, unless a Start wants it."""
        self._backoff.cancel()
        self._resuming.cancel()
        # Before others are aborted: who waited for them finds it stopped.
        if self.state != "stopped":
            self._say("stopped", reason)
        if not self._closed:
            self._recorder.forget()
        self._control.abort()
        await self._control.run(lambda settled: self._stop(grace, settled), core=True, final=True)
        await self.recorded()

    async def close(self) -> None:
        """The node ends: the core goes, and no other comes before the next node's, which resumes it."""
        self._closed = True
        await self.stop("the node is shutting down")

    # A Start

    async def _start(self, driver: Driver, request: Backend, settled: Settled) -> None:
        if self._closed:
            raise ShuttingDown
        deadline = self._reactor.seconds() + START_TIMEOUT
        fingerprint = (driver.name, await self._meaning(driver, request.config), frozenset(request.exclude_inbounds))
        if self.state == "running" and not self.generations.current:
            # A core is just taking the place of another one: it may be the one that is asked for.
            await self._reconciler.idle()
        if self._serves(fingerprint):
            assert self.accepted is not None
            built = await self._build(self.accepted, request.users, self.roster)
            # It may have died meanwhile.
            if self._serves(fingerprint):
                await self._take_back(request, *built, settled)
                return
        wanted = await self._in_time(self._prepare(driver, request, fingerprint))
        roster, refused = await self._build(wanted, request.users)
        self._tell(await self._replace_core(wanted, roster, settled, deadline) + refused, wanted.plan.warnings)

    async def _meaning(self, driver: Driver, config: str) -> str:
        """The fingerprint of a configuration; of a long one it is made in the reactor's pool."""
        if len(config) <= READ_INLINE:
            return driver.fingerprint(config)
        if len(config.encode()) > MAX_CONFIG:
            raise InvalidConfig(f"the configuration is longer than {MAX_CONFIG // 1024**2} MiB")
        return await deferToThreadPool(self._reactor, self._reactor.getThreadPool(), driver.fingerprint, config)

    def _serves(self, fingerprint: tuple[str, str, frozenset[str]]) -> bool:
        same = self.accepted is not None and self.accepted.fingerprint == fingerprint
        return same and self.generations.current is not None and self.generations.current.alive

    async def _take_back(self, request: Backend, roster: Roster, refused: list[Refusal], settled: Settled) -> None:
        """The core that runs is the one that is asked for: only its users follow."""
        assert self.accepted is not None
        self._cancel_grace()
        if self.state != "running":
            self._say("running", "the same configuration was asked for again")
        self.accepted = replace(self.accepted, request=without_users(request), keep_alive=request.keep_alive)
        # Before it is settled: who waits for that says the next word, and says it at once.
        self._recorder.backend(self.accepted.request, self.roster, roster)
        self._install(roster, settled)
        self._tell(await self._settle_all() + refused)

    async def _prepare(
        self, driver: Driver, request: Backend, fingerprint: tuple[str, str, frozenset[str]]
    ) -> Accepted:
        """Everything that can refuse a Start, before anything is destroyed."""
        version = await driver.version()
        plan = await driver.prepare(request.config, frozenset(request.exclude_inbounds))
        if self.generations.current:
            await driver.check(plan)
        return Accepted(without_users(request), request.keep_alive, driver, plan, version, fingerprint)

    async def _in_time(self, work: Coroutine[Any, Any, T]) -> T:
        def late(_: object, seconds: float) -> Failure:
            return Failure(CoreFailed(f"the core did not read the configuration within {seconds:g} s"))

        return await ensureDeferred(work).addTimeout(START_TIMEOUT, self._reactor, late)

    async def _replace_core(self, wanted: Accepted, roster: Roster, settled: Settled, deadline: float) -> list[Refusal]:
        """End what runs and run this; if it cannot be run, what ran before. Returns who the core refused."""
        before = self.state, self.reason
        self._backoff.renew()
        self._cancel_grace()
        # Before the roster changes: nothing of it is for the core that ends.
        self._say("starting", "")
        # What was stopped does not come back.
        self._held = Held(None, no_users()) if before[0] == "stopped" else Held(self.accepted, self.roster)
        self.accepted = wanted
        self._install(roster, settled)
        try:
            await self._end_generations()
            await self._launch(wanted, max(deadline - self._reactor.seconds(), LAST_TRY))
        except Exception as fault:
            self.accepted, self.roster = self._held.accepted, self._held.roster
            self._held = None
            if self._is_aborted(fault):
                raise
            if before[0] in ("running", "restarting"):
                raise await self._put_back(fault) from fault
            self._say(*self._after_failure(self._as_told(fault), before))
            raise
        self._resuming.cancel()
        replaced, self._held = self._held.roster, None
        self._recorder.backend(wanted.request, replaced, self.roster)
        return await self._settle_all()

    def _require_out(self) -> None:
        """Raises if the core may still let in somebody whom the Start took out: it did not answer then."""
        confirmed, wanted = self._confirmed(), self._wanted()
        # Not whom somebody else took out meanwhile: that is on its way.
        keys = sorted(
            {key for tag, key, packed in self._leaving if confirmed.get(tag, {}).get(key) not in (None, packed)}
            & {key for tag, key, _ in diff(confirmed, wanted)}
        )
        if keys:
            listed = ", ".join(map(repr, keys[:LISTED])) + (" and others" if len(keys) > LISTED else "")
            raise CoreFailed(f"the core did not answer: {listed} may still be in; the node puts them out when it does")

    def _after_failure(self, fault: NodeError, before: tuple[str, str]) -> tuple[str, str]:
        """The state after a Start that failed where nothing ran before: a refused one changes nothing."""
        if isinstance(fault, InvalidConfig):
            return before
        again = "; what ran when the node ended is tried again" if self._resuming.pending else ""
        return "failed", fault.text + again

    async def _launch(self, wanted: Accepted, seconds: float) -> None:
        """Start a core; a port that is taken is tried again for as long as there is time."""
        deadline = self._reactor.seconds() + seconds
        while True:
            try:
                left = round(deadline - self._reactor.seconds(), 1)
                generation = await wanted.driver.launch(wanted.plan, self.roster.target, left)
                break
            except PortTaken:
                if self._reactor.seconds() + PORT_RETRY + LAST_TRY > deadline:
                    raise
                await deferLater(self._reactor, PORT_RETRY)
        self._say("running", "")
        self._adopt(generation)

    async def _put_back(self, fault: Exception) -> NodeError:
        """The new core did not come up after the old one had ended: run the old backend again."""
        first = self._as_told(fault)
        kind = InvalidConfig if isinstance(fault, InvalidConfig) else CoreFailed
        self._say("restarting", first.text)
        second = await self._run_accepted(BACK_TIMEOUT)
        if second is not None:
            return kind(f"{first.text}; the backend before it did not come up at once either: {second.text}")
        return kind(f"{first.text}; the backend before it runs again")

    async def _run_accepted(self, seconds: float) -> NodeError | None:
        """Run what was accepted before. If it does not come up it is tried again later, and why is returned."""
        assert self.accepted is not None
        try:
            await self._launch(self.accepted, seconds)
        except Exception as fault:
            if self._is_aborted(fault):
                raise
            told = self._as_told(fault)
            self._again(told)
            return told
        await self._settle_all()
        return None

    def _is_aborted(self, fault: Exception) -> bool:
        """Whether a Stop ended the work; else it is a fault like any other, and something has to run after it."""
        return isinstance(fault, CancelledError) and self.state == "stopped"

    def _as_told(self, fault: Exception) -> NodeError:
        """What a caller or an operator is told; the log has the rest of what nobody foresaw."""
        if isinstance(fault, NodeError):
            return fault
        self.log.failure("a core was not started")
        return CoreFailed(f"internal error: {type(fault).__name__}; the node's log has more")

    # A Stop

    async def _stop(self, grace: float, settled: Settled) -> None:
        self._cancel_grace()
        if grace and self.generations.current and self.accepted is not None:
            self.in_grace = True
            self._grace = self._reactor.callLater(grace, self._grace_over)
        else:
            await self._end(settled)

    def _grace_over(self) -> None:
        """Nobody took the core back; a Start that is under way may still do so."""

        async def work(settled: Settled) -> None:
            if self.state == "stopped" and not self.in_grace:
                await self._end(settled)

        self._cancel_grace()
        self._in_background(self._control.run(work, core=True, final=True), "the core was not stopped after its grace")

    def _cancel_grace(self) -> None:
        self.in_grace = False
        if self._grace is not None and self._grace.active():
            self._grace.cancel()
        self._grace = None

    async def _end(self, settled: Settled) -> None:
        self.accepted = None
        self._install(no_users(), settled)
        await self._end_generations()

    async def _end_generations(self) -> None:
        """End every process, and lose no byte; those that an aborted operation was about to end, too."""
        await self._reconciler.idle()
        await together(map(self._end_one, self.generations.counting))

    async def _end_one(self, generation: Generation) -> None:
        await self._wind_down.end(generation)

    # Resuming

    async def _resume(self, driver: Driver, request: Backend, resumed: Callable[[], None]) -> None:
        """Whatever changes users waits until it is known whether this runs.

        Taken in before, it would be forgotten with a try that fails, and the next one would bring back who was removed.
        """
        if self.accepted is not None or self._closed:
            return  # a controller was faster, or the node ends
        self._say("starting", "it ran when the node ended")
        try:
            await self._start(driver, request, _not_yet)
        except Exception as fault:
            if self._is_aborted(fault):
                raise
            told = self._as_told(fault)
            again = not isinstance(told, InvalidConfig)
            self._say("failed", f"not resumed: {told.text}" + ("; this is tried again" if again else ""))
            if again:
                self._resuming.later(
                    lambda: self._in_background(self.resume(driver, request, resumed), "it was not resumed")
                )
        else:
            resumed()

    # Crashes

    def _adopt(self, generation: Generation) -> None:
        self.generations.adopt(generation)
        self._backoff.served()
        self._watch.begin(generation)
        generation.when_exited().addCallback(self._exited, generation)

    def _exited(self, ended: Exit, generation: Generation) -> None:
        """A process is gone. If nobody asked it to go it comes again."""
        was_current = generation is self.generations.current
        self.generations.gone(generation)
        if was_current and self.state == "running":
            self._again(CoreFailed(ended.reason))

    def _again(self, fault: NodeError) -> None:
        """Try again when it is time to, unless a configuration is to blame: that does not mend itself."""
        if isinstance(fault, InvalidConfig):
            self._say("failed", fault.text)
            return
        self._say("restarting", fault.text)
        self._backoff.later(
            lambda: self._in_background(self._control.run(self._restart, core=True), "the core was not started again")
        )

    def _gone(self, fault: Exception) -> None:
        self._again(CoreFailed(self._as_told(fault).text))

    async def _restart(self, settled: Settled) -> None:
        settled()
        if self.state == "restarting":
            # Whatever was ending when it went wrong.
            await self._end_generations()
            await self._run_accepted(START_TIMEOUT)

    def _hung(self, generation: Generation, reason: str) -> None:
        """It lives and does not answer: as good as gone."""
        self._ring.event(f"the core is ended: {reason}")
        generation.kill()

    def _doubt(self, generation: Generation) -> None:
        self._watch.doubt(generation)

    async def _repair(self, generation: Generation) -> None:
        """Bring the core to what is wanted, whatever it has refused or lost."""
        if generation is self.generations.current:
            await self._reconciler.repair()

    def _tell(self, refused: list[Refusal], warnings: Iterable[str] = ()) -> None:
        for warning in warnings:
            self._ring.event(warning)
        for email, reason in refused:
            self._ring.event(f"user {email!r} is left out: {reason}")


def _not_yet() -> None:
    """Its users are settled when it has ended."""


def without_users(request: Backend) -> bytes:
    """A backend as it is recorded: its users are recorded one by one."""
    kept = Backend(type=request.type, config=request.config, keep_alive=request.keep_alive)
    kept.exclude_inbounds.extend(request.exclude_inbounds)
    return kept.SerializeToString()
