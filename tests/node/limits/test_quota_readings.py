"""Users who could exceed their quota are read in time, whatever they do."""

from __future__ import annotations

import pytest
from twisted.internet.task import Clock

from node.limits.quota_readings import QuotaReadings
from node.traffic.readings import Wanted

INTERVAL = 10.0


@pytest.mark.parametrize("seconds", [0.01, 0.1, 1.0])
def test_reconnecting_does_not_delay_the_reading(seconds: float) -> None:
    clock, read = Clock(), list[float]()

    async def note(_: Wanted) -> None:
        read.append(clock.seconds())

    readings = QuotaReadings(
        clock, budget=lambda _: (10**6, 10**6), may_carry=lambda _: True, read=note, interval=INTERVAL
    )
    while clock.seconds() < INTERVAL / 2:
        readings.look_at("ann")
        clock.advance(seconds)
    # Otherwise they are read every 0.15 s or so.
    assert len(read) >= min(INTERVAL / 2 / seconds, 25) - 1
    readings.stop()


def test_a_user_with_much_left_is_not_read_early() -> None:
    clock, left = Clock(), [10**6]

    async def note(_: Wanted) -> None:
        raise AssertionError

    readings = QuotaReadings(
        clock, budget=lambda _: (10**12, left[0]), may_carry=lambda _: True, read=note, interval=INTERVAL
    )
    readings.look_at("ann")
    left[0] = 10**12
    readings.look_at("ann")
    clock.advance(INTERVAL)
    assert not len(readings)
