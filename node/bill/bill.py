"""Keeps the sums of the bill, and answers GetBill."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from datetime import date

from twisted.internet.interfaces import IReactorTime

from node.base.errors import InvalidRequest, shown
from node.base.logs import Logger
from node.base.sockets import Passed
from node.bill.days import Days, count, spread
from node.bill.reckoning import explain
from node.contract.abilities import NamesTransports
from node.contract.counters import Scope
from node.contract.generations import Generations
from node.contract.saved import Changes, Lasting, Saved
from node.limits.allowance import UNREAD, Allowance, keep, kept_of
from node.limits.periods import Period, begin_of, day_of, period
from node.machine.interfaces import Interfaces, carried_between, read_interfaces
from node.state.store import Store
from node.traffic.polling import Traffic, Watcher
from node.traffic.sums import Sums
from protos import service_pb2
from protos.kept_pb2 import KeptReading
from protos.service_pb2 import BilledBytes, BillRequest

# The key of the last reading among the days in the state file.
READING = ""


def read() -> tuple[float, Interfaces]:
    """How long the machine has been up, in seconds, and the counters of its interfaces. Raises `OSError`."""
    return time.clock_gettime(time.CLOCK_BOOTTIME), read_interfaces()


@dataclass(frozen=True)
class Sources:
    """`controllers`: bytes of the node's own connections. `read` reads the interfaces; `now` is in Unix seconds."""

    generations: Generations
    traffic: Traffic
    controllers: Passed
    read: Callable[[], tuple[float, Interfaces]] = read
    now: Callable[[], float] = time.time


class Bill(Lasting, Watcher):
    """Sums by day: what the core has counted, and what the interfaces that count for NODE_QUOTA have carried.

    They are saved with the rows that they include. `interval`: seconds between two readings of the interfaces.
    """

    title = "the bill"
    log = Logger()

    def __init__(
        self, clock: IReactorTime, sources: Sources, store: Store, allowance: Allowance, interval: float
    ) -> None:
        self._clock = clock
        self._sources = sources
        self._store = store
        self._allowance = allowance
        self._interval = interval
        self._days = Days()
        self._last, self._uptime = UNREAD, 0.0
        # When the sums began, in Unix seconds.
        self._began = 0.0
        self._looked = -math.inf
        # Of the node's own connections, until the last reading.
        self._passed = Passed()
        self._fault = ""
        # Whether bytes were booked since the last save.
        self._unsaved = False
        sources.traffic.watched(self)

    @property
    def warnings(self) -> list[str]:
        """Warnings for `info`."""
        return [self._fault] if self._fault else []

    def start(self) -> None:
        self._save(look=True)

    def stop(self) -> None:
        """The node ends: save what was carried until now."""
        self._save(look=True)

    def leave(self) -> None:
        self.stop()

    def restore(self, saved: Saved) -> None:
        """Add the days of an earlier node. If this node has read the interfaces already, it goes on from there."""
        rows = dict(saved.days)
        kept = KeptReading.FromString(rows.pop(READING, b""))
        self._days.restore(rows.items())
        self._began = kept.began or self._began
        if not self._last.boot and kept.boot:
            self._last, self._uptime = kept_of(kept), kept.uptime

    def save(self, changes: Changes) -> None:
        changes.days |= {**self._days.everything(), READING: self._reading()}

    # Bytes

    def booked(self, moved: Mapping[Scope, Sums]) -> None:
        self._unsaved |= bool(moved)
        day = self._days.of(self._today())
        for scope, sums in moved.items():
            up, down = sum(sums.up.values()), sum(sums.down.values())
            if scope is Scope.USER:
                count(day.users, up, down)
            elif scope is Scope.INBOUND:
                count(day.inbounds, up, down)
            elif scope is Scope.OUTBOUND:
                count(day.outbounds, down, up)

    def saving(self, keys: Collection[str]) -> None:
        due = self._clock.seconds() >= self._looked + self._interval
        if self._unsaved or due:
            self._save(look=due)

    def _save(self, look: bool) -> None:
        """Save what has changed: days and reading together, so that no byte of the interfaces counts twice."""
        if look:
            self._look()
        self._unsaved = False
        self._store.days({**self._days.changes(), READING: self._reading()})

    def _reading(self) -> bytes:
        kept = KeptReading(began=self._began, uptime=self._uptime)
        keep(kept, self._last)
        return kept.SerializeToString(deterministic=True)

    def _look(self) -> None:
        """Add what the interfaces have carried since the last reading; if they cannot be read, the last one stays."""
        self._looked = self._clock.seconds()
        try:
            uptime, interfaces = self._sources.read()
        except OSError as error:
            text = f"the bill lacks bytes: the counters of network interfaces cannot be read: {error}"
            if text != self._fault:
                self.log.error("{text}", text=text)
            self._fault = text
            return
        self._fault = ""
        self._add(uptime, interfaces)
        day = self._days.of(self._today())
        passed = self._sources.controllers
        count(day.controllers, passed.received - self._passed.received, passed.sent - self._passed.sent)
        self._passed = Passed(passed.received, passed.sent)
        serving = self._sources.generations.serving
        used = {name for run in serving if isinstance(run, NamesTransports) for name in run.transports}
        day.transports.extend(sorted(used - {*day.transports}))

    def _add(self, uptime: float, interfaces: Interfaces) -> None:
        now, last = self._sources.now(), self._last
        if last.boot:
            # By the clock since boot, as the time of day may have been set.
            seconds = max(0.0, uptime - self._uptime) if interfaces.boot == last.boot else uptime
            carried = carried_between(last, interfaces, self._allowance.counted(interfaces))
            for day, part in spread(carried, now - seconds, now, self._allowance.zone):
                count(self._days.of(day).interfaces, *part)
        self._last, self._uptime = interfaces, uptime
        self._began = self._began or now

    def _today(self) -> date:
        return day_of(self._sources.now(), self._allowance.zone)

    # Requests

    async def answer(self, request: BillRequest) -> service_pb2.Bill:
        """GetBill. Raises `InvalidRequest`."""
        first = self._first(request.since)
        await self._sources.traffic.read()
        return self.current(first)

    def current(self, first: date | None = None) -> service_pb2.Bill:
        """The bill since a day, or since NODE_QUOTA's month began, with what the counters had when last read."""
        self._look()
        zone, now, today = self._allowance.zone, self._sources.now(), self._today()
        first = first or self._first("")
        total = self._days.between(first, today)
        known = self._days.first(first) or today
        since = self._began if day_of(self._began, zone) == known else begin_of(known, zone)
        bill = service_pb2.Bill(
            since=int(min(since, now)),
            until=int(now),
            timezone=str(zone),
            users=_billed(total.users.received, total.users.sent),
            inbounds=_billed(total.inbounds.received, total.inbounds.sent),
            outbounds=_billed(total.outbounds.received, total.outbounds.sent),
            interfaces=_billed(total.interfaces.received, total.interfaces.sent),
            controllers=_billed(total.controllers.received, total.controllers.sent),
            names=sorted({*self._allowance.counted(self._last)} & self._last.carried.keys()),
            transports=sorted(total.transports),
        )
        explain(bill)
        return bill

    def _first(self, since: str) -> date:
        """The first day of a request. Raises `InvalidRequest`."""
        zone = self._allowance.zone
        if not since:
            return day_of(period(self._sources.now(), Period.MONTH, self._allowance.reset_day, zone)[0], zone)
        try:
            first = date.fromisoformat(since)
        except ValueError:
            raise InvalidRequest(f"{shown(since)} is not a date: write YYYY-MM-DD") from None
        if first > self._today():
            raise InvalidRequest(f"{first} is in the future: the node's date is {self._today()} ({zone})")
        return first


def _billed(received: int, sent: int) -> BilledBytes:
    return BilledBytes(received=received, sent=sent)
