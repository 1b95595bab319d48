"""Keeps what was accepted running: has a core come up, and come again when it goes or hangs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from twisted.internet.interfaces import IReactorTime

from node.backend.backoff import Backoff
from node.backend.control import Control, Settled
from node.backend.desired import Accepted, Desired
from node.backend.drain import Drain
from node.backend.faults import as_told, in_background, leave_out, pid_of
from node.backend.generations import Generations
from node.backend.health import Watch
from node.backend.keeper import Keeper
from node.backend.probation import Probation, Taken
from node.backend.renewal import Renewal
from node.backend.replace import Replacement
from node.backend.settling import Settling
from node.backend.standing import Drainer, Standing
from node.backend.state import State, Status
from node.contract.driver import Cuts, Exit, Generation, NotShared, Routes, Shares
from node.errors import CoreFailed, InvalidConfig, NodeError
from node.events.journal import Tells
from node.events.kinds import Kind
from node.events.users import UserEvents
from node.logs import Logger, LogRing

# Seconds that a core may take to come up.
START_TIMEOUT = 8.0
# Why a core that is wanted went away, beside the kinds of `Exit`; the last one is of one that did not come up again.
HUNG, NOT_STARTED = "hung", "not_started"
REASONS = ("exit", "signal", HUNG, NOT_STARTED)


@dataclass(frozen=True)
class Happened:
    """What became of cores and their connections since the node began.

    `losses`: cores that were wanted and went away, by reason. `cut`: connections of removed users. `dropped`: those
    that were ended with a core that drained. `draining`: those that such cores have now.
    """

    losses: Mapping[str, int]
    cut: int
    dropped: int
    draining: int


class Supervisor:
    """Watches over the runs. `settling` brings users into them."""

    log = Logger()

    def __init__(
        self,
        reactor: IReactorTime,
        ring: LogRing,
        status: Status,
        control: Control,
        desired: Desired,
        generations: Generations,
        replacement: Replacement,
        drain: Drain,
        journal: Tells,
        events: UserEvents,
    ) -> None:
        self._reactor = reactor
        self._ring = ring
        self._status = status
        self._control = control
        self._desired = desired
        self._generations = generations
        self._replacement = replacement
        self._drain = drain
        self._journal = journal
        self._events = events
        self._backoff = Backoff(reactor)
        self._renewal = Renewal(status, desired, generations, replacement, self._again)
        self.settling = Settling(status, desired, generations, self._keeper)
        self._watch = Watch(reactor, self._hung, self._repair)
        self._probation = Probation(reactor, generations, self._hung)
        # Why the run that took over last did not hold, if it did not.
        self.returned = ""
        self._losses = dict.fromkeys(REASONS, 0)
        self._hanging: set[Generation] = set()
        # What was accepted when each of the runs served last.
        self._accepted: dict[Generation, Accepted] = {}
        # To which of the runs that an earlier program left the current one may give way again.
        self._way_back: Drainer | None = None
        # Connections of removed users that were ended by runs that are gone.
        self._cut = 0

    @property
    def warnings(self) -> list[str]:
        """What an operator should know about the runs: what is not watched, did not hold, or ended connections."""
        told = [f"the last change ended all connections: {obstacle}" for obstacle in self._replacement.obstacles]
        return [*filter(None, [self.returned]), *told, *self._watch.warnings, *self._drain.warnings]

    @property
    def happened(self) -> Happened:
        cut = self._cut + sum(map(_cut_by, self._generations.counting))
        return Happened(dict(self._losses), cut, self._drain.dropped, self._drain.connections)

    @property
    def on_probation(self) -> bool:
        """Whether the current run may still go back to the one before it."""
        return self._probation.under_way

    @property
    def ending(self) -> bool:
        """Whether a run ends, or is about to."""
        return bool(self._generations.ending) or self._drain.ending

    def pause(self, paused: bool = True) -> None:
        """Have no run come or go by itself, or again: they are being left to another program."""
        self._drain.paused = self._renewal.paused = paused

    @property
    def standing(self) -> Standing | None:
        """The runs as they are; None where none is the current one."""
        current, accepted = self._generations.current, self._desired.accepted
        if current is None or accepted is None:
            return None
        draining = [
            Drainer(run, self._accepted.get(run, accepted), self._drain.since(run), self._probation.left(run))
            for run in self._generations.draining
        ]
        return Standing(current, accepted, draining)

    def inherit(self, draining: Sequence[Drainer]) -> None:
        """An earlier program of the node has left these, oldest first."""
        self._accepted |= {each.run: each.accepted for each in draining}
        self._generations.inherit(each.run for each in draining)
        self._drain.inherit({each.run: each.since for each in draining})
        self._way_back = next((each for each in draining if each.way_back is not None), None)
        for each in draining:
            self._look_after(each.run)

    async def run(self, deadline: float) -> None:
        """Have what is accepted run, in the place of what ran. Raises what `Replacement.bring` raises."""
        assert self._desired.accepted is not None
        await self.settling.idle()
        run = await self._replacement.bring(self._desired.accepted.runs, lambda: self._desired.target, deadline)
        self._status.enter(State.RUNNING)
        self._adopt(run)

    async def run_again(self, seconds: float) -> NodeError | None:
        """Have what was accepted before run. If it does not come up it is tried again later, and why is returned."""
        try:
            await self.run(self._reactor.seconds() + seconds)
        except Exception as error:
            if self._status.stopped:
                raise  # a Stop ended it
            reason = as_told(error)
            self._losses[NOT_STARTED] += 1
            self._again(reason)
            return reason
        await self.settling.settle_start()
        return None

    async def catch_up(self, run: Generation) -> None:
        """Bring the current run the routing that is wanted: it may have changed while that came up, or was silent."""
        accepted = self._desired.accepted
        if isinstance(run, Routes) and accepted is not None:
            try:
                await run.reroute(accepted.runs)
            except NodeError as error:
                self.log.error("the routing of the core is not as it is to be: {reason}", reason=error.text)

    async def end_all(self) -> None:
        """End every run; nothing comes again by itself."""
        await self.settling.idle()
        # Not before: one that was on its way may have taken over until now.
        self._probation.end()
        self._drain.stop()
        self.confirmed()
        self._replacement.obstacles = []
        await self._replacement.end_all()
        self.settling.forget()

    def forgive(self) -> None:
        """A controller wants another backend: no try of this one is to come, and its first crash is the first."""
        self._backoff.renew()

    def confirmed(self) -> None:
        """A controller wants what runs, or nothing: what did not hold is no news any more."""
        self.returned = ""

    def rest(self) -> None:
        """No try is to come."""
        self._backoff.cancel()

    async def _repair(self, run: Generation) -> None:
        await self.settling.repair(run)
        if run is self._generations.current and self._status.running:
            await self.catch_up(run)

    def _keeper(self, run: Generation) -> Keeper:
        around = self._status, self._desired, self._generations, self._renewal, self._events
        # One that another run has just taken the place of may be of what was accepted before.
        before = None if run is self._generations.current else self._accepted.get(run)
        accepted = before or self._desired.accepted
        assert accepted is not None
        return Keeper(self._reactor, run, accepted.plan, *around, self._adopt, self._watch.doubt)

    def _adopt(self, run: Generation) -> None:
        # Where none is the current one, those that drain may be of anything that was accepted once.
        before, accepted = self._generations.current, self._desired.before
        self.confirmed()
        self._note(before, accepted)
        self._generations.adopt(run)
        self._note(run, self._desired.accepted)
        self._probation.end()
        if isinstance(before, Shares) and accepted:
            self._probation.begin(run, before, accepted)
        self._go_on_probation(run)
        if self._generations.draining:
            self._drain.begin()
        self._backoff.served()
        self._tell_started(run)
        self._look_after(run)
        in_background(self.catch_up(run), "the routing of the core is not as it is to be")

    def _note(self, run: Generation | None, accepted: Accepted | None) -> None:
        if run is not None and accepted is not None:
            self._accepted[run] = accepted

    def _go_on_probation(self, run: Generation) -> None:
        """It may have been on probation when an earlier program left it."""
        left, self._way_back = self._way_back, None
        if left is not None and isinstance(left.run, Shares) and left.way_back is not None:
            self._probation.begin(run, left.run, left.accepted, left.way_back)

    def _look_after(self, run: Generation) -> None:
        self._watch.begin(run)
        run.when_exited().addCallback(self._exited, run, pid_of(run))

    def _tell_started(self, run: Generation) -> None:
        # None where all that was accepted was taken back while this run came.
        accepted = self._desired.accepted
        named = {"core": accepted.driver.name, "version": accepted.version} if accepted else {}
        text = f"a process of {' '.join(named.values()) or 'a core'} serves"
        self._journal.tell(Kind.CORE_STARTED, text, **named, **pid_of(run))

    def _exited(self, ended: Exit, run: Generation, pid: dict[str, object]) -> None:
        """A process is gone. If nobody asked it to go it comes again, or the one before it serves again."""
        was_current, way_back = run is self._generations.current, self._probation.way_back(run)
        self._cut += _cut_by(run) if run in self._generations.counting else 0
        unasked = self._generations.gone(run)
        self._accepted.pop(run, None)
        self._journal.tell(Kind.CORE_EXITED if unasked else Kind.CORE_ENDED, ended.reason, reason=ended.reason, **pid)
        hung = run in self._hanging
        self._hanging.discard(run)
        if not (was_current and self._status.running):
            return
        self._losses[HUNG if hung else ended.kind] += 1
        reason = CoreFailed(ended.reason)
        if way_back:
            self._go_back(way_back, reason)
        else:
            self._again(reason)

    def _go_back(self, taken: Taken, reason: NodeError) -> None:
        """What took over did not hold, and what was there before it still serves those who are connected."""
        self._probation.end()
        self._status.enter(State.RESTARTING, reason.text)

        async def work(settled: Settled) -> None:
            # What was on its way would take the place of the one before.
            await self.settling.idle()
            if self._status.state is not State.RESTARTING:
                return
            assert self._desired.accepted is not None
            other = taken.accepted.plan is not self._desired.accepted.plan
            if await self._gone_back(taken, other):
                self.returned = f"the core that took over did not hold, and the one before it runs: {reason.text}"
                self._status.enter(State.RUNNING, self.returned)
                settled()
                if other:
                    await self.settling.settle_start()
                else:
                    self._settle_later(taken.before)
            else:
                settled()
                await self.run_again(START_TIMEOUT)

        in_background(self._control.run(work, core=True), "the core before was not taken back")

    async def _gone_back(self, taken: Taken, other: bool) -> bool:
        """Lead new connections to the run before; the backend is again what it was then. Returns whether that did."""
        if taken.before not in self._generations.draining:
            return False
        assert self._desired.accepted is not None
        if taken.accepted.means(self._desired.accepted):
            await self.catch_up(taken.before)
        try:
            await taken.before.lead()
        except NotShared as error:
            self.log.warn("the core before cannot be taken back: {reason}", reason=str(error))
            return False
        if other:
            leave_out(self._ring, self._events, await self._desired.revert(await self._as_it_is(taken.accepted)))
        if taken.before not in self._generations.draining:
            return False
        self._generations.adopt(taken.before)
        self._drain.begin()
        return True

    async def _as_it_is(self, before: Accepted) -> Accepted:
        """What was accepted before; if that means what is accepted now, with what was changed of its routing since."""
        now = self._desired.accepted
        assert now is not None
        if not before.means(now) or before.routing == now.routing:
            return before
        try:
            return await before.with_routing(now.routing)
        except NodeError as error:
            self.log.warn("the core before runs what another one began with: {reason}", reason=error.text)
            return now

    def _settle_later(self, run: Generation) -> None:
        """Bring in who came with a run that did not hold: at once, and where the next ones do not either, later."""

        async def work() -> None:
            try:
                if self._generations.current:
                    await self.settling.repair(self._generations.current)
            finally:
                if run is self._generations.current:
                    # It took them: its time begins anew.
                    self._backoff.served()

        self._backoff.later(lambda: in_background(work(), "users were not brought in again"))

    def _again(self, reason: NodeError) -> None:
        """Try again when it is time to, unless a configuration is to blame: that does not mend itself."""
        if isinstance(reason, InvalidConfig):
            self._status.enter(State.FAILED, reason.text)
            return
        self._status.enter(State.RESTARTING, reason.text)
        seconds = self._backoff.later(
            lambda: in_background(self._control.run(self._restart, core=True), "the core was not started again")
        )
        self._journal.tell(Kind.CORE_RETRY, f"the core is started again in {seconds:g} s", seconds=f"{seconds:g}")

    async def _restart(self, settled: Settled) -> None:
        settled()
        if self._status.state is State.RESTARTING:
            await self.run_again(START_TIMEOUT)

    def _hung(self, run: Generation, reason: str) -> None:
        """It lives and does not answer: as good as gone."""
        self._ring.event(f"the core is ended: {reason}")
        self._hanging.add(run)
        self._journal.tell(Kind.CORE_HUNG, f"the core is ended: {reason}", reason=reason, **pid_of(run))
        run.kill()


def _cut_by(run: Generation) -> int:
    return run.cut if isinstance(run, Cuts) else 0
