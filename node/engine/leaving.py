"""Describe the runs of a core for the next node, leave them to it, and take over those that the last one has left."""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping
from typing import NamedTuple, Protocol

from node.backend.desired import Accepted
from node.backend.runner import Runner
from node.backend.supervisor import DrainingRun, Snapshot
from node.base import proc
from node.base.errors import CoreFailed, NodeError
from node.base.logs import Logger
from node.contract.abilities import Closes
from node.contract.driver import Driver, Generation, Plan
from node.contract.leaving import Gone, Leaves, LeavesAll, NotNow
from node.contract.routing import Routing
from node.contract.saved import Saved
from node.traffic.polling import Traffic
from protos.handover_pb2 import Handover, Run
from protos.service_pb2 import Backend


class Recovered(NamedTuple):
    """An adopted run, its description by the last node process, and, for a draining run, its configuration."""

    run: Leaves
    left: Run
    accepted: Accepted | None


class Heirs(Protocol):
    """Called with the outcome of recovering the cores that the previous version handed over."""

    async def end_others(self) -> None:
        """No other core can be taken over: those that were not have ended when this returns. Only after a kill."""

    def taken(self, pids: Collection[int]) -> None:
        """This node has taken over these cores."""

    def go_back(self, reason: str) -> None:
        """A core cannot be taken over: go back to the previous version. Returns if there is none."""

    def failed(self, reason: str) -> None:
        """No core can be taken over: go back to the previous version, else all have ended when this returns."""


class Leaving:
    """Leaves runs to the next node process, and adopts those of the last one."""

    log = Logger()

    def __init__(self, runner: Runner, drivers: Mapping[int, Driver], traffic: Traffic) -> None:
        self._runner = runner
        self._drivers = drivers
        self.traffic = traffic
        self.generations = runner.generations
        # Set if the last node process has left something.
        self._heirs: Heirs | None = None
        # Counters by the mark of a run, for the runs of a node that was killed.
        self.booked: Mapping[str, Mapping[str, int]] = {}
        self._together: LeavesAll | None = None
        # The driver that keeps the answers of a rehearsal for the next node process.
        self._rehearsed: LeavesAll | None = None

    async def prepare(self, saved: Saved) -> None:
        """Prepare the resume of this state, which may change until then. Raises as `Driver.prepare`."""
        request = Backend.FromString(saved.request)
        driver = self._drivers.get(request.type)
        if saved.request and driver is not None:
            await self._runner.prepare(driver, request, saved.users, Routing.unpack(saved.routing))

    async def shut_down(self) -> None:
        """End the cores before the next version begins, which can take over none of them."""
        await self._runner.close()

    @property
    def inherits(self) -> bool:
        """Whether the last node process has left something, whether it can be adopted or not."""
        return self._heirs is not None

    async def rehearse(self) -> None:
        """Have the core check the running configurations now, and keep its answers for the next node process.

        Raises `InvalidConfig` and `CoreFailed` for a configuration that it could not go on with.
        """
        snapshot = self._runner.supervisor.snapshot
        if snapshot is None or snapshot.current is None or not isinstance(snapshot.accepted.driver, LeavesAll):
            return
        self._forget()
        self._rehearsed = snapshot.accepted.driver
        self._rehearsed.rehearse(True)
        backends = (snapshot.accepted, *(each.accepted for each in snapshot.draining))
        try:
            for accepted in {each.recorded: each for each in backends}.values():
                await accepted.read_again()
        except BaseException:
            self._forget()
            raise

    def _forget(self) -> None:
        if self._rehearsed is not None:
            self._rehearsed.rehearse(False)
            self._rehearsed = None

    def marks(self) -> Mapping[Generation, str]:
        """The marks of the runs that the next node can take over, by which the disk has their booked counters."""
        snapshot = self._runner.supervisor.snapshot
        return {run: mark_of(run) for run in _leaving(snapshot)} if snapshot else {}

    def describe(self, saved: Collection[Generation] = (), exact: bool = False) -> Handover:
        """Describe the runs for the next node. `exact`: after they were left; `saved`: whose counters are on disk.

        A run that cannot be taken over is left out; if this is to be exact, that raises `CoreFailed`.
        """
        handover, snapshot = Handover(), self._runner.supervisor.snapshot
        if snapshot is None:
            return handover
        if (run := self._described(snapshot.current, snapshot.accepted, exact, saved)) is not None:
            handover.run.CopyFrom(run)
        for each in snapshot.draining:
            if (run := self._described(each.run, each.accepted, exact, saved)) is not None:
                # None leaves the field out.
                run.MergeFrom(Run(since=each.since, way_back=each.way_back))
                handover.draining.append(run)
        return handover

    def _described(
        self, run: Generation | None, accepted: Accepted, exact: bool, saved: Collection[Generation]
    ) -> Run | None:
        if not isinstance(run, Leaves):
            return None
        try:
            core = run.packed(exact)
        except CoreFailed:
            if exact:
                raise
            return None
        return Run(
            type=Backend.FromString(accepted.request).type,
            pid=run.pid or 0,
            core=core,
            counters=self.traffic.known(run) if exact else {},
            mark=mark_of(run),
            config=config_of(accepted),
            saved=run in saved,
            backend=accepted.request,
            routing=accepted.routing.pack(),
        )

    async def leave(self, go: Callable[[Handover], Awaitable[None]]) -> None:
        """Call `go` with what the next node needs to take over the cores; not if no core can be left.

        Raises `NotNow`.
        """

        async def then() -> None:
            self._require_steady()
            snapshot = self._runner.supervisor.snapshot
            if snapshot is not None and isinstance(snapshot.current, Leaves):
                with self.traffic.paused():
                    # Traffic from here on is counted by the next node process.
                    await self.traffic.read()
                    await self._leave(snapshot, go)

        try:
            await self._runner.leave(then)
        finally:
            self._forget()

    def _require_steady(self) -> None:
        if reason := self._runner.unsteady():
            raise NotNow(reason)

    async def _leave(self, snapshot: Snapshot, go: Callable[[Handover], Awaitable[None]]) -> None:
        driver, there = snapshot.accepted.driver, [*_leaving(snapshot)]
        try:
            try:
                for run in there:
                    await run.leave()
                handover = self.describe(exact=True)
                if isinstance(driver, LeavesAll):
                    handover.common = await driver.leave()
            except CoreFailed as error:
                raise NotNow(error.text) from error
            self._require_steady()
            for run, left in zip(there, (handover.run, *handover.draining), strict=True):
                if self.traffic.known(run) != left.counters:
                    # A slow reading has just been booked; the next node process would book it again.
                    raise NotNow("the counters of a core are being read")
            await go(handover)
        finally:
            # This process goes on with the cores, if only until it ends.
            for run in there:
                run.stay()

    # Adopting the runs of the last node process

    def inherit(self, left: Handover, heirs: Heirs) -> None:
        """Adopt these runs of the last node process when the backend is resumed: its run is the current one."""
        self._heirs = heirs
        # Draining runs are of the same driver; without a current run, take one of them.
        driver = self._drivers.get((left.run if left.HasField("run") else left.draining[0]).type)
        together = self._together = driver if isinstance(driver, LeavesAll) else None
        fault: CoreFailed | None = None
        try:
            if together is not None:
                together.go_on(left.common)
        except CoreFailed as error:
            fault = error

        async def recover(plan: Plan) -> Generation | None:
            try:
                if fault is not None:
                    raise fault
                current, draining = await self._recovered(left, plan, heirs)
                there = [*filter(None, [current]), *draining]
                pids = {each.left.pid for each in there}
                for each in there if not left.exact else ():
                    await _lower(each)
                # Cores that are not known end first: they would still be in the kernel's order of listeners.
                await heirs.end_others()
                if together is not None:
                    await together.remain(pids, current.left.pid if current and not left.exact else None)
                if current is not None and not left.exact and isinstance(current.run, Closes):
                    # The killed node may have kept its listeners closed.
                    await current.run.open_door()
            except Exception as error:  # noqa: BLE001 - reported: the last process goes on, or all is started again
                await self._failed(_text_of(error))
                return None
            heirs.taken(pids)
            for each in there:
                self.traffic.go_on(each.run, each.left.counters)
            self._runner.supervisor.inherit([_draining_run(each, current is not None) for each in draining])
            for each in there:
                each.run.stay()
            return current.run if current else None

        self._runner.supervisor.replacement.recover = recover

    def _known(self, left: Handover) -> tuple[Run | None, list[Run]]:
        """The current run and those that drain, oldest first, with their counters: those of a killed node are on disk.

        It may have been killed while it replaced the run: that is current whose configuration is on disk; there is none
        if the core had just crashed. A draining run whose counters the disk has lost is left out. Raises `CoreFailed`
        for the current one.
        """
        current, draining = (left.run if left.HasField("run") else None), [*left.draining]
        if left.exact:
            return current, draining
        runs = [*draining, *filter(None, [current])]
        if current is not None:
            accepted = self._runner.desired.accepted
            wanted = config_of(accepted) if accepted else ""
            current = next((run for run in reversed(runs) if run.config == wanted), None)
            if current is None:
                raise CoreFailed("no core runs the configuration that was accepted last")
        known = []
        for run in runs:
            # Until the counters of a run are on disk for the first time, the disk has nothing of what it has counted.
            counters = self.booked.get(run.mark, None if run.saved else {})
            if counters is not None:
                run.counters.update({name: value for name, value in counters.items() if name})
                known.append(run)
            elif run is current:
                raise CoreFailed("the state file has no counters of the core")
        return current, [run for run in known if run is not current]

    async def require_heir(self) -> None:
        """Called when nothing more can be adopted: fail the hand-over if it was not adopted by now."""
        if self._runner.supervisor.replacement.disinherit():
            await self._failed(self._runner.status.reason or "the state file does not have the backend that runs")

    async def _failed(self, reason: str) -> None:
        if self._heirs is not None:
            self._heirs.failed(reason)
        if self._together is not None:
            await self._together.remain((), None)

    async def _recovered(self, left: Handover, plan: Plan, heirs: Heirs) -> tuple[Recovered | None, list[Recovered]]:
        """Recover the current run and those that drain, without those that have ended or cannot be adopted."""
        run, others = self._known(left)
        current = await self._one(run, plan, None, heirs, left.exact) if run is not None else None
        draining = []
        for each in others:
            try:
                accepted = await self._runner.plan_again(each.backend, Routing.unpack(each.routing))
            except Exception as error:  # noqa: BLE001 - reported, as above; without a last process the core ends
                self._go_back(each, error, heirs)
            else:
                draining.append(await self._one(each, accepted.runs, accepted, heirs, left.exact))
        return current, [*filter(None, draining)]

    async def _one(
        self, left: Run, plan: Plan, accepted: Accepted | None, heirs: Heirs, exact: bool
    ) -> Recovered | None:
        try:
            if self._together is None:
                raise CoreFailed("its driver cannot adopt cores")
            return Recovered(await self._together.recover(plan, left.core, exact), left, accepted)
        except Gone as gone:
            self.log.warn("a core left by the last node process is not adopted: {reason}", reason=str(gone))
        except Exception as error:  # noqa: BLE001 - reported, as above
            self._go_back(left, error, heirs)
        return None

    def _go_back(self, left: Run, error: Exception, heirs: Heirs) -> None:
        heirs.go_back(_text_of(error))
        self.log.error("core {pid} cannot be adopted, and is ended: {reason}", pid=left.pid, reason=_text_of(error))


def mark_of(run: Generation | None) -> str:
    """A unique mark of a run's process (boot, PID, start time); empty without a process."""
    return proc.mark(run.pid) if run else ""


def config_of(accepted: Accepted) -> str:
    """A hash that identifies the accepted configuration of a run."""
    name, meaning, excluded = accepted.fingerprint
    words = "\0".join([name, meaning, *sorted(excluded)])
    return hashlib.sha256(words.encode()).hexdigest()


def _leaving(snapshot: Snapshot) -> Iterator[Leaves]:
    runs = (snapshot.current, *(each.run for each in snapshot.draining))
    return (run for run in runs if isinstance(run, Leaves))


async def _lower(found: Recovered) -> None:
    """Lower the booked counters to those that the run has, if they were added up in the killed node.

    A counter below the one that was booked would count from zero.
    """
    if found.run.counts_in_node:
        counters, booked = await found.run.counters(), found.left.counters
        for name, value in [*booked.items()]:
            booked[name] = min(value, counters.get(name, value))


def _draining_run(found: Recovered, on_probation: bool) -> DrainingRun:
    """Make the `DrainingRun` of an adopted run. `on_probation`: the run that replaced it was adopted, too."""
    assert found.accepted is not None
    left = found.left
    way_back = left.way_back if on_probation and left.HasField("way_back") else None
    since = left.since if left.HasField("since") else None
    return DrainingRun(found.run, found.accepted, since, way_back)


def _text_of(error: Exception) -> str:
    return error.text if isinstance(error, NodeError) else repr(error)
