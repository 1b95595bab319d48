"""How a user's connections share their speed, whatever they do."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from node.contract.connections import Live
from node.limits.speed import IDLE, LEAST, NARROWEST, SLACK, STILL, WIDEST, Down, Up, corrected, shares, window

MBIT = 125_000
SPEEDS = st.integers(64 * LEAST, 10**10)


def live(**seen: Any) -> Live:
    return Live("anna", b"\x7f\0\0\2", b"", **seen)


@given(SPEEDS, st.sets(st.integers(0, 63), min_size=1), st.sets(st.integers(0, 63)))
def test_busy_connections_keep_to_the_limit_and_all_get_something(limit: int, some: set[int], work: set[int]) -> None:
    rates = shares(limit, some, work & some)
    assert rates.keys() == some
    assert sum(rates[one] for one in work & some) <= limit
    assert min(rates.values()) >= LEAST
    for one in some - work:
        assert rates[one] >= limit // len(some)


def test_one_busy_connection_of_eight_gets_all() -> None:
    rates = shares(10 * MBIT, range(8), {3})
    assert rates[3] == 10 * MBIT
    assert rates[0] == 10 * MBIT // 8


def test_keep_alives_and_gone_clients_are_not_busy() -> None:
    down = Down[str]()
    down.look({name: live(sent=10) for name in ("moves", "waits", "alive", "gone")})
    for look in range(STILL + 1):
        flows = {
            "moves": live(sent=down.seen["moves"].sent + IDLE + 1),
            "waits": live(sent=10 + look // 4, waiting=1),
            "alive": live(sent=down.seen["alive"].sent + IDLE),
            "gone": live(sent=10, waiting=10**6),
        }
        assert down.at_work(flows) == {"moves", "waits"} | ({"gone"} if look < STILL else set())
        down.look(flows)


def test_without_a_limit_every_connection_is_as_fast_as_it_can() -> None:
    down, flows = Down[str]({"a": 1}), {"a": live(), "b": live(sent=9)}
    assert down.plan(0, flows, new=True) == {"a": None, "b": None}
    assert down.plan(0, flows, new=False) == {"a": None}


class Connections(RuleBasedStateMachine):
    """A user's connections come, go, get busy and idle, and their limit changes; each plan is applied."""

    def __init__(self) -> None:
        super().__init__()
        self.down = Down[int]()
        self.flows: dict[int, Live] = {}
        self.in_force: dict[int, int | None] = {}
        self.limit, self.number = 64 * LEAST, 0
        self.planned = False

    @rule(count=st.integers(1, 5))
    def come(self, count: int) -> None:
        for _ in range(count if len(self.flows) < 60 else 0):
            self.number += 1
            self.flows[self.number], self.in_force[self.number] = live(), None
        self.planned = False

    @precondition(lambda self: self.flows)
    @rule(data=st.data())
    def go(self, data: st.DataObject) -> None:
        gone = data.draw(st.sampled_from(sorted(self.flows)))
        del self.flows[gone], self.in_force[gone]
        self.planned = False

    @rule(moved=st.lists(st.integers(0, 2 * IDLE), max_size=60))
    def carry(self, moved: list[int]) -> None:
        for flow, some in zip(list(self.flows), moved, strict=False):
            self.flows[flow] = self.flows[flow]._replace(sent=self.flows[flow].sent + some)
        self.planned = False

    @rule(limit=st.one_of(st.just(0), SPEEDS))
    def say(self, limit: int) -> None:
        self.limit = limit
        self.planned = False

    @rule(tick=st.booleans())
    def look(self, tick: bool) -> None:
        self.work = self.down.at_work(self.flows)
        for flow, rate in self.down.plan(self.limit, self.flows, new=True).items():
            self.in_force[flow] = rate
            if rate is None:
                self.down.held.pop(flow, None)
            else:
                self.down.held[flow] = rate
        if tick:
            self.down.look(self.flows)
        self.planned = True

    @invariant()
    def keeps_to_the_limit(self) -> None:
        if not self.planned:
            return
        if not self.limit:
            assert set(self.in_force.values()) <= {None}
            return
        rates = {flow: rate or 0 for flow, rate in self.in_force.items()}
        assert sum(rates[flow] for flow in self.work) <= self.limit
        assert all(rates.values())
        for flow, rate in rates.items():
            share = self.limit // (len(self.work) if flow in self.work else len(rates))
            assert share / SLACK <= rate <= share


TestConnections = Connections.TestCase


@given(st.integers(1, 10**10), st.floats(0, 10), st.floats(1 / 16, 16))
def test_a_window_has_bounds(rate: int, round_trip: float, factor: float) -> None:
    assert NARROWEST <= window(rate, round_trip, factor) <= WIDEST


@pytest.mark.parametrize("stretch", [0.5, 1.3, 4.0])
def test_windows_find_the_speed_for_any_round_trip(stretch: float) -> None:
    limit, factor = 10 * MBIT, 1.0
    for _ in range(20):
        factor = corrected(factor, limit, limit * factor / stretch)
    assert limit * factor / stretch == pytest.approx(limit, rel=0.05)


def test_little_traffic_does_not_widen_the_window() -> None:
    factor = 1.0
    for _ in range(100):
        factor = corrected(factor, 10 * MBIT, MBIT)
    assert factor < 2
    assert corrected(8.0, 10 * MBIT, 0.0) == 1.0


def test_a_window_is_for_a_round_trip_and_shared_by_busy_connections() -> None:
    up = Up[str]()
    flows = {"a": live(round_trip=0.04), "b": live(round_trip=0.04)}
    first = up.plan("anna", 10 * MBIT, flows, 0.5)
    assert first == {"a": 25_000, "b": 25_000}
    up.held.update({flow: size for flow, size in first.items() if size})
    up.look(flows, {"anna"})
    # One connection sends as much as the limit allows.
    flows["a"] = live(round_trip=0.04, received=5 * MBIT)
    assert up.plan("anna", 10 * MBIT, flows, 0.5) == {"a": 50_000}


def test_windows_are_removed_where_they_were_set() -> None:
    up = Up[str]()
    up.held["a"] = 9
    assert up.plan("anna", 0, {"a": live(), "b": live()}, 0.5) == {"a": None}
