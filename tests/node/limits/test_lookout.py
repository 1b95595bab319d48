"""Who could run over their quota is read in time, whatever they do."""

from __future__ import annotations

import pytest
from twisted.internet.task import Clock

from node.limits.lookout import Lookout
from node.traffic.readings import Wanted

INTERVAL = 10.0


@pytest.mark.parametrize("seconds", [0.01, 0.1, 1.0])
def test_who_comes_again_and_again_puts_off_nothing(seconds: float) -> None:
    clock, read = Clock(), list[float]()

    async def note(_: Wanted) -> None:
        read.append(clock.seconds())

    lookout = Lookout(clock, budget=lambda _: (10**6, 10**6), may_carry=lambda _: True, read=note, interval=INTERVAL)
    while clock.seconds() < INTERVAL / 2:
        lookout.look_at("ann")
        clock.advance(seconds)
    # Otherwise they are read every 0.15 s or so.
    assert len(read) >= min(INTERVAL / 2 / seconds, 25) - 1
    lookout.stop()


def test_who_may_use_much_more_now_is_not_looked_out_for() -> None:
    clock, left = Clock(), [10**6]

    async def note(_: Wanted) -> None:
        raise AssertionError

    lookout = Lookout(clock, budget=lambda _: (10**12, left[0]), may_carry=lambda _: True, read=note, interval=INTERVAL)
    lookout.look_at("ann")
    left[0] = 10**12
    lookout.look_at("ann")
    clock.advance(INTERVAL)
    assert not len(lookout)
