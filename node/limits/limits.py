"""What holds for a user: their own word, and where that says nothing, that of the node's settings. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from protos import service_pb2
from protos.service_pb2 import LimitAction, Limits, Quota, Speed


class Way(Enum):
    """Which bytes count. The value is the number in Quota.Way."""

    BOTH = Quota.BOTH
    UP = Quota.UP
    DOWN = Quota.DOWN


class Period(Enum):
    """After what a count begins anew. The value is the number in Quota.Period."""

    NEVER = Quota.NEVER
    DAY = Quota.DAY
    WEEK = Quota.WEEK
    MONTH = Quota.MONTH


_WAYS = {way.value: way for way in Way}
_PERIODS = {period.value: period for period in Period}


@dataclass(frozen=True, slots=True)
class Limit:
    """What one user may use; 0 is no limit. See `Limits` in protos/service.proto for what each means.

    `quota`: bytes. `expires_at`: Unix seconds. `down`, `up`: bits a second. Where `…_told` is set, only an event tells
    that the limit was reached.
    """

    quota: int = 0
    way: Way = Way.BOTH
    since: int = 0
    used: int = 0
    period: Period = Period.NEVER
    reset_day: int = 0
    quota_told: bool = False
    expires_at: int = 0
    expires_told: bool = False
    addresses: int = 0
    addresses_told: bool = False
    down: int = 0
    up: int = 0

    @property
    def any(self) -> bool:
        """There is a limit at all."""
        return bool(self.quota or self.expires_at or self.addresses or self.down or self.up)

    def message(self) -> Limits:
        """The same as controllers are told it, what is no limit left out."""
        told = Limits()
        if self.quota:
            quota = told.bytes
            quota.bytes, quota.since, quota.used = self.quota, self.since, self.used
            quota.way, quota.period, quota.reset_day = self.way.value, self.period.value, self.reset_day
            quota.action = _action(self.quota_told)
        if self.expires_at:
            told.expires_at, told.expires_action = self.expires_at, _action(self.expires_told)
        if self.addresses:
            told.addresses, told.addresses_action = self.addresses, _action(self.addresses_told)
        if self.down or self.up:
            told.speed.CopyFrom(Speed(down=self.down, up=self.up))
        return told

    @classmethod
    def of(cls, words: Iterable[Limits]) -> Limit:
        """Of each limit what the first of these words says that says anything of it."""
        words = [word for word in words if word.ByteSize()]
        if len(words) == 1:
            return _limit(words[0])  # most often, and much faster told
        said = Limits()
        for word in words:
            for field, _ in word.ListFields():
                if not field.has_presence:
                    continue
                if not said.HasField(field.name):
                    _copy(word, said, field.name)
        return _limit(said)


NONE = Limit()
# What says what happens at a limit goes with it.
_ACTIONS = {"expires_at": "expires_action", "addresses": "addresses_action"}


def _copy(word: Limits, said: Limits, name: str) -> None:
    """Take one limit over, with what happens at it."""
    value = getattr(word, name)
    if isinstance(value, int):
        setattr(said, name, value)
    else:
        getattr(said, name).CopyFrom(value)
    if action := _ACTIONS.get(name):
        setattr(said, action, getattr(word, action))


def _action(told: bool) -> LimitAction:
    return service_pb2.TELL if told else service_pb2.CUT


def _limit(said: Limits) -> Limit:
    quota = said.bytes
    return Limit(
        quota=quota.bytes,
        way=_WAYS[quota.way],
        since=quota.since,
        used=quota.used,
        period=_PERIODS[quota.period],
        reset_day=quota.reset_day,
        quota_told=quota.action == service_pb2.TELL,
        expires_at=said.expires_at,
        expires_told=said.expires_action == service_pb2.TELL,
        addresses=said.addresses,
        addresses_told=said.addresses_action == service_pb2.TELL,
        down=said.speed.down,
        up=said.speed.up,
    )
