"""NODE_QUOTA: bytes are counted once, over all kinds of restarts; and what is reported."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.events.kinds import Kind
from node.limits.allowance import Allowance, Flow, Spent, pack, unpack
from node.machine.interfaces import Carried, Interfaces

BYTES = st.builds(Carried, st.integers(0, 2**40), st.integers(0, 2**40))
# Steps between two readings: an interface carries bytes, goes or comes; the machine or the node restarts.
STEPS = st.one_of(
    st.tuples(st.sampled_from(["eth0", "eth1", "tun0"]), BYTES),
    st.sampled_from(["read", "machine", "node", "eth1 goes"]),
)


def moment(text: str) -> float:
    return datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()


def read(**carried: Carried) -> Interfaces:
    """A reading after one start of the machine."""
    return Interfaces("boot", carried, frozenset())


NOW = moment("2026-05-10T12:00:00")


class Machine:
    """The kernel's counters, and the bytes that the node should have counted."""

    def __init__(self) -> None:
        self.boots = 1
        self.counters: dict[str, list[int]] = {"eth0": [7, 9], "lo": [0, 0]}
        self.unread: dict[str, list[int]] = {}

    def carry(self, name: str, carried: Carried) -> None:
        for some in (self.counters, self.unread) if name != "tun0" else (self.counters,):
            mine = some.setdefault(name, [0, 0])
            for way, count in enumerate(carried):
                mine[way] += count

    def lose(self, name: str) -> None:
        """The interface goes; its bytes since the last reading are lost. It may come again."""
        self.counters.pop(name, None)
        self.unread.pop(name, None)

    def restart(self) -> None:
        """The machine restarts: bytes since the last reading are lost."""
        self.boots += 1
        self.counters = {"eth0": [0, 0], "lo": [0, 0]}
        self.unread = {}

    def read(self, spent: Spent) -> None:
        carried = {name: Carried(*both) for name, both in self.counters.items()}
        interfaces = Interfaces(f"boot {self.boots}", carried, frozenset())
        spent.book(spent.read(interfaces, {"eth0", "eth1"}), NOW, 1)
        self.unread = {}


@given(st.lists(STEPS))
def test_all_bytes_seen_are_counted_once(steps: Sequence[str | tuple[str, Carried]]) -> None:
    """No byte is lost or counted twice; bytes before the first reading do not count."""
    machine, spent = Machine(), Spent()
    machine.read(spent)
    expected = [0, 0]
    for step in [*steps, "read"]:
        if isinstance(step, tuple):
            machine.carry(*step)
        elif step in ("read", "eth1 goes"):
            # A reading without the interface shows that it was gone.
            if step == "eth1 goes":
                machine.lose("eth1")
            expected = [sum(each) for each in zip(expected, *machine.unread.values(), strict=True)]
            machine.read(spent)
        elif step == "machine":
            machine.restart()
        elif step == "node":
            spent = unpack(pack(spent))
    assert [*spent.carried] == expected


@given(st.integers(0, 2**32), st.integers(0, 2**32))
def test_a_counter_that_went_down(before: int, now: int) -> None:
    """It was reset, and only that direction of that interface."""
    spent = Spent(last=read(eth0=Carried(before, 5)))
    moved = spent.read(read(eth0=Carried(now, 6)), {"eth0"})
    assert moved == Carried(now - before if now >= before else now, 1)


def test_an_interface_that_counts_from_now_on() -> None:
    """The bytes that it carried before do not count."""
    spent = Spent(last=read(eth0=Carried(0, 0)))
    spent.read(read(eth0=Carried(1, 1), wan=Carried(0, 0)), {"eth0"})
    spent.read(read(eth0=Carried(1, 1), wan=Carried(50, 50)), {"eth0"})
    assert spent.read(read(eth0=Carried(1, 1), wan=Carried(53, 54)), {"wan"}) == (3, 4)


def test_the_reset_day() -> None:
    """A new period begins; it gets its part of the bytes that moved while the node was stopped."""
    spent = Spent()
    assert not spent.book(Carried(0, 0), moment("2026-05-31T00:00:00") - 1, 31)
    spent.book(Carried(10, 20), moment("2026-05-31T00:00:00") - 1, 31)
    assert spent.book(Carried(1, 2), moment("2026-05-31T12:00:00"), 31)
    assert spent.carried == (1, 2)
    # June has 30 days.
    assert not spent.book(Carried(1, 2), moment("2026-06-29T00:00:00"), 31)
    assert spent.book(Carried(200, 400), moment("2026-07-01T00:00:00"), 31)
    assert spent.carried == (100, 200)


def test_a_wrong_clock() -> None:
    """Setting it back starts no new period, and its correction starts none twice."""
    spent = Spent()
    spent.book(Carried(5, 5), moment("2026-05-10T00:00:00"), 1)
    assert not spent.book(Carried(1, 1), moment("2026-04-10T00:00:00"), 1)
    assert spent.carried == (6, 6)
    spent.book(Carried(0, 0), moment("2099-05-10T00:00:00"), 1)
    assert not spent.book(Carried(2, 2), moment("2026-05-11T00:00:00"), 1)
    assert spent.carried == (2, 2)
    assert spent.book(Carried(0, 0), moment("2026-06-01T00:00:00"), 1)
    # As on a machine without a battery, whose clock starts at zero.
    spent.book(Carried(5, 5), moment("2026-06-02T00:00:00"), 1)
    assert not spent.book(Carried(1, 1), 0.0, 1)
    spent = unpack(pack(spent))
    assert not spent.book(Carried(1, 1), moment("2026-06-02T00:00:10"), 1)
    assert spent.carried == (7, 7)
    assert not spent.book(Carried(1, 1), 0.0, 1)
    assert spent.book(Carried(1, 1), moment("2026-07-02T00:00:00"), 1)


@pytest.mark.parametrize(("flow", "used"), [(Flow.BOTH, 30), (Flow.IN, 10), (Flow.OUT, 20)])
def test_which_bytes_count(flow: Flow, used: int) -> None:
    spent = Spent(carried=Carried(10, 20))
    assert spent.used(flow) == used


def test_reports() -> None:
    """Each report once in a period; OVER without NEAR if both happen at once; a larger quota lifts it."""
    spent, allowance = Spent(), Allowance(100, closes=True)
    reports = []
    for moved in (79, 1, 5, 14, 1, 50):
        spent.book(Carried(moved, 0), NOW, 1)
        reports.append(spent.judge(allowance))
    assert reports == [None, Kind.NODE_QUOTA_NEAR, None, None, Kind.NODE_QUOTA_OVER, None]
    assert spent.summary(allowance).closed
    assert spent.summary(allowance).resets_at == moment("2026-06-01")
    assert spent.judge(Allowance(1000)) is None
    assert not spent.over
    assert spent.judge(allowance) is Kind.NODE_QUOTA_OVER
    spent.book(Carried(99, 0), moment("2026-06-01T00:00:01"), 1)
    spent.book(Carried(101, 0), moment("2026-06-01T00:00:02"), 1)
    assert spent.judge(allowance) is Kind.NODE_QUOTA_OVER


@given(
    st.builds(Spent, st.floats(0, 1e10), st.floats(0, 1e10), BYTES, st.booleans(), st.booleans()), st.floats(0, 1e10)
)
def test_on_disk(spent: Spent, ahead: float) -> None:
    spent.ahead = ahead
    spent.last = read(eth0=spent.carried)
    assert unpack(pack(spent)) == spent
