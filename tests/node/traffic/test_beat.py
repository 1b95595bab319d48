"""How often counters are read: by the cost of the last readings, and never more often than needed."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from twisted.internet.task import Clock

from node.base import proc
from node.traffic.beat import LAST, SHARE, SHORTEST, Beat, Looks, Spent, cost, interval

CORE, OTHER = 1001, 1002
seconds = st.floats(0, 100)


@given(st.lists(seconds, max_size=LAST), st.floats(0.1, 3600))
def test_the_interval_is_bounded(costs: Sequence[float], longest: float) -> None:
    assert min(SHORTEST, longest) <= interval(costs, longest) <= longest


@given(st.lists(seconds, min_size=LAST, max_size=LAST), st.floats(SHORTEST, 3600))
def test_readings_take_a_small_share(costs: Sequence[float], longest: float) -> None:
    """At most SHARE of a processor, or as rarely as is allowed; and one reading alone decides nothing."""
    found = interval(costs, longest)
    assert sorted(costs)[LAST // 2] <= SHARE * found * (1 + 1e-9) or found == longest
    assert found == interval([min(costs), *sorted(costs)[1:-1], 1000.0], longest)


@given(st.lists(seconds, min_size=1, max_size=LAST), seconds)
def test_dearer_readings_are_no_more_frequent(costs: Sequence[float], more: float) -> None:
    assert interval([each + more for each in costs], 3600) >= interval(costs, 3600)


@given(rate=st.floats(0, 2), calm=st.floats(0.1, 10), took=st.floats(0, 1), own=st.floats(0, 1), cores=st.floats(0, 1))
def test_other_work_is_no_cost(rate: float, calm: float, took: float, own: float, cores: float) -> None:
    """A core that is busy with its users' bytes all the time makes readings no dearer."""
    rest: Looks = {1: Spent(0, 5), 2: Spent(0, 7)}
    begun: Looks = {1: Spent(calm, 5 + rate * calm), 2: Spent(calm, 7)}
    ended: Looks = {1: Spent(calm + took, 5 + rate * (calm + took) + own), 2: Spent(calm + took, 7 + cores)}
    assert cost(rest, begun, ended) == pytest.approx(own + cores, abs=1e-6)


def test_processes_come_and_go() -> None:
    """A new process is looked at as if it had been idle; one that ended meanwhile costs nothing; none costs less."""
    assert cost({}, {1: Spent(1, 5)}, {1: Spent(2, 6)}) == 1
    assert cost({1: Spent(0, 4)}, {1: Spent(1, 5)}, {2: Spent(2, 9)}) == 0
    assert cost({1: Spent(0, 0)}, {1: Spent(1, 5)}, {1: Spent(2, 6)}) == 0


class Machine:
    """Processes and what they have used."""

    def __init__(self, patch: pytest.MonkeyPatch, longest: float = 10.0) -> None:
        self.clock = Clock()
        self.used: dict[int, float] = {os.getpid(): 0.0, CORE: 0.0, OTHER: 0.0}
        patch.setattr(proc, "cpu", lambda pid: self.used.get(pid))
        self.beat = Beat(self.clock, longest)

    def read(self, own: float = 0.0, core: float = 0.0, disk: float = 0.0, moved: bool = True) -> None:
        begun = self.beat.begin([CORE])
        self.used[os.getpid()] += own
        self.used[CORE] += core
        self.clock.advance(0.01)
        self.beat.read([CORE], moved)
        self.used[os.getpid()] += disk
        self.clock.advance(0.01)
        self.beat.end(begun)

    def is_idle(self, cores: Iterable[int | None] = (CORE,)) -> bool:
        return self.beat.is_idle([*cores])


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


def test_node_core_and_disk_count(machine: Machine) -> None:
    assert machine.beat.seconds == SHORTEST
    for _ in range(LAST):
        machine.clock.advance(5)
        machine.read(own=0.01, core=0.015, disk=0.005)
    assert machine.beat.seconds == pytest.approx(3.0)


def test_it_becomes_frequent_again(machine: Machine) -> None:
    machine.read(own=1.0)
    assert machine.beat.seconds == 10
    for _ in range(LAST):
        machine.clock.advance(10)
        machine.read(own=0.001)
    assert machine.beat.seconds == SHORTEST


def test_short_intervals_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the operator sets below the shortest is kept, whatever it costs."""
    machine = Machine(monkeypatch, 0.1)
    machine.read(own=1.0)
    assert machine.beat.seconds == 0.1


def test_an_idle_core_is_not_read(machine: Machine) -> None:
    """Idle is who has used no processor since a reading without bytes."""
    assert not machine.is_idle()
    machine.read(core=0.001, moved=True)
    assert not machine.is_idle()
    machine.read(core=0.001, moved=False)
    assert machine.is_idle()
    machine.used[CORE] += 1e-6
    assert not machine.is_idle()


def test_who_is_not_known_is_not_idle(machine: Machine) -> None:
    machine.read(moved=False)
    assert machine.is_idle()
    assert not machine.is_idle([CORE, OTHER])
    assert not machine.is_idle([None])
    del machine.used[CORE]
    assert not machine.is_idle()


def test_the_clock_of_a_process() -> None:
    """It counts what all of its threads use, and nothing else."""
    before = proc.cpu(os.getpid())
    assert before is not None
    while (now := proc.cpu(os.getpid())) is not None and now < before + 0.01:
        pass
    assert now is not None
    assert proc.cpu(None) is None
    assert proc.cpu(2**22 + 1) is None  # above the largest PID
