"""Periods follow one another without a gap, and begin at midnight of the reset day in their time zone."""

from __future__ import annotations

import math
from datetime import UTC, date, datetime, timedelta, tzinfo
from unittest.mock import patch
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.limits.periods import Period, begin_of, day_of, known_zone, moved_to, period, zone

moments = st.floats(0, 4e9)
kinds = st.sampled_from([Period.DAY, Period.WEEK, Period.MONTH])
# Summer time begins or ends at midnight in many of these; Apia had no 30 December 2011, and in St. John's the clock was
# set back from 00:01 to 23:01.
NAMES = (
    *("UTC", "Europe/Berlin", "America/New_York", "America/Sao_Paulo", "America/Havana", "America/St_Johns"),
    *("Asia/Beirut", "Africa/Cairo", "Asia/Tehran", "Pacific/Apia", "Pacific/Kwajalein", "Antarctica/Troll"),
)
zones = st.sampled_from(NAMES).map(zone)


def changes(where: tzinfo) -> list[float]:
    """The hours since 1970 in which the clock of a zone was set."""
    hours = range(0, int(2e9), 3600)
    offsets = [datetime.fromtimestamp(hour, where).utcoffset() for hour in hours[::24]]
    days = [hours[::24][at] for at in range(1, len(offsets)) if offsets[at] != offsets[at - 1]]
    return [float(day - back) for day in days for back in range(0, 86_400, 3600)]


# Moments around these changes, to the second and less.
CHANGES = {name: changes(zone(name)) for name in NAMES if name != "UTC"}
near_a_change = st.sampled_from([*CHANGES]).flatmap(
    lambda name: st.tuples(
        st.builds(float.__add__, st.sampled_from(CHANGES[name]), st.floats(-7200, 7200)), st.just(zone(name))
    )
)


@given(st.one_of(st.tuples(moments, zones), near_a_change), kinds, st.integers(0, 31))
def test_each_moment_is_in_one_period(where: tuple[float, tzinfo], kind: Period, day: int) -> None:
    now, here = where
    day = day % 8 if kind is Period.WEEK else day
    begin, end = period(now, kind, day, here)
    assert begin <= now < end
    assert period(begin, kind, day, here) == (begin, end)
    assert period(end, kind, day, here)[0] == end
    assert period(math.nextafter(begin, -math.inf), kind, day, here)[1] == begin
    shown = datetime.fromtimestamp(begin, here)
    # The clock shows midnight, or has just skipped it.
    assert (shown.hour, shown.minute, shown.second) == (0, 0, 0) or _skipped(begin, here)
    if here is UTC:
        assert begin % 86_400 == 0


def _skipped(begin: float, here: tzinfo) -> bool:
    before = datetime.fromtimestamp(begin - 1, here)
    return datetime.fromtimestamp(begin, here).date() > before.date() and before.second == 59


@given(near_a_change, st.floats(0, 90_000), kinds)
def test_a_later_moment_is_in_no_earlier_period(where: tuple[float, tzinfo], more: float, kind: Period) -> None:
    """Also where the date of the clock goes back."""
    now, here = where
    (begin, end), later = period(now, kind, 1, here), period(now + more, kind, 1, here)
    assert later == (begin, end) or later[0] >= end
    assert day_of(now, here) <= day_of(now + more, here)


@given(moments)
def test_without_a_period_nothing_starts_again(now: float) -> None:
    assert period(now, Period.NEVER) == (-math.inf, math.inf)


@pytest.mark.parametrize(
    ("now", "day", "begin", "end"),
    [
        ("2026-02-15", 31, "2026-01-31", "2026-02-28"),
        ("2026-02-28", 31, "2026-02-28", "2026-03-31"),
        ("2024-02-29", 30, "2024-02-29", "2024-03-30"),
        ("2026-12-31", 0, "2026-12-01", "2027-01-01"),
        ("2027-01-04", 5, "2026-12-05", "2027-01-05"),
    ],
)
def test_a_month_begins_on_its_reset_day_or_its_last(now: str, day: int, begin: str, end: str) -> None:
    assert period(_at(now), Period.MONTH, day) == (_at(begin), _at(end))


def test_a_week_begins_on_its_reset_day() -> None:
    wednesday = _at("2026-11-25")
    assert period(wednesday, Period.WEEK, 0) == (_at("2026-11-23"), _at("2026-11-30"))
    assert period(wednesday, Period.WEEK, 3) == (wednesday, _at("2026-12-02"))
    assert period(wednesday, Period.WEEK, 4) == (_at("2026-11-19"), _at("2026-11-26"))


@pytest.mark.parametrize(
    ("name", "day", "begin", "hours"),
    [
        ("Europe/Berlin", "2026-03-28", "2026-03-27T23:00", 24),
        ("Europe/Berlin", "2026-03-29", "2026-03-28T23:00", 23),
        ("Europe/Berlin", "2026-10-25", "2026-10-24T22:00", 25),
        # Midnight is skipped: the day begins at 01:00.
        ("America/Sao_Paulo", "2018-11-04", "2018-11-04T03:00", 23),
        ("Asia/Beirut", "2024-03-31", "2024-03-30T22:00", 23),
        ("Africa/Cairo", "2024-04-26", "2024-04-25T22:00", 23),
        # The hour before midnight comes twice, and then the hour after it.
        ("America/Sao_Paulo", "2018-02-17", "2018-02-17T02:00", 25),
        ("Asia/Beirut", "2024-10-26", "2024-10-25T21:00", 25),
        ("Africa/Cairo", "2024-10-31", "2024-10-30T21:00", 25),
        ("America/Havana", "2024-11-03", "2024-11-03T04:00", 25),
        # One minute of the next day, then the last hour again: it is of the next day.
        ("America/St_Johns", "2010-11-07", "2010-11-07T02:30", 25),
        # A day that did not exist.
        ("Pacific/Apia", "2011-12-29", "2011-12-29T10:00", 24),
        ("Pacific/Apia", "2011-12-30", "2011-12-30T10:00", 0),
    ],
)
def test_days_on_which_the_clock_is_set(name: str, day: str, begin: str, hours: int) -> None:
    here, first = zone(name), date.fromisoformat(day)
    assert begin_of(first, here) == _at(begin)
    assert begin_of(first + timedelta(1), here) - _at(begin) == hours * 3600
    if hours:
        assert period(_at(begin), Period.DAY, 0, here) == (_at(begin), _at(begin) + hours * 3600)
        assert {day_of(_at(begin) + hour * 3600, here) for hour in range(hours)} == {first}


@given(moments, zones, zones, kinds)
def test_what_began_in_one_zone_has_begun_in_the_other(now: float, old: tzinfo, new: tzinfo, kind: Period) -> None:
    """A period that is moved to another zone is the one of the same dates there."""
    begin = period(now, kind, 1, old)[0]
    there = moved_to(new, begin, old)
    assert period(there, kind, 1, new)[0] == there
    assert day_of(there, new) in (day_of(begin, old), day_of(begin, old) + timedelta(1))
    assert moved_to(old, begin, old) == begin


def test_names() -> None:
    assert zone("UTC") is UTC and known_zone("") is UTC
    assert known_zone("Europe/Berlin") is zone("Europe/Berlin") is ZoneInfo("Europe/Berlin")
    for wrong in ("Europe", "Mars/Olympus", "europe/berlin ", "../etc/passwd", "/etc/passwd", "+03:30", ""):
        with pytest.raises(ValueError, match="is not a time zone: write a name such as Europe/Berlin"):
            zone(wrong)
        assert known_zone(wrong) is UTC


def test_a_machine_without_time_zones() -> None:
    """The error names the package."""
    with (
        patch("node.limits.periods.available_timezones", set),
        pytest.raises(ValueError, match="install its package tzdata, or set UTC"),
    ):
        zone("Europe/Nowhere")


def _at(day: str) -> float:
    return datetime.fromisoformat(day).replace(tzinfo=UTC).timestamp()
