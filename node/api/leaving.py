"""Hand the runs of a core over from one node process to the next, and adopt those that the last one has left."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import NamedTuple, Protocol

from node.adoption.handover_files import config_of
from node.backend.desired import Accepted
from node.backend.runner import Runner
from node.backend.snapshot import DrainingRun, Snapshot
from node.contract.driver import Closes, Driver, Generation, Gone, Heirs, Leaves, LeavesAll, NotNow, Plan, Recovers
from node.contract.routing import Routing
from node.errors import CoreFailed, NodeError
from node.logs import Logger
from protos.handover_pb2 import Handover, Run
from protos.service_pb2 import Backend


class Counted(Protocol):
    """The traffic counters: see `node.traffic.polling`."""

    async def read(self) -> bool: ...

    def known(self, run: Generation) -> Mapping[str, int]: ...

    def go_on(self, run: Generation, known: Mapping[str, int]) -> None: ...


class Recovered(NamedTuple):
    """An adopted run, its description by the last node process, and, for a draining run, its configuration."""

    run: Leaves
    left: Run
    accepted: Accepted | None


class Leaving:
    """Leaves runs to the next node process, and adopts those of the last one."""

    log = Logger()

    def __init__(self, runner: Runner, drivers: Mapping[int, Driver], traffic: Counted) -> None:
        self._runner = runner
        self._drivers = drivers
        self._traffic = traffic
        # Set if the last node process has left something.
        self._heirs: Heirs | None = None
        # Counters by the mark of a run, for the runs of a node that was killed.
        self.booked: Mapping[str, Mapping[str, int]] = {}
        self._together: LeavesAll | None = None
        # The driver that keeps the answers of a rehearsal for the next node process.
        self._rehearsed: LeavesAll | None = None

    @property
    def inherits(self) -> bool:
        """Whether the last node process has left something, whether it can be adopted or not."""
        return self._heirs is not None

    async def rehearse(self) -> None:
        """Have the core check the running configurations now, and keep its answers for the next node process.

        Raises `InvalidConfig` and `CoreFailed` for a configuration that it could not go on with.
        """
        snapshot = self._runner.snapshot
        if snapshot is None or not isinstance(snapshot.accepted.driver, LeavesAll):
            return
        self._forget()
        self._rehearsed = snapshot.accepted.driver
        self._rehearsed.rehearse(True)
        again = [snapshot.accepted]
        for each in snapshot.draining:
            if not any(each.accepted.recorded == other.recorded for other in again):
                again.append(each.accepted)
        try:
            for accepted in again:
                await accepted.read_again()
        except BaseException:
            self._forget()
            raise

    def _forget(self) -> None:
        if self._rehearsed is not None:
            self._rehearsed.rehearse(False)
            self._rehearsed = None

    async def leave(self, several: bool, go: Callable[[Handover], Awaitable[None]]) -> None:
        """Call `go` with what the next node process needs to adopt the cores; not if there is none that can be left.

        `several`: that process can adopt more than one core. Raises `NotNow`.
        """

        async def then() -> None:
            self._require_steady(several)
            snapshot = self._runner.snapshot
            if snapshot is not None and isinstance(snapshot.current, Leaves):
                # Traffic from here on is counted by the next node process.
                await self._traffic.read()
                await self._leave(snapshot, several, go)

        try:
            await self._runner.leave(then)
        finally:
            self._forget()

    def _require_steady(self, several: bool) -> None:
        if reason := self._runner.unsteady(several):
            raise NotNow(reason)

    async def _leave(self, snapshot: Snapshot, several: bool, go: Callable[[Handover], Awaitable[None]]) -> None:
        driver, runs = snapshot.accepted.driver, [snapshot.current, *(each.run for each in snapshot.draining)]
        there = [run for run in runs if isinstance(run, Leaves)]
        kind = Backend.FromString(snapshot.accepted.request).type
        try:
            try:
                current, *draining = [await self._left(run, kind) for run in there]
                together = await driver.leave() if isinstance(driver, LeavesAll) else None
            except CoreFailed as error:
                raise NotNow(error.text) from error
            self._require_steady(several)
            for one, left in zip(there, (current, *draining), strict=True):
                if self._traffic.known(one) != left.counters:
                    # A slow reading has just been booked; the next node process would book it again.
                    raise NotNow("the counters of a core are being read")
            for run, each in zip(draining, snapshot.draining, strict=True):
                _describe(run, each, snapshot.accepted)
            handover = Handover(run=current, draining=draining)
            if together is not None:
                handover.together.packed = together.packed
                handover.together.descriptors.extend(together.descriptors)
            await go(handover)
        finally:
            # This process goes on with the cores, if only until it ends.
            for one in there:
                one.stay()

    async def _left(self, run: Leaves, kind: int) -> Run:
        left = await run.leave()
        known = self._traffic.known(run)
        return Run(type=kind, pid=left.pid, core=left.packed, descriptors=left.descriptors, counters=known)

    # Adopting the runs of the last node process

    def inherit(self, left: Handover, heirs: Heirs) -> None:
        """Adopt these runs of the last node process when the backend is resumed: its run is the current one."""
        self._heirs = heirs
        driver = self._drivers.get(left.run.type)
        together = self._together = driver if isinstance(driver, LeavesAll) else None
        fault: CoreFailed | None = None
        try:
            if together is not None:
                together.go_on(left.together.packed)
        except CoreFailed as error:
            fault = error

        async def recover(plan: Plan) -> Generation | None:
            try:
                if fault is not None:
                    raise fault
                if left.run.mark:
                    self._complete(left)
                current, draining = await self._recovered(left, plan, heirs)
                if left.run.mark:
                    draining = await self._regained(current, draining)
            except Exception as error:  # noqa: BLE001 - reported: the last process goes on, or the cores start again
                self._failed(_text_of(error))
                return None
            there = [*filter(None, [current]), *draining]
            pids = {each.left.pid for each in there}
            heirs.taken(pids)
            if together is not None:
                together.remain(pids)
            for each in there:
                self._traffic.go_on(each.run, each.left.counters)
            self._runner.inherit_draining([_draining_run(each, current is not None) for each in draining])
            for each in there:
                each.run.stay()
            return current.run if current else None

        self._runner.inherit(recover)

    def _complete(self, left: Handover) -> None:
        """Add the saved counters to the runs of a killed node; drop draining runs without any.

        Raises `CoreFailed` if the saved state has another configuration, or no counters of the current run.
        """
        accepted = self._runner.desired.accepted
        if accepted is None or config_of(accepted) != left.run.config:
            raise CoreFailed("another configuration was accepted since the hand-over file was written")
        for run in (left.run, *left.draining):
            counters = self.booked.get(run.mark)
            if counters is not None:
                run.counters.update({name: value for name, value in counters.items() if name})
            elif run is left.run:
                raise CoreFailed("the state file has no counters of the core")
        known = [run for run in left.draining if run.mark in self.booked]
        del left.draining[:]
        left.draining.extend(known)

    async def _regained(self, current: Recovered | None, draining: list[Recovered]) -> list[Recovered]:
        """Return a killed node's draining runs, if new connections are known to reach the current run; else none."""
        try:
            if current is not None and not draining and isinstance(current.run, Closes):
                # The killed node may have kept its listeners closed.
                await current.run.open_door()
            if draining:
                if current is None or self._together is None:
                    raise CoreFailed("the core that served new connections has ended")
                await self._together.regain([*(each.run for each in draining), current.run])
        except CoreFailed as error:
            self.log.warn("listeners could not be restored; draining cores are ended: {reason}", reason=error.text)
            return []
        return draining

    def require_heir(self) -> None:
        """Called when nothing more can be adopted: fail the hand-over if it was not adopted by now."""
        if self._runner.disinherit():
            self._failed(self._runner.status.reason or "the state file does not have the backend that runs")

    def _failed(self, reason: str) -> None:
        if self._heirs is not None:
            self._heirs.failed(reason)
        if self._together is not None:
            self._together.remain(())

    async def _recovered(self, left: Handover, plan: Plan, heirs: Heirs) -> tuple[Recovered | None, list[Recovered]]:
        """Recover the current run and those that drain, without those that have ended or cannot be adopted."""
        current = await self._one(left.run, plan, None, heirs)
        draining = []
        for each in left.draining:
            try:
                accepted = await self._runner.plan_again(each.backend, Routing.unpack(each.routing))
            except Exception as error:  # noqa: BLE001 - reported, as above; without a last process the core ends
                self._go_back(each, error, heirs)
            else:
                draining.append(await self._one(each, accepted.runs, accepted, heirs))
        return current, [each for each in draining if each is not None]

    async def _one(self, left: Run, plan: Plan, accepted: Accepted | None, heirs: Heirs) -> Recovered | None:
        try:
            if not isinstance(plan, Recovers):
                raise CoreFailed("its driver cannot adopt cores")
            return Recovered(await plan.recover(left.core), left, accepted)
        except Gone as gone:
            self.log.warn("a core left by the last node process is not adopted: {reason}", reason=str(gone))
        except Exception as error:  # noqa: BLE001 - reported, as above
            self._go_back(left, error, heirs)
        return None

    def _go_back(self, left: Run, error: Exception, heirs: Heirs) -> None:
        heirs.go_back(_text_of(error))
        self.log.error("core {pid} cannot be adopted, and is ended: {reason}", pid=left.pid, reason=_text_of(error))


def _describe(run: Run, described: DrainingRun, current: Accepted) -> None:
    """Complete the description of a draining run."""
    run.since = described.since
    if not described.accepted.means(current):
        run.backend = described.accepted.request
    run.routing = described.accepted.routing.pack()
    if described.way_back is not None:
        run.way_back = described.way_back


def _draining_run(found: Recovered, on_probation: bool) -> DrainingRun:
    """Make the `DrainingRun` of an adopted run. `on_probation`: the run that replaced it was adopted, too."""
    assert found.accepted is not None
    left = found.left
    way_back = left.way_back if on_probation and left.HasField("way_back") else None
    return DrainingRun(found.run, found.accepted, left.since, way_back)


def _text_of(error: Exception) -> str:
    return error.text if isinstance(error, NodeError) else repr(error)
