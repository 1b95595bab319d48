"""NODE_QUOTA: counts the bytes of the machine's interfaces, reports them, and closes the inbounds if configured."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from twisted.internet.defer import DeferredLock, ensureDeferred
from twisted.internet.interfaces import IReactorTime

from node.base.errors import CoreFailed
from node.base.logs import Logger
from node.base.periodic import Periodic
from node.contract.abilities import Closes
from node.contract.driver import Generation
from node.contract.generations import Follower, Generations
from node.contract.saved import Changes, Lasting, Saved
from node.events.journal import Journal
from node.events.kinds import Kind
from node.limits.allowance import Allowance, Spent, pack, unpack
from node.machine.interfaces import Interfaces, read_interfaces
from node.state.store import Store
from protos.service_pb2 import BaseInfoResponse

# Seconds between two readings of the interfaces, and two checks of closed inbounds.
TICK = 1.0
# How often the connections of a core that started while the inbounds were closed are ended: its listeners were open
# for a moment, and it may accept a connection from their backlog after the first time.
EMPTIED = 2
# The key of this record among the users' limits in the state file: no user has an empty name.
NODE = ""

_OVER = "NODE_QUOTA of {bytes:,} bytes is used up"
_CLOSED = f"{_OVER}: the node takes no new connections of users until the reset day"
_NEAR = "four fifths of NODE_QUOTA ({bytes:,} bytes) are used"


def measure() -> tuple[float, Interfaces]:
    """The time, in Unix seconds, and the kernel's counters. Raises `OSError`."""
    return time.time(), read_interfaces()


class NodeQuotaLimit(Lasting):
    """Enforces NODE_QUOTA. `interval`: seconds between two writes to the state file; events are written at once."""

    title = "NODE_QUOTA"
    log = Logger()

    def __init__(
        self,
        clock: IReactorTime,
        allowance: Allowance,
        generations: Generations,
        store: Store,
        journal: Journal,
        interval: float,
        read: Callable[[], tuple[float, Interfaces]] = measure,
    ) -> None:
        self._clock = clock
        self._allowance = allowance
        self._store = store
        self._journal = journal
        self._interval = interval
        self._read = read
        self._gate = InboundGate(generations)
        self._spent = Spent()
        self._kept = -math.inf
        # Interfaces in NODE_QUOTA_INTERFACE that the machine does not have.
        self._lacking: list[str] = []
        self._work = Periodic("checking NODE_QUOTA", self._tick, TICK, clock)

    @property
    def warnings(self) -> list[str]:
        """Warnings for `info`."""
        lacking = [f"NODE_QUOTA_INTERFACE: there is no interface {name}" for name in self._lacking]
        over = _CLOSED if self._allowance.closes else _OVER
        used_up = [over.format(bytes=self._allowance.bytes)] if self._allowance.bytes and self._spent.over else []
        return [*used_up, *self._gate.warnings, *lacking, *self._work.warnings]

    def summary(self, info: BaseInfoResponse) -> None:
        """Add the usage, if there is a quota."""
        if self._allowance.bytes:
            info.limits.node.CopyFrom(self._spent.summary(self._allowance))

    def start(self) -> None:
        if self._allowance.bytes:
            self._work.start()
            self._look_now()

    def stop(self) -> None:
        """The node ends: save what was carried until now."""
        if self._work.running:
            self._work.stop()
            self._look_now()
            self._note()

    def leave(self) -> None:
        self.stop()

    def restore(self, saved: Saved) -> None:
        """Load the record of an earlier node, and count what moved since, as far as the kernel knows."""
        if (packed := dict(saved.limits).get(NODE)) is not None:
            self._spent = unpack(packed)
        if self._work.running:
            self._look_now()

    def save(self, changes: Changes) -> None:
        changes.limits |= self._record()

    def _record(self) -> dict[str, bytes | None]:
        return {NODE: pack(self._spent)} if self._spent.seen else {}

    def _look_now(self) -> None:
        """Read the interfaces; if that fails, log it and go on with the last reading."""
        try:
            self._look()
        except OSError as error:
            self.log.error(
                "NODE_QUOTA: the counters of network interfaces cannot be read: {fault}; the last reading counts",
                fault=error,
            )
            self._judge()

    async def _tick(self) -> None:
        self._look()
        await self._gate.keep()

    def _look(self) -> None:
        """Read the interfaces, add what has moved, and act on it."""
        now, interfaces = self._read()
        spent = self._spent
        self._lacking = sorted({*self._allowance.interfaces} - interfaces.carried.keys())
        moved = spent.read(interfaces, self._allowance.counted(interfaces))
        turned = spent.book(moved, now, self._allowance.reset_day, self._allowance.zone)
        if turned:
            self._journal.tell(Kind.NODE_QUOTA_BEGUN, "a new period of NODE_QUOTA has begun")
        if self._judge() or turned or self._clock.seconds() >= self._kept + self._interval:
            self._note()

    def _judge(self) -> bool:
        """Report what has happened, and close or open the inbounds. Returns whether anything was reported."""
        kind = self._spent.judge(self._allowance)
        if kind is not None:
            quota = self._spent.summary(self._allowance)
            fields = {"bytes": quota.bytes, "used": quota.used, "resets_at": quota.resets_at}
            text = _NEAR
            if kind is Kind.NODE_QUOTA_OVER:
                text = _CLOSED if quota.closed else _OVER
                fields["closed"] = quota.closed
            self._journal.tell(kind, text.format(bytes=quota.bytes), **fields)
        self._gate.set(self._spent.over and self._allowance.closes)
        return kind is not None

    def _note(self) -> None:
        self._kept = self._clock.seconds()
        self._store.limits(self._record())


class InboundGate(Follower):
    """NODE_QUOTA_ACTION=close: closes the inbounds of all cores to new connections; open connections go on.

    New cores are included: call `keep` periodically.
    """

    log = Logger()

    def __init__(self, generations: Generations) -> None:
        self._generations = generations
        self.closed = False
        # Cores whose inbounds are closed, and how often their connections are still to be ended.
        self._shut: dict[Generation, int] = {}
        self._faults: dict[Generation, str] = {}
        self._lock = DeferredLock()
        generations.follow(self)

    @property
    def warnings(self) -> list[str]:
        """Warnings for `info`: where users still get in."""
        if not self.closed:
            return []
        open_ports = {port for run in self._shut if isinstance(run, Closes) for port in run.open_ports}
        ports = ", ".join(map(str, sorted(open_ports)))
        udp = f"NODE_QUOTA is used up, but users still get in by UDP, port {ports}: datagrams do not show who is new"
        failed = [f"NODE_QUOTA is used up, but new connections get in: {fault}" for fault in set(self._faults.values())]
        return [udp, *failed] if ports else failed

    def set(self, closed: bool) -> None:
        """Close the inbounds to new connections, or open them."""
        if closed != self.closed:
            self.closed = closed
            self._shut |= dict.fromkeys(self._generations.serving, 0) if closed else {}
            self.moved()

    async def keep(self) -> None:
        """Close or open the inbounds of each core that is not in the wanted state yet."""
        async with self._lock:
            serving = self._generations.serving
            for known in (self._shut, self._faults):
                for gone in known.keys() - {*serving}:
                    del known[gone]
            for run in serving:
                if self.closed or run in self._shut:
                    await self._set(run)

    async def _set(self, run: Generation) -> None:
        try:
            if not isinstance(run, Closes):
                raise CoreFailed("this core cannot close its inbounds")
            if self.closed:
                await self._close(run)
            else:
                await run.open_door()
                self._shut.pop(run, None)
            self._faults.pop(run, None)
        except CoreFailed as error:
            if self._faults.get(run) != error.text and run.alive:
                done = "closed" if self.closed else "opened again"
                self.log.warn("NODE_QUOTA: inbounds could not be {done}: {fault}; retrying", done=done, fault=error)
            self._faults[run] = error.text

    async def _close(self, run: Closes) -> None:
        times = self._shut.setdefault(run, EMPTIED)
        await run.close_door(empty=times > 0)
        self._shut[run] = max(0, times - 1)

    def moved(self) -> None:
        if self.closed or self._shut:
            ensureDeferred(self.keep()).addErrback(
                lambda failure: self.log.failed("NODE_QUOTA: closing or opening inbounds failed; retrying", failure)
            )
