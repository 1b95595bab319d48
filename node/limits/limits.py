"""The limits that hold for one user, merged from their own limits and the defaults. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from protos import service_pb2
from protos.service_pb2 import LimitAction, Limits, Quota, Speed


class Way(Enum):
    """Direction of the bytes that count. The value is that of Quota.Way."""

    BOTH = Quota.BOTH
    UP = Quota.UP
    DOWN = Quota.DOWN


class Period(Enum):
    """Period after which a count starts again. The value is that of Quota.Period."""

    NEVER = Quota.NEVER
    DAY = Quota.DAY
    WEEK = Quota.WEEK
    MONTH = Quota.MONTH


_WAYS = {way.value: way for way in Way}
_PERIODS = {period.value: period for period in Period}


@dataclass(frozen=True, slots=True)
class Limit:
    """The limits of one user; 0 is no limit. See `Limits` in protos/service.proto for the meaning of each.

    `quota`: bytes. `expires_at`: Unix seconds. `down`, `up`: bits a second. `…_told`: the action TELL, so that reaching
    the limit only causes an event.
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

    @property
    def any(self) -> bool:
        """Whether there is any limit."""
        return bool(self.quota or self.expires_at or self.addresses or self.down or self.up)

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
        return message

    @classmethod
    def of(cls, layers: Iterable[Limits]) -> Limit:
        """Merge layers of limits: each limit comes from the first layer that has it."""
        layers = [layer for layer in layers if layer.ByteSize()]
        if len(layers) == 1:
            return _limit(layers[0])  # the usual case, and much faster
        merged = Limits()
        for layer in layers:
            for field, _ in layer.ListFields():
                if not field.has_presence:
                    continue
                if not merged.HasField(field.name):
                    _copy(layer, merged, field.name)
        return _limit(merged)


NONE = Limit()
# The field with the action of a limit, which is copied with the limit.
_ACTIONS = {"expires_at": "expires_action", "addresses": "addresses_action"}


def _copy(layer: Limits, merged: Limits, name: str) -> None:
    """Copy one limit, with its action."""
    value = getattr(layer, name)
    if isinstance(value, int):
        setattr(merged, name, value)
    else:
        getattr(merged, name).CopyFrom(value)
    if action := _ACTIONS.get(name):
        setattr(merged, action, getattr(layer, action))


def _action(tells: bool) -> LimitAction:
    return service_pb2.TELL if tells else service_pb2.CUT


def _limit(message: Limits) -> Limit:
    quota = message.bytes
    return Limit(
        quota=quota.bytes,
        way=_WAYS[quota.way],
        since=quota.since,
        used=quota.used,
        period=_PERIODS[quota.period],
        reset_day=quota.reset_day,
        quota_tells=quota.action == service_pb2.TELL,
        expires_at=message.expires_at,
        expires_tells=message.expires_action == service_pb2.TELL,
        addresses=message.addresses,
        addresses_tells=message.addresses_action == service_pb2.TELL,
        down=message.speed.down,
        up=message.speed.up,
    )
