"""Keeps what was accepted running: has a core come up, and come again when it goes or hangs."""

from __future__ import annotations

from twisted.internet.interfaces import IReactorTime

from node.backend.backoff import Backoff
from node.backend.control import Control, Settled
from node.backend.desired import Desired
from node.backend.faults import as_told, in_background
from node.backend.generations import Generations
from node.backend.health import Watch
from node.backend.keeper import Keeper
from node.backend.renewal import Renewal
from node.backend.replace import Replacement
from node.backend.settling import Settling
from node.backend.state import State, Status
from node.contract.driver import Exit, Generation
from node.errors import CoreFailed, InvalidConfig, NodeError
from node.logs import LogRing

# Seconds that a core may take to come up.
START_TIMEOUT = 8.0


class Supervisor:
    """Watches over the runs. `settling` brings users into them."""

    def __init__(
        self,
        reactor: IReactorTime,
        ring: LogRing,
        status: Status,
        control: Control,
        desired: Desired,
        generations: Generations,
        replacement: Replacement,
    ) -> None:
        self._reactor = reactor
        self._ring = ring
        self._status = status
        self._control = control
        self._desired = desired
        self._generations = generations
        self._replacement = replacement
        self._backoff = Backoff(reactor)
        self._renewal = Renewal(status, desired, replacement, self._again)
        self.settling = Settling(status, desired, generations, self._keeper)
        self._watch = Watch(reactor, self._hung, self.settling.repair)

    @property
    def warnings(self) -> list[str]:
        """What an operator should know about the watch over the cores."""
        return self._watch.warnings

    async def run(self, deadline: float) -> None:
        """Have what is accepted run, in the place of what ran. Raises what `Replacement.restart` raises."""
        assert self._desired.accepted is not None
        await self.settling.idle()
        run = await self._replacement.restart(self._desired.accepted.plan, lambda: self._desired.target, deadline)
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
            self._again(reason)
            return reason
        await self.settling.settle_start()
        return None

    async def end_all(self) -> None:
        """End every run; nothing comes again by itself."""
        await self.settling.idle()
        await self._replacement.end_all()
        self.settling.forget()

    def forgive(self) -> None:
        """A controller wants another backend: no try of this one is to come, and its first crash is the first."""
        self._backoff.renew()

    def rest(self) -> None:
        """No try is to come."""
        self._backoff.cancel()

    def _keeper(self, run: Generation) -> Keeper:
        around = self._status, self._desired, self._generations, self._renewal
        return Keeper(self._reactor, run, *around, self._adopt, self._watch.doubt)

    def _adopt(self, run: Generation) -> None:
        self._generations.adopt(run)
        self._backoff.served()
        self._watch.begin(run)
        run.when_exited().addCallback(self._exited, run)

    def _exited(self, ended: Exit, run: Generation) -> None:
        """A process is gone. If nobody asked it to go it comes again."""
        was_current = run is self._generations.current
        self._generations.gone(run)
        if was_current and self._status.running:
            self._again(CoreFailed(ended.reason))

    def _again(self, reason: NodeError) -> None:
        """Try again when it is time to, unless a configuration is to blame: that does not mend itself."""
        if isinstance(reason, InvalidConfig):
            self._status.enter(State.FAILED, reason.text)
            return
        self._status.enter(State.RESTARTING, reason.text)
        self._backoff.later(
            lambda: in_background(self._control.run(self._restart, core=True), "the core was not started again")
        )

    async def _restart(self, settled: Settled) -> None:
        settled()
        if self._status.state is State.RESTARTING:
            await self.run_again(START_TIMEOUT)

    def _hung(self, run: Generation, reason: str) -> None:
        """It lives and does not answer: as good as gone."""
        self._ring.event(f"the core is ended: {reason}")
        run.kill()
