"""Checks of the rounds of everything, without a node: the rule for bills, and the bounds of a small node."""

from __future__ import annotations

import importlib

import pytest

from tests.everything import small
from tests.everything.bills import LOSS, Bills
from tests.everything.far_end import FarEnd, Piece

UP, DOWN = ("a@test", "uplink"), ("a@test", "downlink")


@pytest.fixture
def bills() -> Bills:
    """One connection that was cut at second 1000: of 100 bytes sent 90 arrived, of 50 sent back 40 arrived."""
    far_end = FarEnd()
    _, moved = far_end.new("a@test")
    moved.sent, moved.arrived, moved.given, moved.taken = 100, 90, 50, 40
    moved.pieces.append(Piece(1000.0, 80, 40))
    return Bills(far_end)


@pytest.mark.parametrize(("up", "down"), [(90, 40), (95, 45), (100, 50)])
def test_bills_between_both_ends(bills: Bills, up: int, down: int) -> None:
    bills.billed.update({UP: up, DOWN: down})
    assert not list(bills.faults())


def test_wrong_bills(bills: Bills) -> None:
    """One byte less than arrived, or one more than was sent."""
    bills.billed.update({UP: 89, DOWN: 51})
    assert list(bills.faults()) == [
        "a@test uplink billed 89, but 90 arrived: 1 too few",
        "a@test downlink billed 51, but only 50 were sent: 1 too many",
    ]


def test_bytes_that_a_core_omitted(bills: Bills) -> None:
    """As many may be missing as the node has reported, once."""
    omitted = [10]
    bills = Bills(bills._far_end, lambda: omitted[0])
    bills.billed.update({UP: 85, DOWN: 34})
    assert list(bills.faults())
    omitted[0] = 11
    assert not list(bills.faults())
    bills.forgive(foreseen=True)
    assert not list(bills.faults())
    bills.billed.subtract({UP: 1})
    assert list(bills.faults())


@pytest.mark.parametrize(
    ("mixes", "other", "wrong"), [(True, 55, False), (True, 54, True), (True, 200, True), (False, 55, True)]
)
def test_bytes_of_another_user(bills: Bills, mixes: bool, other: int, wrong: bool) -> None:
    """With cores that may mix users up the sum must be right: here 35 bytes of one user count for another."""
    _, moved = bills._far_end.new("b@test")
    moved.sent, moved.arrived = 100, 20
    bills = Bills(bills._far_end, mixes=mixes)
    bills.billed.update({UP: 55, DOWN: 40, ("b@test", "uplink"): other})
    assert bool(list(bills.faults())) == wrong


@pytest.mark.parametrize(("kill", "lost"), [(1000.0 + LOSS - 0.1, True), (1000.0 + LOSS + 0.1, False)])
def test_bytes_that_a_kill_may_take(bills: Bills, kill: float, lost: bool) -> None:
    """Bytes moved shortly before it may be lost; bytes too many are never accepted."""
    bills.kills.append(kill)
    bills.billed.update({UP: 2, DOWN: 0})
    assert (not list(bills.faults())) == lost
    bills.billed.update({UP: 99})
    assert [fault for fault in bills.faults() if "too many" in fault]


@pytest.mark.parametrize("name", small.BOUNDS)
def test_bounds_of_a_small_node(name: str) -> None:
    """The node has each bound that the rounds set; otherwise setting it would have no effect."""
    module, _, bound = name.rpartition(".")
    assert isinstance(getattr(importlib.import_module(module), bound), int)
