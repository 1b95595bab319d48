"""Periods follow one another without a gap, and begin on the reset day."""

from __future__ import annotations

import math
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.limits.limits import Period, period

moments = st.floats(0, 4e9)


@given(moments, st.sampled_from([Period.DAY, Period.WEEK, Period.MONTH]), st.integers(0, 31))
def test_each_moment_is_in_one_period(now: float, kind: Period, day: int) -> None:
    day = day % 8 if kind is Period.WEEK else day
    begin, end = period(now, kind, day)
    assert begin <= now < end
    assert period(begin, kind, day) == (begin, end)
    assert period(end, kind, day)[0] == end
    assert period(begin - 1, kind, day)[1] == begin
    assert begin % 86_400 == 0


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


def _at(day: str) -> float:
    return datetime.fromisoformat(day).replace(tzinfo=UTC).timestamp()
