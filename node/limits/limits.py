"""The limits that hold for one user, merged from their own limits and the defaults. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, tzinfo
from enum import Enum

from node.limits.periods import Period, period
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


@dataclass(frozen=True, slots=True)
class Limit:
    """The limits of one user; 0 is no limit. See `Limits` in protos/service.proto for the meaning of each.

    `quota`: bytes. `expires_at`: Unix seconds. `down`, `up`: bits a second. `…_tells`: the action TELL, so that
    reaching the limit only causes an event. `zone`: where the periods of the quota begin at midnight.
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
    zone: tzinfo = UTC
    abuse_tells: bool = False

    @property
    def any(self) -> bool:
        """Whether there is any limit."""
        return bool(self.quota or self.expires_at or self.addresses or self.down or self.up)

    def span(self, now: float) -> tuple[float, float]:
        """Begin and end of the quota's period that contains `now`."""
        return period(now, self.period, self.reset_day, self.zone)

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
    def of(cls, layers: Iterable[Limits], zone: tzinfo = UTC) -> Limit:
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
            zone=zone,
            abuse_tells=first("abuse_action").abuse_action == service_pb2.TELL,
        )


_NO_LIMITS = Limits()
NONE = Limit()


def _action(tells: bool) -> LimitAction:
    return service_pb2.TELL if tells else service_pb2.CUT


@dataclass(frozen=True)
class Defaults:
    """Default limits of all users, and by inbound tag, which take precedence; of several inbounds the first by name.

    `zone`: where the periods of all quotas begin at midnight.
    """

    all_users: Limits = field(default_factory=Limits)
    inbounds: Mapping[str, Limits] = field(default_factory=dict)
    zone: tzinfo = UTC
