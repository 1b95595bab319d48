"""Begin and end of quota periods. Pure. Days begin at midnight UTC; times are Unix seconds."""

from __future__ import annotations

import math
from calendar import monthrange
from datetime import UTC, date, datetime, time, timedelta

from node.limits.limits import Period

# Cache of the last period by kind and reset day: thousands of users share the same ones.
_LAST: dict[tuple[Period, int], tuple[float, float]] = {}


def period(now: float, kind: Period, reset_day: int = 0) -> tuple[float, float]:
    """Begin and end of the period that contains `now`; infinite for NEVER.

    `reset_day`: 1 (Monday) to 7 for a week; 1 to 31 for a month, where a shorter month takes its last day; 0 is the
    first day.
    """
    begin, end = _LAST.get((kind, reset_day), (math.inf, -math.inf))
    if not begin <= now < end:
        begin, end = _LAST[kind, reset_day] = _period(now, kind, reset_day)
    return begin, end


def _period(now: float, kind: Period, reset_day: int) -> tuple[float, float]:
    today = datetime.fromtimestamp(now, UTC).date()
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
    return _moment(begin), _moment(end)


def _reset(year: int, month: int, day: int) -> date:
    """The reset day of a month; `month` may be 0 or 13."""
    years, months = divmod(month - 1, 12)
    year, month = year + years, months + 1
    return date(year, month, min(max(day, 1), monthrange(year, month)[1]))


def _moment(day: date) -> float:
    return datetime.combine(day, time(), UTC).timestamp()
