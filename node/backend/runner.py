"""Runs the one backend: Starts, Stops, and resuming what ran when the node ended."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from functools import partial
from typing import Any, TypeVar

from twisted.internet.defer import ensureDeferred
from twisted.internet.interfaces import IDelayedCall
from twisted.internet.threads import deferToThreadPool
from twisted.python.failure import Failure

from node.backend.ahead import Ahead
from node.backend.backoff import Backoff
from node.backend.control import Control, Settled
from node.backend.desired import Accepted, Desired, Fingerprint, without_users
from node.backend.drain import Drain
from node.backend.faults import as_node_error, in_background, leave_out
from node.backend.listing import Listing
from node.backend.members import Members
from node.backend.options import BackendOptions
from node.backend.patience import answered
from node.backend.replace import Replacement
from node.backend.roster import Roster
from node.backend.routing import Router
from node.backend.snapshot import DrainingRun, Snapshot
from node.backend.state import State, Status
from node.backend.supervisor import START_TIMEOUT, Happened, Supervisor
from node.backend.supplied import Supplied
from node.backend.wind_down import DRAINED, WindDown
from node.base.errors import CoreFailed, InvalidConfig, NodeError, NotStarted, ShuttingDown
from node.base.logs import Logger, LogRing
from node.base.reactor import PooledReactor
from node.base.waiting import both
from node.contract.accounts import Refusal
from node.contract.driver import Driver, Generation, Plan
from node.contract.generations import Generations
from node.contract.routing import Routing
from node.events.journal import Journal
from node.events.kinds import Kind
from node.events.users import UserEvents
from protos.service_pb2 import Backend

T = TypeVar("T")

# Bytes that a configuration may have, and characters above which it is parsed in the reactor's thread pool.
MAX_CONFIG = 8 * 1024**2
READ_INLINE = 64 * 1024
# Seconds that the core of a Start has at least if a later Start was tried first and failed.
REST_OF_START = 3.0
# Seconds that the previous backend has to come back after a failed Start, while its caller waits.
BACK_TIMEOUT = 1.0
UNCHANGED = Routing()


class Runner:
    """Runs at most one backend. `users` changes its users, `listing` lists them, `router` changes its routing."""

    log = Logger()

    def __init__(
        self,
        reactor: PooledReactor,
        ring: LogRing,
        desired: Desired,
        generations: Generations,
        read: Callable[[Generation], Awaitable[bool]],
        options: BackendOptions,
        journal: Journal,
    ) -> None:
        """`read` reads and books the counters of a run."""
        self._reactor = reactor
        self._ring = ring
        self.generations = generations
        self._upgrade = options.upgrade
        self._control = Control()
        self.journal = journal
        self._events = UserEvents(self.journal, reactor)
        self.status = Status(ring, self.journal)
        self.desired = desired
        wind_down = WindDown(reactor, generations, read, self.journal)
        drain = Drain(reactor, generations, options, partial(wind_down.end, patience=DRAINED), self.journal)
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
        self.users = Members(
            reactor, self.status, self._control, self.desired, generations, self._settling, self._events
        )
        self.listing = Listing(reactor, self.status, self.desired, generations, self._settling)
        self.router = Router(self.status, self._control, self.desired, generations, self._settling)
        self._resuming = Backoff(reactor)
        self._grace: IDelayedCall | None = None
        # The run that a Stop left for the Start that follows it.
        self._waiting: Generation | None = None
        self._closed = False

    async def start(self, driver: Driver, request: Backend) -> None:
        """Run a backend. If an equal one runs already it goes on, with these users; no connection ends."""

        async def work(settled: Settled) -> None:
            await self._start(driver, request, settled)
            self._settling.require_out()

        try:
            await answered(self._reactor, self._control.run(work, request, core=True, replaces=True), "the Start")
        except InvalidConfig as error:
            self.journal.tell(Kind.CONFIG_REFUSED, error.text, reason=error.text)
            raise
        await self.desired.recorded()

    async def prepare(
        self, driver: Driver, request: Backend, users: Sequence[bytes], routing: Routing = UNCHANGED
    ) -> None:
        """Prepare the resume of a saved backend while another node still runs it. Raises as `Driver.prepare`."""
        fingerprint = (driver.name, await self._meaning(driver, request.config), frozenset(request.exclude_inbounds))
        accepted = await self._prepare(driver, request, fingerprint, routing)
        await self.desired.build_ahead(accepted.plan, users)

    async def resume(
        self,
        driver: Driver,
        request: Backend,
        users: Sequence[bytes],
        resumed: Callable[[], None],
        routing: Routing = UNCHANGED,
    ) -> None:
        """Run what ran when the node ended. If it does not start it is retried as after a crash.

        `users`: its saved users; `routing`: its routing changes. `resumed` is called when it runs, now or later; not if
        a controller was faster.
        """
        await self._control.run(lambda _: self._resume(driver, request, users, resumed, routing), core=True)

    async def stop(self, reason: str, grace: float = 0.0) -> None:
        """Stop the backend and abort all operations. Its core ends after `grace` seconds, unless a Start wants it.

        For controllers the backend is stopped at once; the caller waits for the core's end, but not longer than for any
        other call.
        """
        try:
            await answered(self._reactor, self._stop_now(reason, grace), "stopping the core")
        except CoreFailed as error:
            self.log.warn("{reason}", reason=error.text)

    async def _stop_now(self, reason: str, grace: float = 0.0) -> None:
        self._supervisor.rest()
        self._resuming.cancel()
        # Before the others are aborted: their callers must find the backend stopped.
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
        """Run the accepted backend with other files of this core: `use` switches plans to them, `back` undoes that.

        The core first parses the configuration with the new files; until it accepts it nothing changes. Returns whether
        a new run has taken over: not if none runs, or the current one is not `due`. On failure calls `back` and raises;
        what ran goes on then, or is restarted.
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
        """Whether the current run is on probation: the node may go back to the previous one."""
        return self._supervisor.on_probation

    @property
    def returned(self) -> str:
        """Why the newest run failed on probation, if it did."""
        return self._supervisor.returned

    def inherit(self, recover: Callable[[Plan], Awaitable[Generation | None]]) -> None:
        """Have the resume recover the run that the previous node process handed over."""
        self._replacement.recover = recover

    def disinherit(self) -> bool:
        """Recover no handed-over run any more. Returns whether one was still to be recovered."""
        left, self._replacement.recover = self._replacement.recover, None
        return left is not None

    async def plan_again(self, request: bytes, routing: Routing) -> Accepted:
        """Prepare the backend of a handed-over run again; without a `request` it is the one accepted now.

        Raises as `Driver.prepare` and `Accepted.with_routing`.
        """
        accepted = self.desired.accepted
        assert accepted is not None
        if not request:
            return accepted if accepted.routing == routing else await accepted.with_routing(routing)
        asked = Backend.FromString(request)
        meaning = await self._meaning(accepted.driver, asked.config)
        fingerprint = (accepted.driver.name, meaning, frozenset(asked.exclude_inbounds))
        if fingerprint == accepted.fingerprint:
            return accepted if accepted.routing == routing else await accepted.with_routing(routing)
        return await self._prepare(accepted.driver, asked, fingerprint, routing)

    def inherit_draining(self, draining: Sequence[DrainingRun]) -> None:
        """Take over draining runs, oldest first, from the previous node process."""
        self._supervisor.inherit(draining)

    def unsteady(self) -> str:
        """Why the runs cannot be handed over to the next node process now; empty if they can."""
        if self._supervisor.ending:
            return "a core is ending"
        if self.generations.draining and self.status.stopped:
            return "a stopped core waits for its Start (STOP_GRACE)"
        if self.status.awaited:
            return f"the backend is {self.status.state}"
        return ""

    @property
    def snapshot(self) -> Snapshot | None:
        """A snapshot of the runs to hand over; None if none serves."""
        return self._supervisor.snapshot

    async def leave(self, then: Callable[[], Awaitable[None]]) -> None:
        """Do `then` while no run starts or ends: other operations wait until it is done."""

        async def work(_: Settled) -> None:
            self._supervisor.pause()
            try:
                await self._settling.idle()
                await then()
            finally:
                self._supervisor.pause(False)

        await self._control.run(work, core=True)

    async def close(self) -> None:
        """Stop the core for the end of the node. The saved backend stays: the next node resumes it."""
        self._closed = True
        try:
            await self._stop_now("the node is shutting down")
        finally:
            self._events.close()

    def current(self) -> Generation:
        """The run to query; during a Start the one that still serves.

        Raises as `Status.require`, and `NotStarted` while the core is restarted to apply users.
        """
        run = self.generations.current
        if run is not None and self.status.state is State.STARTING:
            return run
        self.status.require()
        if run is None:
            raise NotStarted("the core is being restarted to apply users")
        return run

    @property
    def accepted(self) -> Accepted | None:
        """The backend accepted last; None if it was stopped."""
        return None if self.status.stopped else self.desired.accepted

    @property
    def happened(self) -> Happened:
        """Counts of lost cores and cut connections since the node began."""
        return self._supervisor.happened

    @property
    def warnings(self) -> list[str]:
        """Warnings of the configuration, of the supervisor, and of the current run."""
        plan = self.accepted.plan.warnings if self.accepted else ()
        run = self.generations.current.warnings if self.accepted and self.generations.current else ()
        return [*plan, *self._supervisor.warnings, *run]

    # A Start

    async def _start(
        self,
        driver: Driver,
        request: Backend,
        settled: Settled,
        routing: Routing = UNCHANGED,
        saved: Sequence[bytes] | None = None,
    ) -> None:
        """Run this backend; `saved` are its users if they are not in the request."""
        if self._closed:
            raise ShuttingDown
        deadline = self._reactor.seconds() + START_TIMEOUT
        fingerprint = (driver.name, await self._meaning(driver, request.config), frozenset(request.exclude_inbounds))
        if self._means(fingerprint) and self.status.running and not self.generations.current:
            # A new run of this very backend is starting for users: wait for it.
            await self._settling.idle()
        if self._serves(fingerprint):
            built = await self.desired.build(self.desired.accepted, request.users, self.desired.roster)
            # Checked again: the run may have died meanwhile.
            if run := self._serves(fingerprint):
                await self._take_back(run, request, *built, settled)
                return
        if self._means(fingerprint) and self.desired.accepted:
            routing = self.desired.accepted.routing
        preparing = self._in_time(self._prepare(driver, request, fingerprint, routing), deadline)
        reading = self.desired.read(request.users) if saved is None else self.desired.read_saved(saved)
        wanted, users = await both(preparing, reading)
        checking = self._in_time(self._check(wanted.runs), deadline)
        (roster, refused), _ = await both(self._build(wanted, users), checking)
        if await self._control.overtaken():
            return
        # The later Start that was tried first does not use up all the time of this one.
        deadline = max(deadline, self._reactor.seconds() + REST_OF_START)
        self._report(await self._replace(wanted, roster, settled, deadline) + refused, wanted.plan.warnings)

    async def _exchange(self, accepted: Accepted, due: Callable[[Generation], bool], settled: Settled) -> bool:
        deadline = self._reactor.seconds() + START_TIMEOUT
        request = Backend.FromString(accepted.request)
        preparing = self._prepare(accepted.driver, request, accepted.fingerprint, accepted.routing)
        wanted = await self._in_time(preparing, deadline)
        await self._in_time(self._check(wanted.runs), deadline)
        run = self.generations.current
        if run is not None and self.status.running and not due(run):
            return False
        roster, refused = await self._build(wanted, await self.desired.read(await self.desired.users()))
        self._report(await self._replace(wanted, roster, settled, deadline) + refused, wanted.plan.warnings)
        return True

    async def _meaning(self, driver: Driver, config: str) -> str:
        """The fingerprint of a configuration; a long one is parsed in the reactor's thread pool."""
        if len(config) <= READ_INLINE:
            return driver.fingerprint(config)
        if len(config.encode()) > MAX_CONFIG:
            raise InvalidConfig(f"the configuration is longer than {MAX_CONFIG // 1024**2} MiB")
        return await deferToThreadPool(self._reactor, self._reactor.getThreadPool(), driver.fingerprint, config)

    def _serves(self, fingerprint: Fingerprint) -> Generation | None:
        """The run of an equal backend: the current one, or one that waits for a Start after a Stop; else None."""
        run = self._waiting if self.status.stopped else self.generations.current
        if run is None or not run.alive or (self._upgrade and run.outdated):
            return None
        return run if self._means(fingerprint) else None

    def _means(self, fingerprint: Fingerprint) -> bool:
        return self.desired.accepted is not None and self.desired.accepted.fingerprint == fingerprint

    async def _take_back(
        self, run: Generation, request: Backend, roster: Roster, refused: list[Refusal], settled: Settled
    ) -> None:
        """Go on with a run of the requested backend: only apply the users."""
        self._cancel_grace()
        self._waiting = None
        self._supervisor.confirmed()
        if not self.status.running:
            self.generations.adopt(run)
            self.status.enter(State.RUNNING, "the same configuration was asked for again")
        # Before `settled`: the next operation begins at once then.
        self.desired.confirm(request, roster)
        settled()
        self._report(await self._settling.settle_start(wait=True) + refused)
        await self._supervisor.catch_up(run)

    async def _prepare(self, driver: Driver, request: Backend, fingerprint: Fingerprint, routing: Routing) -> Accepted:
        """Have the core parse the configuration: the checks that can refuse a Start before anything is changed."""
        version = await driver.version()
        plan = await driver.prepare(request.config, frozenset(request.exclude_inbounds))
        accepted = Accepted(without_users(request), request.keep_alive, driver, plan, version, fingerprint)
        return await accepted.with_routing(routing)

    async def _check(self, plan: Plan) -> None:
        if self.generations.serving or self.status.running:
            await plan.check({tag: {} for tag in plan.tags})

    async def _build(self, wanted: Accepted, users: Supplied | Ahead) -> tuple[Roster, list[Refusal]]:
        """Build the roster; if the accounts are as before, which is usual, only new ones are built."""
        accepted = self.desired.accepted
        alike = accepted is not None and wanted.plan.alike(accepted.plan)
        return await self.desired.build(wanted, users, self.desired.roster if alike else None)

    async def _in_time(self, work: Coroutine[Any, Any, T], deadline: float) -> T:
        def late(_: object, __: float) -> Failure:
            return Failure(CoreFailed(f"the core did not read the configuration within {START_TIMEOUT:g} s"))

        left = max(0.0, deadline - self._reactor.seconds())
        return await ensureDeferred(work).addTimeout(left, self._reactor, late)

    async def _replace(self, wanted: Accepted, roster: Roster, settled: Settled, deadline: float) -> list[Refusal]:
        """Replace the running backend by this one; if it does not start, go back. Returns the core's refusals."""
        before = self.status.state, self.status.reason
        self._supervisor.forgive()
        self._cancel_grace()
        # Before the roster changes: the new users are not for the ending core.
        self.status.enter(State.STARTING)
        # A stopped backend does not come back.
        self.desired.hold(wanted, roster, restorable=before[0] is not State.STOPPED)
        settled()
        try:
            await self._supervisor.run(deadline)
        except Exception as error:
            self.desired.give_up()
            if self.status.stopped:
                raise  # a Stop aborted it; after any other error a backend has to run
            reason = as_node_error(error)
            if before[0] in (State.RUNNING, State.RESTARTING):
                back = (
                    self._keep_previous(before[1])
                    if self._previous_serves(before[0])
                    else self._restart_previous(reason)
                )
                kind = InvalidConfig if isinstance(reason, InvalidConfig) else CoreFailed
                raise kind(f"{reason.text}; the previous backend {await back}") from error
            # A stopped core that waited for a Start ends now.
            await self._supervisor.end_all()
            self.status.enter(*self._after_failure(reason, *before))
            raise
        self._waiting = None
        self._resuming.cancel()
        self.desired.keep()
        return await self._settling.settle_start()

    def _after_failure(self, error: NodeError, state: State, reason: str) -> tuple[State, str]:
        """The state after a failed Start if nothing ran before: an invalid configuration changes nothing."""
        if isinstance(error, InvalidConfig):
            return state, reason
        again = "; the node tries again to resume what ran when it ended" if self._resuming.pending else ""
        return State.FAILED, error.text + again

    def _previous_serves(self, before: State) -> bool:
        """Whether the previous core still serves, as the new one was to start beside it."""
        return before is State.RUNNING and self.generations.current is not None

    async def _keep_previous(self, reason: str) -> str:
        """Keep the previous backend, which still serves. Returns its fate for the error text."""
        self.status.enter(State.RUNNING, reason)
        await self._settling.settle_start()
        return "goes on"

    async def _restart_previous(self, reason: NodeError) -> str:
        """Restart the previous backend, whose core has ended. Returns its fate for the error text."""
        self.status.enter(State.RESTARTING, reason.text)
        fault = await self._supervisor.run_again(BACK_TIMEOUT)
        return f"did not start at once either: {fault.text}" if fault else "runs again"

    def _report(self, refused: list[Refusal], warnings: Iterable[str] = ()) -> None:
        for warning in warnings:
            self._ring.event(warning)
        self.desired.refusals += len(refused)
        leave_out(self._ring, self._events, refused)

    # A Stop

    async def _stop(self, grace: float, settled: Settled) -> None:
        self._cancel_grace()
        self._waiting = self.generations.current or self._waiting
        if grace and self._waiting in self.generations.serving and self.desired.accepted is not None:
            self.generations.retire()
            self._grace = self._reactor.callLater(grace, self._grace_over)
            # Removals that were left undone because a Start or a new run was to end this one.
            in_background(self._settling.settle_all(), "users could not be removed from the core")
        else:
            await self._end(settled)

    def _grace_over(self) -> None:
        """End the core after STOP_GRACE, unless a Start that is under way still takes it back."""

        async def work(settled: Settled) -> None:
            if self.status.stopped and self._grace is None:
                await self._end(settled)

        self._cancel_grace()
        in_background(self._control.run(work, core=True, final=True), "the core could not be stopped after STOP_GRACE")

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

    async def _resume(
        self,
        driver: Driver,
        request: Backend,
        users: Sequence[bytes],
        resumed: Callable[[], None],
        routing: Routing,
    ) -> None:
        """Start the saved backend; changes of users wait for the outcome, so `settled` is not called before the end.

        Applied earlier, a change would be lost with a failed try, and the next try would bring back removed users.
        """
        if self.desired.accepted is not None or self._closed:
            return  # a controller was faster, or the node ends
        self.status.enter(State.STARTING, "resuming what ran when the node ended")
        try:
            await self._start(driver, request, _never_settled, routing, users)
        except Exception as error:
            if self.status.stopped:
                raise  # a Stop aborted it
            reason = as_node_error(error)
            again = not isinstance(reason, InvalidConfig)
            self.status.enter(State.FAILED, f"not resumed: {reason.text}" + ("; the node tries again" if again else ""))
            if again:
                later = partial(self.resume, driver, request, users, resumed, routing)
                self._resuming.later(lambda: in_background(later(), "the backend could not be resumed"))
        else:
            resumed()


def _never_settled() -> None:
    """Do nothing: the users are final only when the resume has ended."""
