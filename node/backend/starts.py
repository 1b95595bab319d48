"""Performs Starts and Stops: a Start replaces what runs, or goes on with an equal backend that a Stop may have left."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any, TypeVar

from twisted.internet.defer import ensureDeferred
from twisted.internet.interfaces import IReactorTime
from twisted.python.failure import Failure

from node.backend.backoff import Backoff
from node.backend.context import Context, Worker
from node.backend.control import Settled
from node.backend.desired import Accepted, Fingerprint, without_users
from node.backend.faults import as_node_error, in_background, leave_out
from node.backend.roster import Ahead, Roster
from node.backend.state import State
from node.backend.supervisor import START_TIMEOUT, Supervisor
from node.backend.supplied import Supplied
from node.base.alarm import Alarm
from node.base.errors import CoreFailed, InvalidConfig, NodeError
from node.base.pool import in_pool
from node.base.reactor import PooledReactor
from node.base.waiting import both
from node.contract.accounts import Refusal
from node.contract.driver import Driver, Generation, Plan
from node.contract.routing import Routing
from protos.service_pb2 import Backend

T = TypeVar("T")

# Bytes that a configuration may have, and characters above which it is parsed in the reactor's thread pool.
MAX_CONFIG = 8 * 1024**2
READ_INLINE = 64 * 1024
# Seconds that the core of a Start has at least if a later Start was tried first and failed.
REST_OF_START = 3.0
# Seconds that the previous backend has to come back after a failed Start, while its caller waits.
BACK_TIMEOUT = 1.0


class Starts(Worker):
    """Performs Starts and Stops, one at a time. `resuming`: the retries of a resume, which a Start makes needless."""

    def __init__(self, context: Context, supervisor: Supervisor, resuming: Backoff) -> None:
        super().__init__(context)
        self._supervisor = supervisor
        self._settling = supervisor.settling
        self._resuming = resuming
        # The run that the last Stop left for the Start that follows it, for STOP_GRACE.
        self._waiting: Generation | None = None
        self._grace = Alarm(self._reactor, self._grace_over)

    async def start(
        self,
        driver: Driver,
        request: Backend,
        settled: Settled,
        routing: Routing,
        saved: Sequence[bytes] | None = None,
    ) -> None:
        """Run this backend. `routing`: its routing changes, if another backend runs.

        `saved` are its users if they are not in the request.
        """
        deadline = self._reactor.seconds() + START_TIMEOUT
        fingerprint = await fingerprint_of(self._reactor, driver, request)
        if self._means(fingerprint) and self._status.running and not self._generations.current:
            # A new run of this very backend is starting for users: wait for it.
            await self._settling.idle()
        if self._serves(fingerprint):
            built = await self._desired.build(self._desired.accepted, request.users, self._desired.roster)
            # Checked again: the run may have died meanwhile.
            if run := self._serves(fingerprint):
                await self._take_back(run, request, *built, settled)
                return
        if self._means(fingerprint) and self._desired.accepted:
            routing = self._desired.accepted.routing
        preparing = _in_time(self._reactor, prepare(driver, request, fingerprint, routing), deadline)
        reading = self._desired.read(request.users) if saved is None else self._desired.read_saved(saved)
        wanted, users = await both(preparing, reading)
        checking = _in_time(self._reactor, self._check(wanted.runs), deadline)
        built, _ = await both(self._build(wanted, users), checking)
        if await self._control.overtaken():
            return
        # The later Start that was tried first does not use up all the time of this one.
        await self._replace(wanted, *built, settled, max(deadline, self._reactor.seconds() + REST_OF_START))

    async def exchange(self, accepted: Accepted, due: Callable[[Generation], bool], settled: Settled) -> bool:
        """Run the accepted backend again as it is prepared now. Returns False if the current run is not `due`."""
        deadline = self._reactor.seconds() + START_TIMEOUT
        request = Backend.FromString(accepted.request)
        preparing = prepare(accepted.driver, request, accepted.fingerprint, accepted.routing)
        wanted = await _in_time(self._reactor, preparing, deadline)
        await _in_time(self._reactor, self._check(wanted.runs), deadline)
        run = self._generations.current
        if run is not None and self._status.running and not due(run):
            return False
        built = await self._build(wanted, await self._desired.read(await self._desired.users()))
        await self._replace(wanted, *built, settled, deadline)
        return True

    def _serves(self, fingerprint: Fingerprint) -> Generation | None:
        """The run of an equal backend: the current one, or one that waits for a Start after a Stop; else None."""
        run = self._waiting if self._status.stopped else self._generations.current
        if run is None or not run.alive or (self._options.upgrade and run.outdated):
            return None
        return run if self._means(fingerprint) else None

    def _means(self, fingerprint: Fingerprint) -> bool:
        return self._desired.accepted is not None and self._desired.accepted.fingerprint == fingerprint

    async def _take_back(
        self, run: Generation, request: Backend, roster: Roster, refused: list[Refusal], settled: Settled
    ) -> None:
        """Go on with a run of the requested backend: only apply the users."""
        self._grace.cancel()
        self._waiting = None
        self._supervisor.returned = ""
        if not self._status.running:
            self._generations.adopt(run)
            self._status.enter(State.RUNNING, "the same configuration was asked for again")
        # Before `settled`: the next operation begins at once then.
        self._desired.confirm(request, roster)
        settled()
        self._report(await self._settling.settle_start(wait=True) + refused)
        await self._supervisor.catch_up(run)

    async def _check(self, plan: Plan) -> None:
        if self._generations.serving or self._status.running:
            await plan.check({tag: {} for tag in plan.tags})

    async def _build(self, wanted: Accepted, users: Supplied | Ahead) -> tuple[Roster, list[Refusal]]:
        """Build the roster; if the accounts are as before, which is usual, only new ones are built."""
        accepted = self._desired.accepted
        alike = accepted is not None and wanted.plan.alike(accepted.plan)
        return await self._desired.build(wanted, users, self._desired.roster if alike else None)

    async def _replace(
        self, wanted: Accepted, roster: Roster, refused: list[Refusal], settled: Settled, deadline: float
    ) -> None:
        """Replace the running backend by this one; if it does not start, go back."""
        state, why = self._status.state, self._status.reason
        self._supervisor.forgive()
        self._grace.cancel()
        # Before the roster changes: the new users are not for the ending core.
        self._status.enter(State.STARTING)
        # A stopped backend does not come back.
        self._desired.hold(wanted, roster, restorable=state is not State.STOPPED)
        settled()
        try:
            await self._supervisor.run(deadline)
        except Exception as error:
            self._desired.give_up()
            if self._status.stopped:
                raise  # a Stop aborted it; after any other error a backend has to run
            reason = as_node_error(error)
            if state in (State.RUNNING, State.RESTARTING):
                fate = await self._go_back(reason, state, why)
                kind = InvalidConfig if isinstance(reason, InvalidConfig) else CoreFailed
                raise kind(f"{reason.text}; the previous backend {fate}") from error
            # A stopped core that waited for a Start ends now.
            await self._supervisor.end_all()
            self._status.enter(*self._after_failure(reason, state, why))
            raise
        self._waiting = None
        self._resuming.cancel()
        self._desired.keep()
        self._report(await self._settling.settle_start() + refused, wanted.plan.warnings)

    def _after_failure(self, error: NodeError, state: State, why: str) -> tuple[State, str]:
        """The state after a failed Start if nothing ran before: an invalid configuration changes nothing."""
        if isinstance(error, InvalidConfig):
            return state, why
        again = "; the node tries again to resume what ran when it ended" if self._resuming.pending else ""
        return State.FAILED, error.text + again

    async def _go_back(self, reason: NodeError, state: State, why: str) -> str:
        """Keep the previous backend if it still serves, else restart it. Returns its fate for the error text."""
        if state is State.RUNNING and self._generations.current is not None:
            # The new core was to start beside it.
            self._status.enter(State.RUNNING, why)
            await self._settling.settle_start()
            return "goes on"
        self._status.enter(State.RESTARTING, reason.text)
        fault = await self._supervisor.run_again(BACK_TIMEOUT)
        return f"did not start at once either: {fault.text}" if fault else "runs again"

    def _report(self, refused: list[Refusal], warnings: Iterable[str] = ()) -> None:
        for warning in warnings:
            self._ring.event(warning)
        self._desired.refusals += len(refused)
        leave_out(self._ring, self._events, refused)

    # Stops

    async def stop(self, grace: float, settled: Settled) -> None:
        """Let the core wait for a Start for `grace` seconds, or end it."""
        self._grace.cancel()
        self._waiting = self._generations.current or self._waiting
        if grace and self._waiting in self._generations.serving and self._desired.accepted is not None:
            self._generations.retire()
            self._grace.set(grace)
            # Removals that were left undone because a Start or a new run was to end this one.
            in_background(self._settling.settle_all(), "users could not be removed from the core")
        else:
            await self._end(settled)

    def _grace_over(self) -> None:
        """End the core after STOP_GRACE, unless a Start that is under way still takes it back."""

        async def work(settled: Settled) -> None:
            if self._status.stopped and not self._grace.pending:
                await self._end(settled)

        in_background(self._control.run(work, core=True, final=True), "the core could not be stopped after STOP_GRACE")

    async def _end(self, settled: Settled) -> None:
        self._waiting = None
        self._desired.clear()
        settled()
        await self._supervisor.end_all()


async def fingerprint_of(reactor: PooledReactor, driver: Driver, request: Backend) -> Fingerprint:
    """What identifies the meaning of a backend. Raises `InvalidConfig` for a configuration that is too long."""
    config = request.config
    if len(config) <= READ_INLINE:
        meaning = driver.fingerprint(config)
    elif len(config.encode()) > MAX_CONFIG:
        raise InvalidConfig(f"the configuration is longer than {MAX_CONFIG // 1024**2} MiB")
    else:
        meaning = await in_pool(reactor, driver.fingerprint, config)
    return driver.name, meaning, frozenset(request.exclude_inbounds)


async def prepare(driver: Driver, request: Backend, fingerprint: Fingerprint, routing: Routing) -> Accepted:
    """Have the core parse a backend's configuration. Raises as `Driver.prepare` and `Accepted.with_routing`."""
    version = await driver.version()
    plan = await driver.prepare(request.config, frozenset(request.exclude_inbounds))
    accepted = Accepted(without_users(request), request.keep_alive, driver, plan, version, fingerprint)
    return await accepted.with_routing(routing)


async def _in_time(reactor: IReactorTime, work: Coroutine[Any, Any, T], deadline: float) -> T:
    """Wait for work on a configuration. Raises `CoreFailed` if it is not done by the deadline."""

    def late(_: object, __: float) -> Failure:
        return Failure(CoreFailed(f"the core did not read the configuration within {START_TIMEOUT:g} s"))

    return await ensureDeferred(work).addTimeout(max(0.0, deadline - reactor.seconds()), reactor, late)
