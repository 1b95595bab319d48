"""The runs of a core between two programs of the node: what is left of them to the next one, and taken over by it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import NamedTuple, Protocol

from node.adoption.standing import config_of
from node.backend.desired import Accepted
from node.backend.runner import Runner
from node.backend.standing import Drainer, Standing
from node.contract.driver import Closes, Driver, Generation, Gone, Heirs, Leaves, LeavesAll, NotNow, Plan, Recovers
from node.contract.routing import Routing
from node.errors import CoreFailed, NodeError
from node.logs import Logger
from protos.handover_pb2 import Handover, Run
from protos.service_pb2 import Backend


class Counted(Protocol):
    """What was counted: see `node.traffic.polling`."""

    async def read(self) -> bool: ...

    def known(self, run: Generation) -> Mapping[str, int]: ...

    def go_on(self, run: Generation, known: Mapping[str, int]) -> None: ...


class Recovered(NamedTuple):
    """A run that was left, and what was said of it."""

    run: Leaves
    left: Run
    accepted: Accepted | None


class Leaving:
    """Leaves runs, and takes them over."""

    log = Logger()

    def __init__(self, runner: Runner, drivers: Mapping[int, Driver], traffic: Counted) -> None:
        self._runner = runner
        self._drivers = drivers
        self._traffic = traffic
        # Where the node's last program has left something.
        self._heirs: Heirs | None = None
        # Counters by the mark of a run, where that was killed.
        self.booked: Mapping[str, Mapping[str, int]] = {}
        self._together: LeavesAll | None = None
        # What was asked for the next program is known there.
        self._rehearsed: LeavesAll | None = None

    @property
    def inherits(self) -> bool:
        """Whether the node's last program has left something, to be taken over or not."""
        return self._heirs is not None

    async def rehearse(self) -> None:
        """Ask of the cores now, while all is served, what the next program would ask again.

        Raises `InvalidConfig` and `CoreFailed` for a configuration that it could not go on with.
        """
        standing = self._runner.standing
        if standing is None or not isinstance(standing.accepted.driver, LeavesAll):
            return
        self._forget()
        self._rehearsed = standing.accepted.driver
        self._rehearsed.rehearse(True)
        again = [standing.accepted]
        for each in standing.draining:
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
        """Do `go` with what the next program needs to go on with the cores. Not done where there is none, or none that
        can be left. Raises `NotNow`. `several`: that program can go on with more than one.
        """

        async def then() -> None:
            self._require_steady(several)
            standing = self._runner.standing
            if standing is not None and isinstance(standing.current, Leaves):
                # What is counted from here on is counted by the next program.
                await self._traffic.read()
                await self._leave(standing, several, go)

        try:
            await self._runner.leave(then)
        finally:
            self._forget()

    def _require_steady(self, several: bool) -> None:
        if reason := self._runner.unsteady(several):
            raise NotNow(reason)

    async def _leave(self, standing: Standing, several: bool, go: Callable[[Handover], Awaitable[None]]) -> None:
        driver, runs = standing.accepted.driver, [standing.current, *(each.run for each in standing.draining)]
        there = [run for run in runs if isinstance(run, Leaves)]
        kind = Backend.FromString(standing.accepted.request).type
        try:
            try:
                current, *draining = [await self._left(run, kind) for run in there]
                together = await driver.leave() if isinstance(driver, LeavesAll) else None
            except CoreFailed as error:
                raise NotNow(error.text) from error
            self._require_steady(several)
            for one, left in zip(there, (current, *draining), strict=True):
                if self._traffic.known(one) != left.counters:
                    # A reading that took long has just been booked; the next program would book it once more.
                    raise NotNow("the counters of a core are being read")
            for run, each in zip(draining, standing.draining, strict=True):
                _describe(run, each, standing.accepted)
            handover = Handover(run=current, draining=draining)
            if together is not None:
                handover.together.packed = together.packed
                handover.together.descriptors.extend(together.descriptors)
            await go(handover)
        finally:
            # This program goes on, if only to its end.
            for one in there:
                one.stay()

    async def _left(self, run: Leaves, kind: int) -> Run:
        left = await run.leave()
        known = self._traffic.known(run)
        return Run(type=kind, pid=left.pid, core=left.packed, descriptors=left.descriptors, counters=known)

    # What another program has left

    def inherit(self, left: Handover, heirs: Heirs) -> None:
        """The node's last program has left these runs: the current one is what is resumed."""
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
            except Exception as error:  # noqa: BLE001 - told: the program before goes on, or all is started anew
                self._failed(_told(error))
                return None
            there = [*filter(None, [current]), *draining]
            pids = {each.left.pid for each in there}
            heirs.taken(pids)
            if together is not None:
                together.remain(pids)
            for each in there:
                self._traffic.go_on(each.run, each.left.counters)
            self._runner.inherit_draining([_drainer(each, current is not None) for each in draining])
            for each in there:
                each.run.stay()
            return current.run if current else None

        self._runner.inherit(recover)

    def _complete(self, left: Handover) -> None:
        """Runs of a node that was killed have counted this. Raises `CoreFailed` where the current one is not meant."""
        accepted = self._runner.desired.accepted
        if accepted is None or config_of(accepted) != left.run.config:
            raise CoreFailed("another configuration was accepted since")
        for run in (left.run, *left.draining):
            counters = self.booked.get(run.mark)
            if counters is not None:
                run.counters.update({name: value for name, value in counters.items() if name})
            elif run is left.run:
                raise CoreFailed("what was counted of it is not known")
        known = [run for run in left.draining if run.mark in self.booked]
        del left.draining[:]
        left.draining.extend(known)

    async def _regained(self, current: Recovered | None, draining: list[Recovered]) -> list[Recovered]:
        """Of a node that was killed: those that drain, if new connections are known to go to the current one."""
        try:
            if current is not None and not draining and isinstance(current.run, Closes):
                # That node may have kept it closed.
                await current.run.open_door()
            if draining:
                if current is None or self._together is None:
                    raise CoreFailed("the core that served new connections is gone")
                await self._together.regain([*(each.run for each in draining), current.run])
        except CoreFailed as error:
            self.log.warn("listeners are not as they should be, and cores do not drain: {reason}", reason=error.text)
            return []
        return draining

    def require_heir(self) -> None:
        """What was left has been taken by now, or never is."""
        if self._runner.disinherit():
            self._failed(self._runner.status.reason or "there is no record of what runs")

    def _failed(self, reason: str) -> None:
        if self._heirs is not None:
            self._heirs.failed(reason)
        if self._together is not None:
            self._together.remain(())

    async def _recovered(self, left: Handover, plan: Plan, heirs: Heirs) -> tuple[Recovered | None, list[Recovered]]:
        """The current run, and those that drain; not those that have ended, or cannot be gone on with."""
        current = await self._one(left.run, plan, None, heirs)
        draining = []
        for each in left.draining:
            try:
                accepted = await self._runner.plan_again(each.backend, Routing.unpack(each.routing))
            except Exception as error:  # noqa: BLE001 - told, as above; without a way back it ends
                self._go_back(each, error, heirs)
            else:
                draining.append(await self._one(each, accepted.runs, accepted, heirs))
        return current, [each for each in draining if each is not None]

    async def _one(self, left: Run, plan: Plan, accepted: Accepted | None, heirs: Heirs) -> Recovered | None:
        try:
            if not isinstance(plan, Recovers):
                raise CoreFailed("its driver does not know how")
            return Recovered(await plan.recover(left.core), left, accepted)
        except Gone as gone:
            self.log.warn("a core that was left does not go on: {reason}", reason=str(gone))
        except Exception as error:  # noqa: BLE001 - told, as above
            self._go_back(left, error, heirs)
        return None

    def _go_back(self, left: Run, error: Exception, heirs: Heirs) -> None:
        heirs.go_back(_told(error))
        self.log.error("core {pid} is ended: {reason}", pid=left.pid, reason=_told(error))


def _describe(run: Run, drainer: Drainer, current: Accepted) -> None:
    """Note what is to be known of one that drains."""
    run.since = drainer.since
    if not drainer.accepted.means(current):
        run.backend = drainer.accepted.request
    run.routing = drainer.accepted.routing.pack()
    if drainer.way_back is not None:
        run.way_back = drainer.way_back


def _drainer(found: Recovered, on_probation: bool) -> Drainer:
    """`on_probation`: the run that took over from it may be; another one is not."""
    assert found.accepted is not None
    left = found.left
    way_back = left.way_back if on_probation and left.HasField("way_back") else None
    return Drainer(found.run, found.accepted, left.since, way_back)


def _told(error: Exception) -> str:
    return error.text if isinstance(error, NodeError) else repr(error)
