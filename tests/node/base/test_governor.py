"""Work takes at most its share of the time."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from twisted.internet.task import Clock

from node.base.governor import Governor


@given(st.floats(0.01, 0.5), st.lists(st.floats(0.001, 10), min_size=1, max_size=20))
def test_a_share_of_the_time(share: float, works: list[float]) -> None:
    """Over any works each of which begins when the rest before it is over."""
    clock = Clock()
    governor = Governor(clock, share)
    assert governor.left == 0
    for took in works:
        began = clock.seconds()
        clock.advance(took)
        governor.worked(began)
        clock.advance(governor.left)
    assert sum(works) <= share * clock.seconds() * (1 + 1e-9)


@pytest.mark.parametrize(("took", "rest"), [(0.0, 1.0), (0.05, 5.0), (1.0, 60.0)])
def test_bounds_of_a_rest(took: float, rest: float) -> None:
    """A rest is as long as the work makes it, within its bounds."""
    clock = Clock()
    governor = Governor(clock, 0.01, shortest=1, longest=60)
    clock.advance(took)
    governor.worked(0)
    assert math.isclose(governor.left, rest)
    clock.advance(rest)
    assert governor.left == 0
