"""Users who could exceed their quota are read in time, whatever they do."""

from __future__ import annotations

from typing import Any

import pytest
from twisted.internet.task import Clock

from node.limits.enforcement import QuotaReadings
from node.limits.limits import Limit
from node.limits.weights import Weights, rules
from node.traffic.readings import Wanted

INTERVAL = 10.0


class World:
    """One user, ann, with a quota of which `remaining` bytes are left."""

    def __init__(self, quota: int, remaining: int) -> None:
        self.clock = Clock()
        self.reads = list[float]()
        self.quota = quota
        self.remaining = remaining
        self.interval = self.every = INTERVAL
        self.off = set[str]()
        self.blind = True
        self.in_force = self
        self.weights = Weights()
        this: Any = self
        self.readings = QuotaReadings(self.clock, this, this, this)

    def left(self, _: str) -> int:
        return self.remaining

    def of(self, _: str) -> Limit:
        return Limit(quota=self.quota)

    async def read(self, *, wanted: Wanted) -> None:
        assert wanted is not None
        self.reads.append(self.clock.seconds())


@pytest.mark.parametrize("seconds", [0.01, 0.1, 1.0])
def test_reconnecting_does_not_delay_the_reading(seconds: float) -> None:
    world = World(10**6, 10**6)
    while world.clock.seconds() < INTERVAL / 2:
        world.readings.look_at("ann")
        world.clock.advance(seconds)
    # Otherwise they are read every 0.15 s or so.
    assert len(world.reads) >= min(INTERVAL / 2 / seconds, 25) - 1
    world.readings.stop()


def test_a_user_with_much_left_is_not_read_early() -> None:
    world = World(10**12, 10**6)
    world.readings.look_at("ann")
    world.remaining = 10**12
    world.readings.look_at("ann")
    world.clock.advance(INTERVAL)
    assert not world.reads and not world.clock.getDelayedCalls()


def test_with_a_greater_factor_users_are_read_sooner() -> None:
    """So that they do not exceed their quota by more than without."""
    reads = []
    for text in ("", "00:00-06:00: 4"):
        world = World(10**9, 10**8)
        world.weights = Weights(rules(text))
        world.readings.look_at("ann")
        world.clock.pump([0.01] * 300)
        reads.append(world.reads[0])
        world.readings.stop()
    assert 0 < reads[1] < reads[0] / 3
