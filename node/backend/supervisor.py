"""Supervises the core: runs the accepted backend, restarts a core that ended or hangs, goes back to a previous one."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from node.backend.backoff import Backoff
from node.backend.context import Context, Worker
from node.backend.control import Settled
from node.backend.desired import Accepted
from node.backend.drain import Drain
from node.backend.faults import as_node_error, in_background, leave_out, pid_of
from node.backend.health import Watch
from node.backend.keeper import Keepers
from node.backend.pending import Pending
from node.backend.probation import Probation, Takeover
from node.backend.renewal import Renewal
from node.backend.replace import Replacement
from node.backend.settling import Settling
from node.backend.state import State
from node.backend.wind_down import WindDown
from node.base.errors import CoreFailed, InvalidConfig, NodeError
from node.base.logs import Logger
from node.contract.abilities import NotShared, Routes, Shares
from node.contract.driver import Exit, Generation
from node.contract.generations import Follower
from node.events.kinds import Kind

# Seconds that a core may take to start; less than the caller of a Start waits.
START_TIMEOUT = 7.0
# Why a wanted core was lost, besides the kinds of `Exit`; the second: a restart failed.
HUNG, NOT_STARTED = "hung", "not_started"
REASONS = ("exit", "signal", HUNG, NOT_STARTED)
# Exits that do not count against the core's users: it was killed, mostly for lack of memory, or asked to end.
KILLED = (-signal.SIGKILL, -signal.SIGTERM)


@dataclass(frozen=True)
class DrainingRun:
    """A draining run, the backend accepted for it, and when it began to drain.

    `since` is None if it drains from now on. `way_back`: seconds for which the node may still go back from the current
    run to it; None: it may not.
    """

    run: Generation
    accepted: Accepted
    since: float | None
    way_back: float | None = None


@dataclass(frozen=True)
class Snapshot:
    """The runs to hand over: the current one, None if it has ended, and the draining ones, oldest first.

    Those that take over are last. `accepted`: the backend of the current run, or the wanted one.
    """

    current: Generation | None
    accepted: Accepted
    draining: Sequence[DrainingRun]


@dataclass(frozen=True)
class Happened:
    """Counts since the node began, for metrics.

    `losses`: wanted cores that were lost, by reason. `cut`: connections of removed users that were cut. `dropped`:
    connections ended early with a draining core. `draining`: connections of draining cores now.
    """

    losses: Mapping[str, int]
    cut: int
    dropped: int
    draining: int


class Supervisor(Worker, Follower):
    """Supervises the runs. `settling` applies users to them."""

    log = Logger()

    def __init__(self, context: Context, wind_down: WindDown) -> None:
        super().__init__(context)
        self._wind_down = wind_down
        self._drain = Drain(context, wind_down)
        self.replacement = Replacement(context, wind_down, self._drain)
        self._backoff = Backoff(self._reactor)
        self._watch = Watch(self._reactor, self._hung, self._repair)
        self._probation = Probation(context, self._hung)
        self._keepers = Keepers(context, self._watch)
        renewal = Renewal(context, self.replacement, self._retry_later)
        self._pending = Pending(context, renewal, self._drain, self._keepers, self._adopt)
        self.settling = Settling(context, self._pending, self._keepers, wind_down)
        self._generations.follow(self)
        # Why the newest run failed on probation, if it did; empty when a controller wants what runs, or nothing.
        self.returned = ""
        self._losses = dict.fromkeys(REASONS, 0)
        self._hanging: set[Generation] = set()
        # The handed-over run that the node may go back to from the current one.
        self._way_back: DrainingRun | None = None
        # Connections of removed users that were cut by runs that are gone.
        self._cut = 0

    @property
    def warnings(self) -> list[str]:
        """Warnings about the runs: failed health checks, a failed new core, a restart that ended connections."""
        ended = [
            f"the last change restarted the core and ended all connections: {obstacle}"
            for obstacle in self.replacement.obstacles
        ]
        watched = [*self._watch.warnings, *self._drain.warnings]
        return [*filter(None, [self.returned]), *ended, *self.settling.warnings, *watched]

    @property
    def happened(self) -> Happened:
        cut = self._cut + sum(run.cut for run in self._generations.counting)
        return Happened(dict(self._losses), cut, self._drain.dropped, self._drain.connections)

    @property
    def on_probation(self) -> bool:
        """Whether the current run is on probation: the node may go back to the previous one."""
        return self._probation.under_way

    @property
    def ending(self) -> bool:
        """Whether a run is ending, or about to."""
        return bool(self._generations.ending) or self._drain.ending

    def pause(self, paused: bool = True) -> None:
        """Start and end no runs while they are being handed over; with False, go on."""
        self._drain.paused = paused
        self._pending.pause(paused)

    @property
    def snapshot(self) -> Snapshot | None:
        """A snapshot of the runs to hand over; None if none serves."""
        wanted, current = self._desired.accepted, self._keepers.of(self._generations.current)
        accepted = current.accepted if current else wanted
        if accepted is None or not self._generations.serving:
            return None
        if wanted is not None and accepted.means(wanted):
            # Its routing may have changed since; while another backend is tried, the run may be of the one before.
            accepted = wanted
        others = [self._keepers.of(run) for run in (*self._generations.draining, *self._generations.taking_over)]
        draining = [
            DrainingRun(each.run, each.accepted, self._drain.since(each.run), self._probation.left(each.run))
            for each in filter(None, others)
        ]
        return Snapshot(self._generations.current, accepted, draining)

    def inherit(self, draining: Sequence[DrainingRun]) -> None:
        """Take over draining runs, oldest first, from the previous node process."""
        for each in draining:
            self._keepers.expect(each.run, each.accepted)
        self._generations.inherit(each.run for each in draining)
        # One that was replaced when the node before was killed begins to drain now.
        self._drain.inherit({each.run: each.since for each in draining if each.since is not None})
        self._way_back = next((each for each in draining if each.way_back is not None), None)

    async def run(self, deadline: float) -> None:
        """Run the accepted backend in place of the runs before. Raises what `Replacement.bring` raises."""
        assert self._desired.accepted is not None
        await self._pending.cancel()
        run = await self.replacement.bring(self._desired.accepted.runs, lambda: self._desired.target, deadline)
        self._status.enter(State.RUNNING)
        self._adopt(run)

    async def run_again(self, seconds: float) -> NodeError | None:
        """Run the accepted backend again. If it does not start, schedule a retry and return the reason."""
        try:
            await self.run(self._reactor.seconds() + seconds)
        except Exception as error:
            if self._status.stopped:
                raise  # a Stop aborted it
            reason = as_node_error(error)
            self._losses[NOT_STARTED] += 1
            self._retry_later(reason)
            return reason
        await self.settling.settle_start()
        return None

    async def catch_up(self, run: Generation) -> None:
        """Apply the wanted routing to a run: it may have changed while the run started, or did not answer."""
        accepted = self._desired.accepted
        if isinstance(run, Routes) and accepted is not None:
            try:
                await run.reroute(accepted.runs)
            except NodeError as error:
                self.log.error(
                    "the core's routing could not be updated: {reason}; old rules may hold until the next core",
                    reason=error.text,
                )

    async def end_all(self) -> None:
        """End every run, and restart none."""
        await self._pending.cancel()
        # Not before that: a starting run may have taken over until now.
        self._probation.end()
        self._drain.stop()
        self.returned = ""
        self.replacement.obstacles = []
        await self.replacement.end_all()
        self.settling.forget()

    def forgive(self) -> None:
        """Reset the backoff: a controller wants another backend."""
        self._backoff.renew()

    def rest(self) -> None:
        """Cancel the scheduled restart."""
        self._backoff.cancel()

    async def _repair(self, run: Generation) -> None:
        await self.settling.repair(run)
        if run is self._generations.current and self._status.running:
            await self.catch_up(run)

    def _adopt(self, run: Generation) -> None:
        # Without a current run, the draining ones may be of any earlier backend.
        before, accepted = self._generations.current, self._desired.before
        self.returned = ""
        self._keepers.accept(before, accepted)
        self._generations.adopt(run)
        self._keepers.accept(run, self._desired.accepted)
        self._probation.end()
        if isinstance(before, Shares) and accepted:
            self._probation.begin(run, before, accepted)
        self._go_on_probation(run)
        if self._generations.draining:
            self._drain.begin()
        self._backoff.served()
        self._report_started(run)
        in_background(self.catch_up(run), "the core's routing could not be updated, by a fault of the node")

    def _go_on_probation(self, run: Generation) -> None:
        """Continue the probation of a run that was handed over during it."""
        left, self._way_back = self._way_back, None
        if left is not None and isinstance(left.run, Shares) and left.way_back is not None:
            self._probation.begin(run, left.run, left.accepted, left.way_back)

    def joined(self, run: Generation) -> None:
        """Watch a run from before its first connection."""
        self._watch.begin(run)
        run.when_exited().addCallback(self._exited, run, pid_of(run))

    def _report_started(self, run: Generation) -> None:
        # None if a Stop came while this run started.
        accepted = self._desired.accepted
        named = {"core": accepted.driver.name, "version": accepted.version} if accepted else {}
        text = f"a {' '.join(named.values()) or 'core'} process serves"
        self._journal.tell(Kind.CORE_STARTED, text, **named, **pid_of(run))

    def _exited(self, ended: Exit, run: Generation, pid: dict[str, object]) -> None:
        """Handle the exit of a process: after a crash, restart the core or go back to the previous run."""
        was_current, way_back = run is self._generations.current, self._probation.way_back(run)
        self._cut += run.cut if run in self._generations.counting else 0
        if run in self._generations.serving:
            in_background(
                # As far as the node knows them without asking it.
                self._wind_down.read(run),
                "the last counters of an ended core could not be booked: its latest traffic is not counted",
            )
        unasked = self._generations.gone(run)
        self._journal.tell(Kind.CORE_EXITED if unasked else Kind.CORE_ENDED, ended.reason, reason=ended.reason, **pid)
        hung = run in self._hanging
        self._hanging.discard(run)
        if not (was_current and self._status.running):
            return
        self._losses[HUNG if hung else ended.kind] += 1
        reason = CoreFailed(ended.reason)
        if way_back:
            self._pending.crashed(run, killed=hung or ended.code in KILLED)
            self._go_back(way_back, reason)
        else:
            self._retry_later(reason)

    def _go_back(self, takeover: Takeover, reason: NodeError) -> None:
        """Go back to the previous run, which still drains, after the new one failed on probation."""
        self._probation.end()
        self._status.enter(State.RESTARTING, reason.text)

        async def work(settled: Settled) -> None:
            # A starting run would replace the previous one again.
            await self._pending.cancel()
            if self._status.state is not State.RESTARTING:
                return
            assert self._desired.accepted is not None
            other = takeover.accepted.plan is not self._desired.accepted.plan
            if await self._return_to(takeover, other):
                self.returned = (
                    f"the new core failed soon after taking over, and the previous one serves again: {reason.text}"
                )
                self._status.enter(State.RUNNING, self.returned)
                settled()
                if other:
                    await self.settling.settle_start()
                else:
                    self._settle_later(takeover.before)
            else:
                settled()
                await self.run_again(START_TIMEOUT)

        in_background(self._control.run(work, core=True), "the previous core could not be taken back")

    async def _return_to(self, takeover: Takeover, other: bool) -> bool:
        """Direct new connections to the previous run, and want its backend again. Returns False if that failed."""
        if takeover.before not in self._generations.draining:
            return False
        assert self._desired.accepted is not None
        if takeover.accepted.means(self._desired.accepted):
            await self.catch_up(takeover.before)
        try:
            await takeover.before.lead()
        except NotShared as error:
            self.log.warn("the previous core cannot serve again: {reason}; starting a new one", reason=str(error))
            return False
        if other:
            leave_out(
                self._ring,
                self._events,
                await self._desired.revert(await self._with_current_routing(takeover.accepted)),
            )
        if takeover.before not in self._generations.draining:
            return False
        self._generations.adopt(takeover.before)
        self._drain.begin()
        return True

    async def _with_current_routing(self, before: Accepted) -> Accepted:
        """The previous run's backend; if it is the same as the current one, with the current routing changes."""
        now = self._desired.accepted
        assert now is not None
        if not before.means(now) or before.routing == now.routing:
            return before
        try:
            return await before.with_routing(now.routing)
        except NodeError as error:
            self.log.warn("the previous core keeps its old routing: {reason}", reason=error.text)
            return now

    def _settle_later(self, run: Generation) -> None:
        """Apply the users again that came with a failed run: at once, and with backoff if the next runs fail, too."""

        async def work() -> None:
            try:
                if self._generations.current:
                    await self.settling.repair(self._generations.current)
            finally:
                if run is self._generations.current:
                    # It took the users: the backoff counts its serving time from now on.
                    self._backoff.served()

        self._backoff.later(lambda: in_background(work(), "users could not be applied to the previous core"))

    def _retry_later(self, reason: NodeError) -> None:
        """Schedule a restart, with backoff. An invalid configuration is not retried: the state is then `failed`."""
        if isinstance(reason, InvalidConfig):
            self._status.enter(State.FAILED, reason.text)
            return
        self._status.enter(State.RESTARTING, reason.text)
        seconds = self._backoff.later(
            lambda: in_background(self._control.run(self._restart, core=True), "the core could not be restarted")
        )
        self._journal.tell(Kind.CORE_RETRY, f"the core is restarted in {seconds:g} s", seconds=f"{seconds:g}")

    async def _restart(self, settled: Settled) -> None:
        settled()
        if self._status.state is State.RESTARTING:
            await self.run_again(START_TIMEOUT)

    def _hung(self, run: Generation, reason: str) -> None:
        """Kill a run that lives but does not answer."""
        self._ring.event(f"the core is killed: {reason}")
        self._hanging.add(run)
        self._journal.tell(Kind.CORE_HUNG, f"the core is killed: {reason}", reason=reason, **pid_of(run))
        run.kill()
