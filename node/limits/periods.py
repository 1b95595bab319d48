"""Periods of quotas, in a time zone. Pure.

Times are Unix seconds. A day begins at midnight in the zone. Where the clock skips midnight, it begins at the skip;
where midnight comes twice, at the first one.
"""

from __future__ import annotations

import math
from calendar import monthrange
from datetime import UTC, date, datetime, time, timedelta, tzinfo
from enum import Enum
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError, available_timezones

from protos.service_pb2 import Quota


class Period(Enum):
    """Period after which a count starts again. The value is that of Quota.Period."""

    NEVER = Quota.NEVER
    DAY = Quota.DAY
    WEEK = Quota.WEEK
    MONTH = Quota.MONTH


def zone(name: str) -> tzinfo:
    """The time zone of this name. Raises `ValueError` with what to do."""
    if name == "UTC":
        return UTC
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError) as error:
        if not available_timezones():
            text = "this machine has no time zones: install its package tzdata, or set UTC"
        else:
            text = f"{name!r} is not a time zone: write a name such as Europe/Berlin, in upper and lower case like that"
        raise ValueError(text) from error


def known_zone(name: str) -> tzinfo:
    """The time zone of a saved name; UTC for an empty one, and for one that this machine does not have any more."""
    try:
        return zone(name or "UTC")
    except ValueError:
        return UTC


# Cache of the last period by kind, reset day and zone: thousands of users share the same ones.
_LAST: dict[tuple[Period, int, tzinfo], tuple[float, float]] = {}


def period(now: float, kind: Period, reset_day: int = 0, zone: tzinfo = UTC) -> tuple[float, float]:
    """Begin and end of the period that contains `now`; infinite for NEVER.

    `reset_day`: 1 (Monday) to 7 for a week; 1 to 31 for a month, where a shorter month takes its last day; 0 is the
    first day.
    """
    begin, end = _LAST.get((kind, reset_day, zone), (math.inf, -math.inf))
    if not begin <= now < end:
        begin, end = _LAST[kind, reset_day, zone] = _period(now, kind, reset_day, zone)
    return begin, end


def _period(now: float, kind: Period, reset_day: int, zone: tzinfo) -> tuple[float, float]:
    today = day_of(now, zone)
    match kind:
        case Period.NEVER:
            return -math.inf, math.inf
        case Period.DAY:
            begin, end = today, today + timedelta(1)
        case Period.WEEK:
            begin = today - timedelta((today.isoweekday() - max(reset_day, 1)) % 7)
            end = begin + timedelta(7)
        case Period.MONTH:
            begin = _reset(today.year, today.month, reset_day)
            if begin > today:
                begin = _reset(today.year, today.month - 1, reset_day)
            end = _reset(begin.year, begin.month + 1, reset_day)
    return begin_of(begin, zone), begin_of(end, zone)


def _reset(year: int, month: int, day: int) -> date:
    """The reset day of a month; `month` may be 0 or 13."""
    years, months = divmod(month - 1, 12)
    year, month = year + years, months + 1
    return date(year, month, min(max(day, 1), monthrange(year, month)[1]))


def day_of(now: float, zone: tzinfo) -> date:
    """The last day that has begun. The clock shows another date after it was set back over midnight."""
    day = datetime.fromtimestamp(now, zone).date()
    while begin_of(day, zone) > now:
        day -= timedelta(1)
    while begin_of(day + timedelta(1), zone) <= now:
        day += timedelta(1)
    return day


def begin_of(day: date, zone: tzinfo) -> float:
    """When a day begins."""
    return datetime.combine(day, time(), zone).timestamp()


def moved_to(zone: tzinfo, moment: float, before: tzinfo) -> float:
    """The moment at which the clock of this zone shows what that of the zone `before` showed at the given moment.

    It is in the period of the same dates. So a period that has begun in one zone does not begin again in the other.
    """
    return datetime.fromtimestamp(moment, before).replace(tzinfo=zone, fold=0).timestamp()
