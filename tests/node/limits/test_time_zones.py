"""TIMEZONE changes between two starts of the node: no quota starts twice, or before its day."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, date, datetime, tzinfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.limits.allowance import Spent
from node.limits.allowance import pack as packed_quota
from node.limits.allowance import unpack as unpacked_quota
from node.limits.count import Count, is_due, pack, restart_if_due, unpack
from node.limits.limits import Limit
from node.limits.periods import Period, day_of, period, zone
from node.machine.interfaces import Carried

HOUR = 3600.0
zones = st.sampled_from(
    ["UTC", "Europe/Berlin", "America/New_York", "America/Sao_Paulo", "Asia/Tehran", "Pacific/Apia", "Pacific/Midway"]
).map(zone)
# Some hours in some zone, then a restart of the node.
lives = st.lists(st.tuples(zones, st.lists(st.floats(0.1, 30), max_size=12)), min_size=2, max_size=6)
STEP = Carried(1, 0)


def moment(text: str) -> float:
    return datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()


def begun(now: float, kind: Period, here: tzinfo) -> date:
    """The first day of the period."""
    return day_of(period(now, kind, 1, here)[0], here)


@given(lives, st.sampled_from([Period.DAY, Period.WEEK, Period.MONTH]), st.floats(0, 800))
def test_users(lives: Sequence[tuple[tzinfo, Sequence[float]]], kind: Period, late: float) -> None:
    """A count starts once in each period of the calendar, and at the first look after midnight in the zone."""
    now, count, days = moment("2018-10-20") + late * HOUR, Count(1.0), list[date]()
    for here, steps in lives:
        limit = Limit(quota=100, period=kind, reset_day=1, zone=here)
        restored = unpack(pack(None, count))[1]
        assert restored == count
        count = restored
        for step in [0.0, *steps]:
            now += step * HOUR
            before = count.up
            restart_if_due(count, limit, now)
            assert not is_due(count, limit, now) and count.zone is here
            if not days or count.up < before:
                days.append(begun(now, kind, here))
            assert begun(now, kind, here) <= days[-1]
            count.add(1, 0)
    assert days == sorted(set(days))


@given(lives, st.floats(0, 800))
def test_the_node(lives: Sequence[tuple[tzinfo, Sequence[float]]], late: float) -> None:
    """Likewise for NODE_QUOTA."""
    now, spent, days = moment("2018-10-20") + late * HOUR, Spent(), list[date]()
    for here, steps in lives:
        spent = unpacked_quota(packed_quota(spent))
        for step in [0.0, *steps]:
            now += step * HOUR
            if spent.book(STEP, now, 1, here) or not days:
                days.append(begun(now, Period.MONTH, here))
            assert begun(now, Period.MONTH, here) <= days[-1]
    assert days == sorted(set(days))


@pytest.mark.parametrize(
    ("old", "new", "changed", "starts"),
    [
        # Midnight comes later there: the month in which the zone is changed is longer.
        ("UTC", "America/New_York", "2026-11-10T12:00", "2026-12-01T05:00"),
        # It comes sooner: the month is shorter.
        ("UTC", "Asia/Tehran", "2026-11-10T12:00", "2026-11-30T20:30"),
        # November has begun already, and begins again in New York some hours later: nothing starts then.
        ("UTC", "America/New_York", "2026-11-01T01:00", "2026-12-01T05:00"),
        # November has begun there, and not yet here: it starts with the change.
        ("UTC", "Asia/Tehran", "2026-10-31T22:00", "2026-10-31T22:00"),
    ],
)
def test_a_month_with_a_change(old: str, new: str, changed: str, starts: str) -> None:
    count, spent = Count(1.0), Spent()
    limit = Limit(quota=100, period=Period.MONTH, zone=zone(old))
    now, last = moment("2026-10-25"), moment("2026-12-02")
    found: list[list[float]] = [[], []]
    while now < last:
        if now >= moment(changed):
            limit = Limit(quota=100, period=Period.MONTH, zone=zone(new))
        before = count.up
        restart_if_due(count, limit, now)
        if now >= moment(changed) and count.up < before:
            found[0].append(now)
        if spent.book(STEP, now, 1, limit.zone) and now >= moment(changed):
            found[1].append(now)
        count.add(1, 0)
        now += HOUR / 2
    assert [each[0] for each in found] == [moment(starts)] * 2
    assert all(later - moment(starts) > 20 * 24 * HOUR for each in found for later in each[1:])
