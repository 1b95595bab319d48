"""NODE_QUOTA: counts the bytes of the machine's interfaces, reports them, and closes the inbounds if configured."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping

from twisted.internet.interfaces import IReactorTime

from node.base.logs import Logger
from node.base.periodic import Periodic
from node.contract.generations import Generations
from node.contract.lasting import Lasting
from node.contract.saved import Changes, Saved
from node.events.journal import Tells
from node.events.kinds import Kind
from node.limits.allowance import Allowance, News, Spent, pack, unpack
from node.limits.inbound_gate import InboundGate
from node.machine.interfaces import Interfaces, of_machine, read_interfaces
from node.state.store import Store
from protos.service_pb2 import BaseInfoResponse

# Seconds between two readings of the interfaces, and two checks of closed inbounds.
TICK = 1.0
# The key of this record among the users' limits in the state file: no user has an empty name.
NODE = ""

_OVER = "NODE_QUOTA of {bytes:,} bytes is used up"
_CLOSED = f"{_OVER}: the node takes no new connections of users until the reset day"
_TEXTS = {News.NEAR: "four fifths of NODE_QUOTA ({bytes:,} bytes) are used", News.OVER: _OVER}
_KINDS = {News.NEAR: Kind.NODE_QUOTA_NEAR, News.OVER: Kind.NODE_QUOTA_OVER}


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
        journal: Tells,
        *,
        interval: float,
        read: Callable[[], Interfaces] = read_interfaces,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._clock = clock
        self._allowance = allowance
        self._store = store
        self._journal = journal
        self._interval = interval
        self._read = read
        self._now = now
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
        return [*self._over(), *self._gate.warnings, *lacking, *self._work.warnings]

    def summary(self, info: BaseInfoResponse) -> None:
        """Add the usage, if there is a quota."""
        if self._allowance.bytes:
            info.limits.node.CopyFrom(self._spent.summary(self._allowance))

    def start(self) -> None:
        if self._allowance.bytes:
            self._work.start()

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
        if self._allowance.bytes:
            self._look_now()

    def save(self, changes: Changes) -> None:
        changes.limits |= self._record()

    def _record(self) -> Mapping[str, bytes]:
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
        interfaces, spent = self._read(), self._spent
        named = self._allowance.interfaces
        self._lacking = sorted({*named} - interfaces.carried.keys())
        moved = spent.meter.read(interfaces.boot, interfaces.carried, named or of_machine(interfaces))
        turned = spent.book(moved, self._now(), self._allowance.reset_day)
        if turned:
            self._journal.tell(Kind.NODE_QUOTA_BEGUN, "a new period of NODE_QUOTA has begun")
        if self._judge() or turned or self._clock.seconds() >= self._kept + self._interval:
            self._note()

    def _judge(self) -> bool:
        """Report what has happened, and close or open the inbounds. Returns whether anything was reported."""
        news = self._spent.judge(self._allowance)
        if news is not None:
            self._tell(news)
        self._gate.set(self._spent.over and self._allowance.closes)
        return news is not None

    def _tell(self, news: News) -> None:
        quota = self._spent.summary(self._allowance)
        text = _CLOSED if quota.closed else _TEXTS[news]
        fields = {"bytes": quota.bytes, "used": quota.used, "resets_at": quota.resets_at}
        if news is News.OVER:
            fields["closed"] = quota.closed
        self._journal.tell(_KINDS[news], text.format(bytes=quota.bytes), **fields)

    def _over(self) -> list[str]:
        if not self._spent.over or not self._allowance.bytes:
            return []
        return [(_CLOSED if self._allowance.closes else _OVER).format(bytes=self._allowance.bytes)]

    def _note(self) -> None:
        self._kept = self._clock.seconds()
        self._store.limits(self._record())
