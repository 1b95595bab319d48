"""Runs the one backend: Starts, Stops, and what ran when the node ended. Its parts do the rest."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from functools import partial
from typing import Any, TypeVar

from twisted.internet.defer import ensureDeferred
from twisted.internet.interfaces import IDelayedCall
from twisted.internet.threads import deferToThreadPool
from twisted.python.failure import Failure

from node.backend.backoff import Backoff
from node.backend.control import Control, Settled
from node.backend.desired import Accepted, Desired, Fingerprint, without_users
from node.backend.drain import Drain, Limits
from node.backend.faults import as_told, in_background, leave_out
from node.backend.generations import Generations
from node.backend.listing import Listing
from node.backend.members import Members
from node.backend.record import Record
from node.backend.replace import Replacement
from node.backend.roster import Roster
from node.backend.routing import Router
from node.backend.standing import Drainer, Standing
from node.backend.state import State, Status
from node.backend.supervisor import START_TIMEOUT, Happened, Supervisor
from node.backend.supplied import Supplied
from node.backend.wind_down import WindDown
from node.contract.accounts import Refusal
from node.contract.driver import Driver, Generation, Plan
from node.contract.routing import Routing
from node.errors import CoreFailed, InvalidConfig, NodeError, NotStarted, ShuttingDown
from node.events.journal import Journal
from node.events.kinds import Kind
from node.events.users import UserEvents
from node.logs import LogRing
from node.reactor import PooledReactor
from node.waiting import both
from protos.service_pb2 import Backend

T = TypeVar("T")

# Bytes that a configuration may have, and characters above which it is read in the reactor's pool.
MAX_CONFIG = 8 * 1024**2
READ_INLINE = 64 * 1024
# Seconds that the backend before a Start has to come back if that fails, while its caller waits.
BACK_TIMEOUT = 1.0
DRAIN = Limits()
UNCHANGED = Routing()


class Runner:
    """One backend at most. `users` changes who may use it, `listing` tells of them."""

    def __init__(
        self,
        reactor: PooledReactor,
        ring: LogRing,
        record: Record,
        generations: Generations,
        read: Callable[[Generation], Awaitable[bool]],
        limits: Limits = DRAIN,
        upgrade: bool = False,
        journal: Journal | None = None,
    ) -> None:
        """With `upgrade` an equal Start brings in a core whose files are others on disk by now.

        Without a `journal` what happens is told to nobody but the ring.
        """
        self._reactor = reactor
        self._ring = ring
        self._generations = generations
        self._upgrade = upgrade
        self._control = Control()
        self.journal = journal or Journal(reactor)
        self._events = UserEvents(self.journal, reactor)
        self.status = Status(ring, self.journal)
        self.desired = Desired(reactor, record)
        wind_down = WindDown(reactor, generations, read)
        drain = Drain(reactor, generations, limits, wind_down.end, self.journal)
        replacement = Replacement(reactor, generations, wind_down, drain)
        self._replacement = replacement
        self._supervisor = Supervisor(
            reactor,
            ring,
            self.status,
            self._control,
            self.desired,
            generations,
            replacement,
            drain,
            self.journal,
            self._events,
        )
        self._settling = self._supervisor.settling
        self.users = Members(self.status, self._control, self.desired, generations, self._settling, self._events)
        self.listing = Listing(reactor, self.status, self.desired, generations, self._settling)
        self.router = Router(self.status, self._control, self.desired, generations, self._settling)
        self._resuming = Backoff(reactor)
        self._grace: IDelayedCall | None = None
        # The run that a Stop left for the Start that follows it.
        self._waiting: Generation | None = None
        self._closed = False

    async def start(self, driver: Driver, request: Backend) -> None:
        """Run a backend. One that runs and means the same goes on, with these users; nobody notices."""

        async def work(settled: Settled) -> None:
            await self._start(driver, request, settled)
            self._settling.require_out()

        try:
            await self._control.run(work, request, core=True)
        except InvalidConfig as error:
            self.journal.tell(Kind.CONFIG_REFUSED, error.text, reason=error.text)
            raise
        await self.desired.recorded()

    async def resume(
        self, driver: Driver, request: Backend, resumed: Callable[[], None], routing: Routing = UNCHANGED
    ) -> None:
        """Run what ran when the node ended. If it does not come up it is tried again as after a crash.

        `resumed` is called when it runs, now or later; never if a controller was faster. `routing` is what was changed
        of its routing.
        """
        await self._control.run(lambda _: self._resume(driver, request, resumed, routing), core=True)

    async def stop(self, reason: str, grace: float = 0.0) -> None:
        """Stop the backend, and whatever is under way. Its core ends after `grace` seconds, unless a Start wants it."""
        self._supervisor.rest()
        self._resuming.cancel()
        # Before others are aborted: who waited for them finds it stopped.
        if not self.status.stopped:
            self.status.enter(State.STOPPED, reason)
        if not self._closed:
            self.desired.forget()
        self._control.abort()
        await self._control.run(lambda settled: self._stop(grace, settled), core=True, final=True)
        await self.desired.recorded()

    async def exchange(
        self, core: str, use: Callable[[], None], back: Callable[[], None], due: Callable[[Generation], bool]
    ) -> bool:
        """Run what is accepted from other files: `use` has plans be made from them, `back` from those of before again.

        They are of a driver of this name.

        Nothing is changed before the core has read and accepted the configuration from them. Returns whether another
        run has taken over for it: not where none runs, or the one that does is not `due`. Raises why that cannot be,
        after `back`; what ran goes on then, or comes again.
        """
        took: list[bool] = []

        async def work(settled: Settled) -> None:
            accepted = self.accepted
            use()
            try:
                runs = accepted is not None and accepted.driver.name == core
                took.append(accepted is not None and runs and await self._exchange(accepted, due, settled))
            except BaseException:
                back()
                raise

        await self._control.run(work, core=True)
        await self.desired.recorded()
        return took[0]

    @property
    def on_probation(self) -> bool:
        """Whether the run that took over last may still go back to the one before it."""
        return self._supervisor.on_probation

    @property
    def returned(self) -> str:
        """Why the run that took over last did not hold, if it did not."""
        return self._supervisor.returned

    def inherit(self, recover: Callable[[Plan], Awaitable[Generation | None]]) -> None:
        """What is resumed may run already: the node's last program has left it."""
        self._replacement.recover = recover

    def disinherit(self) -> bool:
        """Nothing is resumed that runs already. Returns whether something still could have been."""
        left, self._replacement.recover = self._replacement.recover, None
        return left is not None

    async def plan_again(self, request: bytes, routing: Routing) -> Accepted:
        """What was accepted by an earlier program of the node, or what is accepted now where there is no `request`.

        Raises as `Driver.prepare` and `Accepted.with_routing`.
        """
        accepted = self.desired.accepted
        assert accepted is not None
        if not request:
            return accepted if accepted.routing == routing else await accepted.with_routing(routing)
        asked = Backend.FromString(request)
        meaning = await self._meaning(accepted.driver, asked.config)
        fingerprint = (accepted.driver.name, meaning, frozenset(asked.exclude_inbounds))
        return await self._prepare(accepted.driver, asked, fingerprint, routing)

    def inherit_draining(self, draining: Sequence[Drainer]) -> None:
        """An earlier program of the node has left these beside what is resumed, oldest first."""
        self._supervisor.inherit(draining)

    def unsteady(self, several: bool) -> str:
        """Why what runs could not be left to the node's next program now; empty if it could.

        `several`: it can go on with more than one run.
        """
        if self._supervisor.ending:
            return "a core is ending"
        if self._generations.draining and self.status.stopped:
            return "a core that was stopped waits for a Start that wants it"
        if self._generations.draining and not several:
            return "a core whose place another one took has connections, and the next version goes on with one core"
        if self.status.awaited:
            return f"the backend is {self.status.state}"
        return ""

    @property
    def standing(self) -> Standing | None:
        """What there is to be left."""
        return self._supervisor.standing

    async def leave(self, then: Callable[[], Awaitable[None]]) -> None:
        """Do `then` while no run comes or goes: what comes waits until it is done."""

        async def work(_: Settled) -> None:
            self._supervisor.pause()
            try:
                await self._settling.idle()
                await then()
            finally:
                self._supervisor.pause(False)

        await self._control.run(work, core=True)

    async def close(self) -> None:
        """The node ends: the core goes, and no other comes before the next node's, which resumes it."""
        self._closed = True
        try:
            await self.stop("the node is shutting down")
        finally:
            self._events.close()

    def current(self) -> Generation:
        """The core to ask, while a Start is under way the one that still serves.

        Raises as `Status.require`, and while one takes the place of another.
        """
        run = self._generations.current
        if run is not None and self.status.state is State.STARTING:
            return run
        self.status.require()
        if run is None:
            raise NotStarted("users are being applied")
        return run

    @property
    def accepted(self) -> Accepted | None:
        """What was accepted last, unless it was stopped."""
        return None if self.status.stopped else self.desired.accepted

    @property
    def happened(self) -> Happened:
        """What became of cores and connections since the node began."""
        return self._supervisor.happened

    @property
    def warnings(self) -> list[str]:
        """What an operator should know about the watch over the cores."""
        return self._supervisor.warnings

    # A Start

    async def _start(self, driver: Driver, request: Backend, settled: Settled, routing: Routing = UNCHANGED) -> None:
        if self._closed:
            raise ShuttingDown
        deadline = self._reactor.seconds() + START_TIMEOUT
        fingerprint = (driver.name, await self._meaning(driver, request.config), frozenset(request.exclude_inbounds))
        if self._means(fingerprint) and self.status.running and not self._generations.current:
            # A run is just taking the place of another one: it is the one that is asked for.
            await self._settling.idle()
        if self._serves(fingerprint):
            built = await self.desired.build(self.desired.accepted, request.users, self.desired.roster)
            # It may have died meanwhile.
            if run := self._serves(fingerprint):
                await self._take_back(run, request, *built, settled)
                return
        if self._means(fingerprint) and self.desired.accepted:
            routing = self.desired.accepted.routing
        preparing = self._in_time(self._prepare(driver, request, fingerprint, routing), deadline)
        wanted, users = await both(preparing, self.desired.read(request.users))
        checking = self._in_time(self._check(wanted.runs), deadline)
        (roster, refused), _ = await both(self._build(wanted, users), checking)
        self._tell(await self._replace(wanted, roster, settled, deadline) + refused, wanted.plan.warnings)

    async def _exchange(self, accepted: Accepted, due: Callable[[Generation], bool], settled: Settled) -> bool:
        deadline = self._reactor.seconds() + START_TIMEOUT
        request = Backend.FromString(accepted.request)
        preparing = self._prepare(accepted.driver, request, accepted.fingerprint, accepted.routing)
        wanted = await self._in_time(preparing, deadline)
        await self._in_time(self._check(wanted.runs), deadline)
        run = self._generations.current
        if run is not None and self.status.running and not due(run):
            return False
        roster, refused = await self._build(wanted, await self.desired.read(await self.desired.users()))
        self._tell(await self._replace(wanted, roster, settled, deadline) + refused, wanted.plan.warnings)
        return True

    async def _meaning(self, driver: Driver, config: str) -> str:
        """The fingerprint of a configuration; of a long one it is made in the reactor's pool."""
        if len(config) <= READ_INLINE:
            return driver.fingerprint(config)
        if len(config.encode()) > MAX_CONFIG:
            raise InvalidConfig(f"the configuration is longer than {MAX_CONFIG // 1024**2} MiB")
        return await deferToThreadPool(self._reactor, self._reactor.getThreadPool(), driver.fingerprint, config)

    def _serves(self, fingerprint: Fingerprint) -> Generation | None:
        """The run that means the same: the current one, or one that waits for a Start after a Stop."""
        run = self._waiting if self.status.stopped else self._generations.current
        if run is None or not run.alive or (self._upgrade and run.outdated):
            return None
        return run if self._means(fingerprint) else None

    def _means(self, fingerprint: Fingerprint) -> bool:
        return self.desired.accepted is not None and self.desired.accepted.fingerprint == fingerprint

    async def _take_back(
        self, run: Generation, request: Backend, roster: Roster, refused: list[Refusal], settled: Settled
    ) -> None:
        """The run is the one that is asked for: only its users follow."""
        self._cancel_grace()
        self._waiting = None
        self._supervisor.confirmed()
        if not self.status.running:
            self._generations.adopt(run)
            self.status.enter(State.RUNNING, "the same configuration was asked for again")
        # Before it is settled: who waits for that says the next word, and says it at once.
        self.desired.confirm(request, roster)
        settled()
        self._tell(await self._settling.settle_start() + refused)
        await self._supervisor.catch_up(run)

    async def _prepare(self, driver: Driver, request: Backend, fingerprint: Fingerprint, routing: Routing) -> Accepted:
        """Everything that can refuse a Start, before anything is destroyed."""
        version = await driver.version()
        plan = await driver.prepare(request.config, frozenset(request.exclude_inbounds))
        accepted = Accepted(without_users(request), request.keep_alive, driver, plan, version, fingerprint)
        return await accepted.with_routing(routing)

    async def _check(self, plan: Plan) -> None:
        if self._generations.serving or self.status.running:
            await plan.check({tag: {} for tag in plan.tags})

    async def _build(self, wanted: Accepted, users: Supplied) -> tuple[Roster, list[Refusal]]:
        """The roster; where accounts are what they were, as is usual, only new ones are built."""
        accepted = self.desired.accepted
        alike = accepted is not None and wanted.plan.alike(accepted.plan)
        return await self.desired.build(wanted, users, self.desired.roster if alike else None)

    async def _in_time(self, work: Coroutine[Any, Any, T], deadline: float) -> T:
        def late(_: object, __: float) -> Failure:
            return Failure(CoreFailed(f"the core did not read the configuration within {START_TIMEOUT:g} s"))

        left = max(0.0, deadline - self._reactor.seconds())
        return await ensureDeferred(work).addTimeout(left, self._reactor, late)

    async def _replace(self, wanted: Accepted, roster: Roster, settled: Settled, deadline: float) -> list[Refusal]:
        """End what runs and run this; if it cannot be run, what ran before. Returns who the core refused."""
        before = self.status.state, self.status.reason
        self._supervisor.forgive()
        self._cancel_grace()
        # Before the roster changes: nothing of it is for the core that ends.
        self.status.enter(State.STARTING)
        # What was stopped does not come back.
        self.desired.hold(wanted, roster, restorable=before[0] is not State.STOPPED)
        settled()
        try:
            await self._supervisor.run(deadline)
        except Exception as error:
            self.desired.give_up()
            if self.status.stopped:
                raise  # a Stop ended it; after any other error something has to run
            reason = as_told(error)
            if before[0] in (State.RUNNING, State.RESTARTING):
                back = self._go_on(before[1]) if self._goes_on(before[0]) else self._put_back(reason)
                kind = InvalidConfig if isinstance(reason, InvalidConfig) else CoreFailed
                raise kind(f"{reason.text}; the backend before it {await back}") from error
            # What was stopped, and waited for this Start, ends now.
            await self._supervisor.end_all()
            self.status.enter(*self._after_failure(reason, *before))
            raise
        self._waiting = None
        self._resuming.cancel()
        self.desired.keep()
        return await self._settling.settle_start()

    def _after_failure(self, error: NodeError, state: State, reason: str) -> tuple[State, str]:
        """The state after a Start that failed where nothing ran before: a refused one changes nothing."""
        if isinstance(error, InvalidConfig):
            return state, reason
        again = "; what ran when the node ended is tried again" if self._resuming.pending else ""
        return State.FAILED, error.text + again

    def _goes_on(self, before: State) -> bool:
        """Whether the new core was to come up beside the one that serves, which nobody has to notice then."""
        return before is State.RUNNING and self._generations.current is not None

    async def _go_on(self, reason: str) -> str:
        """The old backend serves all the same. Returns what became of it, for the caller."""
        self.status.enter(State.RUNNING, reason)
        await self._settling.settle_start()
        return "goes on"

    async def _put_back(self, reason: NodeError) -> str:
        """The old core had ended: run the old backend again. Returns what became of it, for the caller."""
        self.status.enter(State.RESTARTING, reason.text)
        fault = await self._supervisor.run_again(BACK_TIMEOUT)
        return f"did not come up at once either: {fault.text}" if fault else "runs again"

    def _tell(self, refused: list[Refusal], warnings: Iterable[str] = ()) -> None:
        for warning in warnings:
            self._ring.event(warning)
        self.desired.refusals += len(refused)
        leave_out(self._ring, self._events, refused)

    # A Stop

    async def _stop(self, grace: float, settled: Settled) -> None:
        self._cancel_grace()
        self._waiting = self._generations.current or self._waiting
        if grace and self._waiting in self._generations.serving and self.desired.accepted is not None:
            self._generations.retire()
            self._grace = self._reactor.callLater(grace, self._grace_over)
            # Whom nobody took out yet because a Start or another run was to end this one.
            in_background(self._settling.settle_all(), "users were not removed")
        else:
            await self._end(settled)

    def _grace_over(self) -> None:
        """Nobody took the core back; a Start that is under way may still do so."""

        async def work(settled: Settled) -> None:
            if self.status.stopped and self._grace is None:
                await self._end(settled)

        self._cancel_grace()
        in_background(self._control.run(work, core=True, final=True), "the core was not stopped after its grace")

    def _cancel_grace(self) -> None:
        if self._grace is not None and self._grace.active():
            self._grace.cancel()
        self._grace = None

    async def _end(self, settled: Settled) -> None:
        self._waiting = None
        self.desired.clear()
        settled()
        await self._supervisor.end_all()

    # Resuming

    async def _resume(self, driver: Driver, request: Backend, resumed: Callable[[], None], routing: Routing) -> None:
        """Whatever changes users waits until it is known whether this runs.

        Taken in before, it would be forgotten with a try that fails, and the next one would bring back who was removed.
        """
        if self.desired.accepted is not None or self._closed:
            return  # a controller was faster, or the node ends
        self.status.enter(State.STARTING, "it ran when the node ended")
        try:
            await self._start(driver, request, _not_yet, routing)
        except Exception as error:
            if self.status.stopped:
                raise  # a Stop ended it
            reason = as_told(error)
            again = not isinstance(reason, InvalidConfig)
            self.status.enter(State.FAILED, f"not resumed: {reason.text}" + ("; this is tried again" if again else ""))
            if again:
                later = partial(self.resume, driver, request, resumed, routing)
                self._resuming.later(lambda: in_background(later(), "it was not resumed"))
        else:
            resumed()


def _not_yet() -> None:
    """Its users are settled when it has ended."""
