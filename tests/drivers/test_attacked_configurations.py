"""Thousands of spoiled configurations through the pure code of both drivers.

TXNODE_ATTACKS says how many times more there are: a night takes a hundred times as many.
"""

from __future__ import annotations

import functools
import os
from collections import Counter
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scripts.attack import configurations
from scripts.attack.configurations import REFUSED, TAKEN, attack, sing_box_case, xray_case
from scripts.attack.mutation import bytes_of, mutate

# Cases of one example, of which hypothesis chooses the first; more are cheaper than examples.
EACH = 20
EXAMPLES = 4 * settings().max_examples * int(os.environ.get("TXNODE_ATTACKS", "1"))
seeds = st.integers(0, 2**48)


@settings(max_examples=EXAMPLES)
@given(seeds)
def test_sing_box(seed: int) -> None:
    """No exception but `InvalidConfig`, in little time; what is taken has the APIs behind the first rule."""
    for number in range(EACH):
        sing_box_case(Random(seed + number))


@functools.cache
def converted() -> bytes:
    return configurations.converted()


@pytest.mark.core
@settings(max_examples=EXAMPLES)
@given(seeds)
def test_xray(seed: int) -> None:
    """The same for what Xray's converter could make of a text, and for that text."""
    for number in range(EACH):
        xray_case(converted(), Random(seed + number))


@pytest.mark.core
def test_both_ends_are_met() -> None:
    """Some of them are taken and some refused, of both cores; else nothing was tried."""
    assert attack(120, 0).keys() == {f"{core} {end}" for core in ("xray", "sing-box") for end in (TAKEN, REFUSED)}


@pytest.mark.core
def test_a_fault_is_reported_with_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that it can be had again."""

    def broken(random: Random) -> str:
        raise KeyError

    monkeypatch.setattr(configurations, "sing_box_case", broken)
    with pytest.raises(KeyError) as raised:
        attack(2, 7)
    assert raised.value.__notes__ == ["case 7"]


def test_no_two_are_alike() -> None:
    """A seed makes the same one each time, another seed another one."""

    def made(seed: int) -> bytes:
        random = Random(seed)
        return bytes_of(mutate('{"a": [1, {"b": "c"}], "d": {"e": []}}', random), random)

    times = Counter(map(made, range(300)))
    assert len(times) > 200
    assert made(5) == made(5)
