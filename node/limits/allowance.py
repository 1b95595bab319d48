"""The bytes that the node itself may use in a month, and what it has used of them. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from node.limits.calendar import period
from node.limits.limits import Period
from node.limits.meter import Meter
from node.machine.interfaces import Carried
from protos.kept_pb2 import KeptNode
from protos.service_pb2 import NodeQuota

# Of the quota, when it is told that it is nearly used up.
NEAR = 0.8
NOTHING = Carried(0, 0)


class Flow(StrEnum):
    """Which bytes count. The value is the word in NODE_QUOTA_WAY."""

    BOTH = "both"
    OUT = "out"
    IN = "in"


@dataclass(frozen=True)
class Allowance:
    """What the operator decided; no `bytes`: no limit. `interfaces`: which ones count, none for all of the machine's.

    With `closes` no new connections are taken when it is used up, else that is only told.
    """

    bytes: int = 0
    reset_day: int = 1
    flow: Flow = Flow.BOTH
    interfaces: tuple[str, ...] = ()
    closes: bool = False


class News(StrEnum):
    """What can happen to it."""

    NEAR = "near"
    OVER = "over"


@dataclass
class Spent:
    """What was used since `began`, and when it was read last (Unix seconds); what was told of it.

    `ahead`: when the period began, if the clock was set back to an earlier one since.
    """

    began: float = 0.0
    seen: float = 0.0
    carried: Carried = NOTHING
    near: bool = False
    over: bool = False
    meter: Meter = field(default_factory=Meter)
    ahead: float = 0.0

    def book(self, moved: Carried, now: float, reset_day: int) -> bool:
        """Add what moved since the last reading. Returns whether another period has begun since.

        Of what moved across the reset day, while the node was away, the new period gets its part by time. A clock that
        is set back begins no period anew, and none when it is right again.
        """
        begin, end = period(now, Period.MONTH, reset_day)
        turned = 0 < (self.began or self.ahead) < begin and not begin <= self.ahead < end
        if self.began > begin:
            self.ahead = max(self.began, self.ahead)
        elif self.began < begin:
            self.ahead = 0.0
        if turned:
            part = min(1.0, (now - begin) / max(now - self.seen, 1.0))
            self.near = self.over = False
            self.carried, moved = NOTHING, Carried(*(round(count * part) for count in moved))
        self.began, self.seen = begin, now
        self.carried = Carried(*map(sum, zip(self.carried, moved, strict=True)))
        return turned

    def judge(self, allowance: Allowance) -> News | None:
        """What there is to tell of it now, if that was not told yet: used up goes before nearly so."""
        used, was = self.used(allowance.flow), (self.near, self.over)
        self.near, self.over = used >= NEAR * allowance.bytes, used >= allowance.bytes
        if self.over and not was[1]:
            return News.OVER
        return News.NEAR if self.near and not any(was) else None

    def used(self, flow: Flow) -> int:
        """Bytes that count."""
        return {Flow.IN: self.carried.received, Flow.OUT: self.carried.sent}.get(flow, sum(self.carried))

    def summary(self, allowance: Allowance) -> NodeQuota:
        """As controllers are told it."""
        return NodeQuota(
            bytes=allowance.bytes,
            used=self.used(allowance.flow),
            resets_at=int(period(self.seen, Period.MONTH, allowance.reset_day)[1]),
            closed=self.over and allowance.closes,
        )


def pack(spent: Spent) -> bytes:
    """As it lies on disk."""
    kept = KeptNode(began=spent.began, seen=spent.seen, near=spent.near, over=spent.over, boot=spent.meter.boot)
    kept.used.received, kept.used.sent = spent.carried
    kept.ahead = spent.ahead
    for name, carried in spent.meter.last.items():
        kept.last[name].received, kept.last[name].sent = carried
    return kept.SerializeToString(deterministic=True)


def unpack(packed: bytes) -> Spent:
    """What was packed."""
    kept = KeptNode.FromString(packed)
    last = {name: Carried(carried.received, carried.sent) for name, carried in kept.last.items()}
    used = Carried(kept.used.received, kept.used.sent)
    return Spent(kept.began, kept.seen, used, kept.near, kept.over, Meter(kept.boot, last), kept.ahead)
