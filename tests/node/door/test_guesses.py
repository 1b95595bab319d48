"""Wrong keys by address: how many are answered at once, and how many addresses are remembered."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from twisted.internet.task import Clock

from node.door.connections import LATE, REMEMBERED, WRONG_KEYS, Guesses

SIZE, RATE = WRONG_KEYS


def client(network: str) -> Any:
    return SimpleNamespace(network=network, address="192.0.2.1")


def guesses() -> tuple[Any, Guesses]:
    clock: Any = Clock()
    return clock, Guesses(clock)


def test_some_at_once() -> None:
    """A number of answers comes at once, further ones are delayed, and time brings more."""
    clock, made = guesses()
    assert {made.wrong(client("a")) for _ in range(SIZE)} == {0.0}
    assert made.wrong(client("a")) == LATE
    clock.advance(2 / RATE)
    assert [made.wrong(client("a")) for _ in range(3)] == [0.0, 0.0, LATE]


def test_each_address_for_itself() -> None:
    """Wrong keys from one address do not affect another."""
    _, made = guesses()
    for _ in range(SIZE + 1):
        made.wrong(client("a"))
    assert (made.wrong(client("a")), made.wrong(client("b"))) == (LATE, 0.0)


def test_memory_is_bounded() -> None:
    """Only the last addresses with wrong keys are remembered, and one that goes on is among them."""
    _, made = guesses()
    for _ in range(SIZE):
        made.wrong(client("a"))
    for number in range(3 * REMEMBERED):
        made.wrong(client(str(number)))
        if number % 1000 == 0:
            assert made.wrong(client("a")) == LATE
    assert len(made._buckets) == REMEMBERED
