"""The node's own quota: counts what the machine carries, tells of it, and closes the door if that is asked."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping

from twisted.internet.interfaces import IReactorTime

from node.backend.generations import Generations
from node.events.journal import Tells
from node.events.kinds import Kind
from node.limits.allowance import Allowance, News, Spent, pack, unpack
from node.limits.door import Door
from node.logs import Logger
from node.machine.interfaces import Interfaces, of_machine, read_interfaces
from node.periodic import Periodic
from node.state.store import Store
from protos.service_pb2 import NodeQuota

# Seconds between two looks at the interfaces, and at the listeners of a core that is closed.
TICK = 1.0
# The row of the node's own record among those of users' limits: no user has an empty name.
NOBODY = ""

_OVER = "the node has used up its own quota of {bytes:,} bytes"
_CLOSED = f"{_OVER}, and takes no new connections"
_TEXTS = {News.NEAR: "the node has used four fifths of its own quota of {bytes:,} bytes", News.OVER: _OVER}
_KINDS = {News.NEAR: Kind.NODE_QUOTA_NEAR, News.OVER: Kind.NODE_QUOTA_OVER}


class OwnLimit:
    """`interval`: seconds between two writes to the state file, but for what happens."""

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
        self._door = Door(generations)
        self._spent = Spent()
        self._kept = -math.inf
        # Interfaces that the operator names and the machine does not have.
        self._lacking: list[str] = []
        self._work = Periodic("looking at the node's own quota", self._tick, TICK, clock)

    @property
    def warnings(self) -> list[str]:
        """What an operator should know of it."""
        lacking = [f"NODE_QUOTA_INTERFACE: there is no interface {name}" for name in self._lacking]
        return [*self._over(), *self._door.warnings, *lacking, *self._work.warnings]

    @property
    def summary(self) -> NodeQuota | None:
        """What was used, if there is a limit."""
        return self._spent.summary(self._allowance) if self._allowance.bytes else None

    def start(self) -> None:
        if self._allowance.bytes:
            self._work.start()

    def stop(self) -> None:
        """The node ends: what moved until now is noted."""
        if self._work.running:
            self._work.stop()
            self._look_now()
            self._note()

    def restore(self, packed: bytes | None) -> None:
        """What an earlier node left. What moved meanwhile is counted, as far as the kernel knows."""
        if packed is not None:
            self._spent = unpack(packed)
        if self._allowance.bytes:
            self._look_now()

    def everything(self) -> Mapping[str, bytes]:
        """All that has to outlive the node."""
        return {NOBODY: pack(self._spent)} if self._spent.seen else {}

    def _look_now(self) -> None:
        """Whatever the kernel says, the rest of the node goes on."""
        try:
            self._look()
        except OSError as error:
            self.log.error("what interfaces have carried cannot be read: {fault}", fault=error)
            # What is known holds.
            self._judge()

    async def _tick(self) -> None:
        self._look()
        await self._door.keep()

    def _look(self) -> None:
        """Book what has moved, and see what follows."""
        interfaces, spent = self._read(), self._spent
        named = self._allowance.interfaces
        self._lacking = sorted({*named} - interfaces.carried.keys())
        moved = spent.meter.read(interfaces.boot, interfaces.carried, named or of_machine(interfaces))
        turned = spent.book(moved, self._now(), self._allowance.reset_day)
        if turned:
            self._journal.tell(Kind.NODE_QUOTA_BEGUN, "another period of the node's own quota has begun")
        if self._judge() or turned or self._clock.seconds() >= self._kept + self._interval:
            self._note()

    def _judge(self) -> bool:
        """Whether something has happened: then it is told. The door is as it is to be."""
        news = self._spent.judge(self._allowance)
        if news is not None:
            self._tell(news)
        self._door.set(self._spent.over and self._allowance.closes)
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
        self._store.limits(self.everything())
