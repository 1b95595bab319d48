"""The bill on a node: counted by day, kept over restarts and kills, and sane whatever clocks and interfaces do."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime, tzinfo
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from twisted.internet.defer import ensureDeferred
from twisted.internet.task import Clock

from node.base.errors import InvalidRequest
from node.base.sockets import Passed
from node.bill.bill import READING, Bill, Sources
from node.contract.counters import Scope
from node.contract.generations import Generations
from node.contract.saved import Saved
from node.limits.allowance import Allowance
from node.limits.periods import zone
from node.machine.interfaces import Carried, Interfaces
from node.traffic.sums import Sums
from protos import service_pb2
from protos.service_pb2 import BilledBytes, BillRequest
from tests.harness.whole import everything

INTERVAL = 10.0
NOON = datetime(2026, 11, 10, 12, tzinfo=UTC).timestamp()
DAY = 86_400.0


class Machine:
    """The kernel's counters and clocks, the traffic that the core counts, and what is on disk."""

    def __init__(self, allowance: Allowance | None = None) -> None:
        self.clock: Any = Clock()
        self.allowance = allowance or Allowance()
        self.boot = "first"
        self.wall, self.uptime = NOON, 1000.0
        self.counters = {"eth0": Carried(500, 500), "lo": Carried(9, 9)}
        self.devices = frozenset({"eth0", "eth1"})
        self.fault: OSError | None = None
        self.disk: dict[str, bytes] = {}
        self.generations = Generations()
        self.passed = Passed()
        self.readings = 0
        self.bill = self.started()

    def started(self) -> Bill:
        """A node that starts, with what is on disk."""
        self.passed = Passed()
        sources = Sources(self.generations, self, self.passed, self.read_interfaces, lambda: self.wall)  # type: ignore[arg-type]
        bill = Bill(self.clock, sources, self, self.allowance, INTERVAL)  # type: ignore[arg-type]
        bill.restore(Saved(days=(*self.disk.items(),)))
        bill.start()
        self.bill = bill
        return bill

    def watched(self, _: object) -> None:
        """As traffic does."""

    async def read(self) -> bool:
        """As traffic does."""
        self.readings += 1
        return False

    def read_interfaces(self) -> tuple[float, Interfaces]:
        if self.fault is not None:
            raise self.fault
        return self.uptime, Interfaces(self.boot, dict(self.counters), self.devices & self.counters.keys())

    def days(self, records: Mapping[str, bytes | None]) -> None:
        """Save, as the store does."""
        for key, packed in records.items():
            if packed is None:
                self.disk.pop(key, None)
            else:
                self.disk[key] = packed

    def pass_time(self, seconds: float, save: bool = True) -> None:
        self.clock.advance(seconds)
        self.wall += seconds
        self.uptime += seconds
        if save:
            self.bill.saving([])

    def carry(self, received: int, sent: int, name: str = "eth0") -> None:
        before = self.counters.get(name, Carried(0, 0))
        self.counters[name] = Carried(before.received + received, before.sent + sent)

    def count(self, up: int, down: int) -> None:
        """The core counts bytes of a user, as traffic reports them, and saves them."""
        sums = {scope: Sums({"a": up}, {"a": down}) for scope in Scope}
        self.bill.booked(sums)
        self.bill.saving(["a"])

    def since(self, date: str = "") -> service_pb2.Bill:
        found: list[service_pb2.Bill] = []
        ensureDeferred(self.bill.answer(BillRequest(since=date))).addCallback(found.append)
        return found[0]

    def carried(self, date: str = "2026-11-01") -> tuple[int, int]:
        bill = self.since(date)
        return bill.interfaces.received, bill.interfaces.sent


def test_what_is_counted() -> None:
    """From the first start: bytes before it do not count, and neither does loopback."""
    machine = Machine()
    machine.carry(21, 20)
    machine.carry(7, 7, "lo")
    machine.count(1, 9)
    machine.passed.received, machine.passed.sent = 2, 3
    machine.pass_time(5)
    bill = machine.since()
    assert machine.readings == 1
    assert bill.users == bill.inbounds == BilledBytes(received=1, sent=9)
    assert bill.outbounds == BilledBytes(received=9, sent=1)
    assert (bill.interfaces, bill.controllers) == (BilledBytes(received=21, sent=20), BilledBytes(received=2, sent=3))
    assert (bill.core, bill.headers, list(bill.names)) == (20, 16, ["eth0"])
    assert (bill.since, bill.until, bill.timezone) == (NOON, NOON + 5, "UTC")
    assert not machine.bill.warnings


def test_by_day() -> None:
    """A day begins at midnight in the zone; the month on NODE_QUOTA's day."""
    berlin = zone("Europe/Berlin")
    machine = Machine(Allowance(reset_day=11, zone=berlin))
    machine.carry(1, 0)
    machine.count(1, 0)
    machine.pass_time(11 * 3600 - 1)
    assert machine.since().since == NOON
    machine.pass_time(INTERVAL)
    machine.carry(10, 0)
    machine.count(10, 0)
    machine.pass_time(INTERVAL)
    bill = machine.since()
    assert (bill.users.received, bill.interfaces.received, bill.timezone) == (10, 10, "Europe/Berlin")
    assert bill.since == NOON + 11 * 3600
    assert (machine.carried("2026-11-10"), machine.carried("2026-11-11")) == ((11, 0), (10, 0))
    for wrong, text in (("yesterday", "is not a date: write YYYY-MM-DD"), ("2026-11-12", "is in the future")):
        with pytest.raises(InvalidRequest, match=text):
            machine.bill._first(wrong)


def test_a_restart_of_the_node() -> None:
    """What was carried meanwhile counts; it is spread over the days on which the node was away."""
    machine = Machine()
    machine.carry(5, 5)
    machine.bill.stop()
    machine.carry(480, 48)
    machine.pass_time(2 * DAY, save=False)
    machine.started()
    assert machine.carried() == (485, 53)
    assert machine.carried("2026-11-12") == (120, 12)
    assert everything(machine.bill).days == {**machine.disk, **everything(machine.bill).days}


def test_a_kill() -> None:
    """Days and the reading are saved together: no byte of the interfaces is lost or counts twice."""
    machine = Machine()
    for number in range(25):
        machine.carry(7, 1)
        machine.count(1, 1)
        machine.pass_time(1)
        if number % 4 == 0:
            machine.started()
    assert machine.carried() == (175, 25)
    assert machine.since("2026-11-01").users.received == 25


def test_a_kill_without_bytes_of_users() -> None:
    """The rows of inbounds and outbounds are on disk, and so is their part of the bill."""
    machine = Machine()
    machine.bill.booked({Scope.INBOUND: Sums({"in": 5}, {}), Scope.OUTBOUND: Sums({"out": 7}, {})})
    machine.bill.saving([])
    machine.started()
    bill = machine.since()
    assert (bill.inbounds.received, bill.outbounds.sent) == (5, 7)


def test_a_restart_of_the_machine() -> None:
    """The counters begin at zero. What was not read before is not known."""
    machine = Machine()
    machine.carry(100, 100)
    machine.bill.stop()
    machine.boot, machine.uptime, machine.wall = "second", 30.0, NOON + DAY
    machine.counters = {"eth0": Carried(3, 4), "lo": Carried(0, 0)}
    machine.started()
    assert machine.carried() == (103, 104)
    # It was up for half a minute: nothing is of the day before.
    assert machine.carried("2026-11-11") == (3, 4)


def test_interfaces_that_come_and_go() -> None:
    machine = Machine()
    machine.carry(1, 1, "eth1")
    machine.pass_time(INTERVAL)
    assert machine.carried() == (1, 1)
    del machine.counters["eth1"]
    machine.pass_time(INTERVAL)
    machine.carry(2, 2, "eth1")
    machine.carry(3, 3)
    machine.pass_time(INTERVAL)
    assert machine.carried() == (6, 6)
    # A driver that is loaded again counts from zero.
    machine.counters["eth0"] = Carried(10, 0)
    assert machine.carried() == (16, 6)
    machine.counters.clear()
    assert machine.carried() == (16, 6)


def test_interfaces_that_count() -> None:
    """Those of NODE_QUOTA_INTERFACE."""
    machine = Machine(Allowance(interfaces=("eth1", "wan")))
    machine.carry(5, 5)
    machine.carry(1, 2, "eth1")
    bill = machine.since()
    assert (bill.interfaces, list(bill.names)) == (BilledBytes(received=1, sent=2), ["eth1"])


def test_a_clock_that_is_set() -> None:
    """Bytes are of the days that the clock shows; none is lost, and none is spread over years."""
    machine = Machine()
    machine.carry(1, 1)
    machine.pass_time(INTERVAL)
    machine.wall = 60.0
    machine.carry(10, 10)
    machine.count(10, 10)
    bill = machine.since()
    assert bill.since <= bill.until == 60
    machine.pass_time(INTERVAL)
    machine.wall = NOON + INTERVAL
    machine.carry(100, 100)
    machine.pass_time(INTERVAL)
    assert machine.carried() == (101, 101)
    assert machine.carried("1970-01-01") == (111, 111)
    machine.wall += 10 * DAY
    machine.carry(1000, 1000)
    assert machine.carried("2026-11-20") == (1000, 1000)


def test_a_clock_that_was_ahead_at_first() -> None:
    """The first start does not count as the beginning then."""
    machine = Machine()
    machine.disk.clear()
    machine.wall = NOON + 400 * DAY
    machine.started()
    machine.wall = NOON
    machine.carry(5, 5)
    machine.pass_time(INTERVAL)
    bill = machine.since()
    assert (bill.since, bill.interfaces.sent) == (NOON - 12 * 3600, 5)
    assert machine.since("2020-01-01").since == NOON - 12 * 3600


def test_counters_that_cannot_be_read() -> None:
    """A warning; when they can be read again nothing is missing."""
    machine = Machine()
    machine.fault = OSError("no /proc")
    machine.carry(5, 5)
    machine.pass_time(INTERVAL)
    machine.count(2, 2)
    assert machine.bill.warnings == [
        "the bill lacks bytes: the counters of network interfaces cannot be read: no /proc"
    ]
    assert machine.since().users.received == 2
    machine.fault = None
    assert (machine.carried(), machine.bill.warnings) == ((5, 5), [])


def test_days_that_are_loaded_late() -> None:
    """After a disk that could not be read: this node's reading goes on."""
    machine = Machine()
    machine.carry(5, 5)
    machine.bill.stop()
    disk, machine.disk = machine.disk, {}
    machine.started()
    machine.carry(1, 1)
    machine.pass_time(INTERVAL)
    machine.bill.restore(Saved(days=(*disk.items(),)))
    machine.carry(1, 1)
    assert machine.carried() == (7, 7)


def test_transports() -> None:
    """Those of all cores that served on one of the days."""
    machine = Machine()
    core: Any = Named({"tls", "tcp"})
    machine.generations.adopt(core)
    machine.pass_time(INTERVAL)
    core.transports = {"xhttp"}
    machine.pass_time(DAY)
    assert list(machine.since().transports) == ["tcp", "tls", "xhttp"]
    assert list(machine.since("2026-11-11").transports) == ["xhttp"]


def test_little_is_written() -> None:
    """One day and the reading at a time, and while nothing moves not more often than the interfaces are read."""
    machine = Machine()
    machine.pass_time(INTERVAL)
    machine.disk.clear()
    for _ in range(9):
        machine.pass_time(1)
    assert not machine.disk
    machine.pass_time(1)
    assert {*machine.disk} == {READING, "2026-11-10"}
    assert sum(map(len, machine.disk.values())) < 200


class Named:
    """A core that knows how users connect."""

    def __init__(self, transports: set[str]) -> None:
        self.transports = transports


class NothingIsLost(RuleBasedStateMachine):
    """Whatever happens, the sum of all days is what was read, and no figure decreases."""

    @initialize(here=st.sampled_from(["UTC", "America/Sao_Paulo"]).map(zone))
    def begin(self, here: tzinfo) -> None:
        self.machine = Machine(Allowance(zone=here))
        self.expected = [0, 0]
        self.users = 0
        self.before = (0, 0)

    @rule(received=st.integers(0, 2**40), sent=st.integers(0, 2**40))
    def carries(self, received: int, sent: int) -> None:
        self.machine.carry(received, sent)
        self.expected[0] += received
        self.expected[1] += sent

    @rule(up=st.integers(0, 2**40))
    def counts(self, up: int) -> None:
        self.machine.count(up, 0)
        self.users += up

    @rule(seconds=st.floats(0, 3 * DAY))
    def time_passes(self, seconds: float) -> None:
        self.machine.pass_time(seconds)

    @rule(seconds=st.floats(-40 * DAY, 40 * DAY))
    def clock_is_set(self, seconds: float) -> None:
        self.machine.wall = max(0.0, self.machine.wall + seconds)

    @rule()
    def node_is_killed(self) -> None:
        self.machine.started()

    @rule()
    def machine_restarts(self) -> None:
        self.machine.bill.stop()
        self.machine.boot += "x"
        self.machine.uptime = 0.0
        self.machine.counters = dict.fromkeys(self.machine.counters, Carried(0, 0))
        self.machine.started()

    @rule(name=st.sampled_from(["eth1", "lo"]))
    def another_comes_or_goes(self, name: str) -> None:
        if name in self.machine.counters:
            # A node that is killed between two readings does not know what an interface carried that is gone.
            self.machine.pass_time(INTERVAL)
            del self.machine.counters[name]
            self.machine.pass_time(INTERVAL)
        else:
            self.machine.carry(1, 1, name)
            if name != "lo":
                self.expected = [each + 1 for each in self.expected]

    @invariant()
    def all_is_there(self) -> None:
        days = self.machine.bill._days
        self.machine.bill.current()
        everything = [*days._days.values()]
        found = [sum(day.interfaces.received for day in everything), sum(day.interfaces.sent for day in everything)]
        assert found == self.expected
        assert sum(day.users.received for day in everything) == self.users
        bill = self.machine.bill.current()
        assert bill.since <= bill.until


TestNothingIsLost = NothingIsLost.TestCase
