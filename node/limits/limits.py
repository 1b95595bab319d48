"""The limits that hold for one user, merged from their own limits and the defaults; periods of quotas. Pure."""

from __future__ import annotations

import math
from calendar import monthrange
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, date, datetime, time, timedelta
from enum import Enum

from protos import service_pb2
from protos.service_pb2 import LimitAction, Limits, Quota, Speed


class Way(Enum):
    """Direction of the bytes that count. The value is that of Quota.Way."""

    BOTH = Quota.BOTH
    UP = Quota.UP
    DOWN = Quota.DOWN

    def of(self, up: int, down: int) -> int:
        """The bytes that count."""
        return (up if self is not Way.DOWN else 0) + (down if self is not Way.UP else 0)


class Period(Enum):
    """Period after which a count starts again. The value is that of Quota.Period."""

    NEVER = Quota.NEVER
    DAY = Quota.DAY
    WEEK = Quota.WEEK
    MONTH = Quota.MONTH


@dataclass(frozen=True, slots=True)
class Limit:
    """The limits of one user; 0 is no limit. See `Limits` in protos/service.proto for the meaning of each.

    `quota`: bytes. `expires_at`: Unix seconds. `down`, `up`: bits a second. `…_tells`: the action TELL, so that
    reaching the limit only causes an event.
    """

    quota: int = 0
    way: Way = Way.BOTH
    since: int = 0
    used: int = 0
    period: Period = Period.NEVER
    reset_day: int = 0
    quota_tells: bool = False
    expires_at: int = 0
    expires_tells: bool = False
    addresses: int = 0
    addresses_tells: bool = False
    down: int = 0
    up: int = 0
    abuse_tells: bool = False

    @property
    def any(self) -> bool:
        """Whether there is any limit."""
        return bool(self.quota or self.expires_at or self.addresses or self.down or self.up)

    def slowed(self, speed: int) -> Limit:
        """The same with this speed, unless it is lower already, or the user may not be slowed for abuse."""
        if self.abuse_tells:
            return self
        return replace(self, down=min(self.down or speed, speed), up=min(self.up or speed, speed))

    def message(self) -> Limits:
        """The message for controllers, without the limits that are 0."""
        message = Limits()
        if self.quota:
            quota = message.bytes
            quota.bytes, quota.since, quota.used = self.quota, self.since, self.used
            quota.way, quota.period, quota.reset_day = self.way.value, self.period.value, self.reset_day
            quota.action = _action(self.quota_tells)
        if self.expires_at:
            message.expires_at, message.expires_action = self.expires_at, _action(self.expires_tells)
        if self.addresses:
            message.addresses, message.addresses_action = self.addresses, _action(self.addresses_tells)
        if self.down or self.up:
            message.speed.CopyFrom(Speed(down=self.down, up=self.up))
        if self.abuse_tells:
            message.abuse_action = service_pb2.TELL
        return message

    @classmethod
    def of(cls, layers: Iterable[Limits]) -> Limit:
        """Merge layers of limits: each limit comes, with its action, from the first layer that has it."""
        layers = [layer for layer in layers if layer.ByteSize()]

        def first(name: str) -> Limits:
            return next((layer for layer in layers if layer.HasField(name)), _NO_LIMITS)

        quota, speed = first("bytes").bytes, first("speed").speed
        expiry, addresses = first("expires_at"), first("addresses")
        return Limit(
            quota=quota.bytes,
            way=Way(quota.way),
            since=quota.since,
            used=quota.used,
            period=Period(quota.period),
            reset_day=quota.reset_day,
            quota_tells=quota.action == service_pb2.TELL,
            expires_at=expiry.expires_at,
            expires_tells=expiry.expires_action == service_pb2.TELL,
            addresses=addresses.addresses,
            addresses_tells=addresses.addresses_action == service_pb2.TELL,
            down=speed.down,
            up=speed.up,
            abuse_tells=first("abuse_action").abuse_action == service_pb2.TELL,
        )


_NO_LIMITS = Limits()
NONE = Limit()


def _action(tells: bool) -> LimitAction:
    return service_pb2.TELL if tells else service_pb2.CUT


@dataclass(frozen=True)
class Defaults:
    """Default limits of all users, and by inbound tag, which take precedence; of several inbounds the first by name."""

    all_users: Limits = field(default_factory=Limits)
    inbounds: Mapping[str, Limits] = field(default_factory=dict)


# Periods: days begin at midnight UTC; times are Unix seconds.

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
