"""The node takes over from the previous one, which ends for an upgrade, or was killed."""

from __future__ import annotations

import signal
from collections.abc import Collection, MutableMapping

from twisted.internet.defer import ensureDeferred
from twisted.python.failure import Failure

from node import __version__
from node.base.logs import Logger
from node.base.part import Part
from node.base.reactor import PooledReactor
from node.engine.leaving import Leaving
from node.handover import attempt
from node.handover.attempt import TRYING
from node.handover.house import House
from node.handover.keeper import FAILED, WAITING
from node.handover.program import PATH
from node.handover.snapshots import Snapshots, read_memory
from node.handover.ties import Ties
from protos.handover_pb2 import Handover

# Seconds that the next version may take to prepare the resume.
AHEAD = 10.0


class Arrival(Part):
    """Satisfies `node.engine.leaving.Heirs`.

    Without `ties` there is no keeper, and nothing is taken over. `seconds`: for how long cores go on without any node.
    """

    title = "the hand-over"
    log = Logger()

    def __init__(
        self,
        reactor: PooledReactor,
        environment: MutableMapping[str, str],
        ties: Ties | None,
        seconds: float,
        leaving: Leaving,
        house: House,
    ) -> None:
        self._reactor = reactor
        self._environment = environment
        self._ties = ties
        self._seconds = seconds
        self._leaving = leaving
        self._house = house
        self._left = Handover()
        # Why the next version failed, if this one runs again.
        self._failed = ""
        # Whether the node is ending.
        self.ending = False
        self.snapshots = Snapshots(reactor, ties, leaving, house.ring) if ties is not None else None

    @property
    def follows(self) -> bool:
        """Whether the version before still serves: it ends when this one starts."""
        return self._ties is not None and TRYING in self._environment

    async def prepare(self) -> None:
        """Prepare the resume while the version before serves; what fails now is tried again after its end."""
        try:
            if (saved := self._house.store.peek()) is not None:
                await ensureDeferred(self._leaving.prepare(saved)).addTimeout(AHEAD, self._reactor)
        except Exception as error:  # noqa: BLE001 - logged; only the upgrade takes longer
            self.log.warn("nothing was prepared before the version before ends: {error}", error=str(error))

    def abandon(self, failure: Failure) -> None:
        """This version cannot start: have the keeper end it and go back to the version before."""
        if self._ties is not None:
            self._ties.fail(attempt.reason_of(failure.value)[-attempt.REASON :])
            signal.pause()

    def start(self) -> None:
        """Receive what the node before has left; waits for its end, before anything is opened."""
        self._failed = self._environment.pop(FAILED, "")
        if PATH in self._environment:
            # The next program must find its modules in the usual place, not in the kept copy.
            self._environment["PYTHONPATH"] = self._environment.pop(PATH)
        if self._ties is None:
            return
        self._ties.hello()
        for memory in self._ties.take("state"):
            self._left = read_memory(memory)
        if self._left.HasField("ring"):
            self._house.ring.unpack(self._left.ring)
        if self._failed:
            self._house.store.go_back()

    @property
    def outcome(self) -> str | None:
        """The outcome of an upgrade: why the next version failed and this one runs again; empty if it succeeded.

        None without an upgrade.
        """
        return self._failed if self._failed or self._left.exact else None

    @property
    def cores(self) -> Collection[int]:
        """The PIDs of the cores that were left."""
        return [run.pid for run in (self._left.run, *self._left.draining) if run.pid]

    def begin(self) -> None:
        """Have the resume recover the cores that were left; controllers wait until that is done."""
        if self._ties is not None:
            self._ties.follow(self._reactor)
        # A signal that came while the node did not run is delivered now.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, WAITING)
        if self._failed:
            self._house.refuse(self._failed)
        if self.cores:
            self._leaving.inherit(self._left, self)
            self._house.parts.admit(False)
        else:
            self._come_up()

    async def end_others(self) -> None:
        if not self._left.exact and self._ties is not None:
            await self._ties.end_others()

    def taken(self, pids: Collection[int]) -> None:
        if pids:
            text = f"txnode {__version__} goes on with {'the core' if len(pids) == 1 else f'{len(pids)} cores'}"
            self._house.ring.event(text)
            self.log.info("{text}", text=text)
        if {*pids} != {*self.cores}:
            self._house.sweep(pids)
        self._come_up()

    def go_back(self, reason: str) -> None:
        """Go back to the version before, if this one follows it in an upgrade: the keeper ends this process then.

        Not if the node is ending, which also cancels what takes over the cores.
        """
        if self._ties is not None and self._left.exact and not self._failed and not self.ending:
            self._ties.fail(f"it cannot go on with the core: {reason}")
            signal.pause()

    def failed(self, reason: str) -> None:
        self.go_back(reason)
        self.log.warn("the core is restarted: {reason}", reason=reason)
        self._house.sweep(())
        self._come_up()

    def end(self) -> None:
        """Note that the node is ending, and all with it."""
        self.ending = True
        if self.snapshots is not None:
            self.snapshots.stop()
        if self._ties is not None:
            self._ties.bye()

    def _come_up(self) -> None:
        if self._ties is not None and self.snapshots is not None:
            # From here on the next node finds what the disk has, not what the node before had counted.
            self.snapshots.go_on(self._left)
            self._ties.drop_leftover()
            self._environment.pop(TRYING, None)
            self._ties.up(self._seconds)
        # Frees memory: it may be large.
        self._left = Handover(exact=self._left.exact)
        if self.ending:
            return
        if self.snapshots is not None:
            self.snapshots.start()
        self._house.parts.settle(self.outcome)
        self._house.parts.admit(True)


class Sweep(Part):
    """Ends cores that an earlier node left behind, and that are not taken over. It needs the lock of STATE_DIR."""

    title = "the sweep of cores"
    log = Logger()

    def __init__(self, arrival: Arrival, house: House) -> None:
        self._arrival = arrival
        self._house = house

    def start(self) -> None:
        for pid in self._house.sweep(self._arrival.cores):
            self.log.warn("ended core {pid}, left behind by an earlier node", pid=pid)
