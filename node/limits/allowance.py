"""NODE_QUOTA: the bytes that the machine may carry in a month, and how many it has carried. Pure."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from datetime import UTC, tzinfo
from enum import StrEnum

from node.base.settings import Options, chosen, names, number, setting, word
from node.events.kinds import Kind
from node.limits.parsing import size
from node.limits.periods import Period, known_zone, moved_to, period
from node.machine.interfaces import Carried, Interfaces, carried_between, of_machine
from protos.kept_pb2 import KeptNode, KeptReading
from protos.service_pb2 import NodeQuota

# The part of the quota at which the node reports that it is nearly used up.
NEAR = 0.8
NOTHING = Carried(0, 0)
UNREAD = Interfaces("", {}, frozenset())


class Flow(StrEnum):
    """Which bytes count. The value is the word in NODE_QUOTA_WAY."""

    BOTH = "both"
    OUT = "out"
    IN = "in"


@dataclass(frozen=True)
class Allowance(Options):
    """The settings NODE_QUOTA…: 0 `bytes` is no limit; empty `interfaces` are those that `of_machine` chooses.

    With `closes` the node takes no new connections when the quota is used up; otherwise it only warns.
    """

    bytes: int = setting("NODE_QUOTA", read=lambda text: size(text or "0")).help(
        "bytes that the machine may carry in a month, such as 2TB or 500GiB (default: no limit)",
        "Set it where your hoster bills traffic. See [limits.md](limits.md#the-nodes-own-quota).",
    )
    reset_day: int = setting("NODE_QUOTA_RESET_DAY", "1", number(1, 31)).help(
        "day of the month, 1 to 31, on which NODE_QUOTA starts again at midnight; the last day of a shorter month",
        "Set the day on which your hoster's billing period begins, and its time zone as TIMEZONE.",
    )
    flow: Flow = setting("NODE_QUOTA_WAY", "both", lambda text: Flow(word(*Flow)(text))).help(
        "bytes that count towards NODE_QUOTA: both, out or in",
        "Set the direction that your hoster bills.",
    )
    interfaces: tuple[str, ...] = setting("NODE_QUOTA_INTERFACE", read=names).help(
        "network interfaces that count towards NODE_QUOTA, comma-separated (default: those that are hardware; if there "
        "are none, all but lo)",
        "Set it if some interface is not billed, such as one of a private network.",
    )
    closes: bool = setting("NODE_QUOTA_ACTION", "warn", chosen("close", "warn")).help(
        "what the node does when NODE_QUOTA is used up: warn, or close (take no new connections of users)",
        "Set `close` where traffic beyond the quota costs too much.",
    )
    # That of TIMEZONE: months begin at midnight there.
    zone: tzinfo = UTC

    def counted(self, interfaces: Interfaces) -> Collection[str]:
        """The interfaces whose bytes count, by name."""
        return self.interfaces or of_machine(interfaces)


@dataclass
class Spent:
    """Bytes carried since `began`, the time of the last reading (`seen`, both Unix seconds), and what was reported.

    `last`: the last reading; it has no boot id before the first. `ahead`: the begin of the period that was counted
    before the clock was set back to an earlier period, or 0. `zone`: the time zone in which the period began.
    """

    began: float = 0.0
    seen: float = 0.0
    carried: Carried = NOTHING
    near: bool = False
    over: bool = False
    last: Interfaces = UNREAD
    ahead: float = 0.0
    zone: tzinfo = UTC

    def read(self, interfaces: Interfaces, counted: Collection[str]) -> Carried:
        """Return the bytes that the `counted` interfaces carried since the last reading; zero for the first reading."""
        last, self.last = self.last, interfaces
        return carried_between(last, interfaces, counted) if last.boot else NOTHING

    def book(self, moved: Carried, now: float, reset_day: int, zone: tzinfo = UTC) -> bool:
        """Add the bytes moved since the last reading. Returns whether a new period has begun since then.

        Bytes that moved across the reset day, while the node was away, are split by time: the new period gets its
        part. A clock that is set back starts no new period, and neither does its correction or a change of the zone.
        """
        if zone is not self.zone:
            self.began, self.ahead = (begun and moved_to(zone, begun, self.zone) for begun in (self.began, self.ahead))
            self.zone = zone
        begin, end = period(now, Period.MONTH, reset_day, zone)
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

    def judge(self, allowance: Allowance) -> Kind | None:
        """Return what has to be reported now and was not yet: OVER takes precedence over NEAR."""
        used, was = self.used(allowance.flow), (self.near, self.over)
        self.near, self.over = used >= NEAR * allowance.bytes, used >= allowance.bytes
        if self.over and not was[1]:
            return Kind.NODE_QUOTA_OVER
        return Kind.NODE_QUOTA_NEAR if self.near and not any(was) else None

    def used(self, flow: Flow) -> int:
        """Bytes that count, by NODE_QUOTA_WAY."""
        return {Flow.IN: self.carried.received, Flow.OUT: self.carried.sent}.get(flow, sum(self.carried))

    def summary(self, allowance: Allowance) -> NodeQuota:
        """The message for controllers."""
        return NodeQuota(
            bytes=allowance.bytes,
            used=self.used(allowance.flow),
            resets_at=int(period(self.seen, Period.MONTH, allowance.reset_day, self.zone)[1]),
            closed=self.over and allowance.closes,
        )


def pack(spent: Spent) -> bytes:
    """Serialize for the state file."""
    kept = KeptNode(began=spent.began, seen=spent.seen, near=spent.near, over=spent.over)
    kept.used.received, kept.used.sent = spent.carried
    kept.ahead, kept.zone = spent.ahead, "" if spent.zone is UTC else str(spent.zone)
    keep(kept, spent.last)
    return kept.SerializeToString(deterministic=True)


def unpack(packed: bytes) -> Spent:
    """Parse a record of the state file."""
    kept = KeptNode.FromString(packed)
    used = Carried(kept.used.received, kept.used.sent)
    return Spent(kept.began, kept.seen, used, kept.near, kept.over, kept_of(kept), kept.ahead, known_zone(kept.zone))


def keep(kept: KeptNode | KeptReading, interfaces: Interfaces) -> None:
    """Write a reading of the interfaces into a record."""
    kept.boot = interfaces.boot
    for name, carried in interfaces.carried.items():
        kept.last[name].received, kept.last[name].sent = carried


def kept_of(kept: KeptNode | KeptReading) -> Interfaces:
    """The reading of the interfaces in a record, without which of them are hardware."""
    last = {name: Carried(carried.received, carried.sent) for name, carried in kept.last.items()}
    return Interfaces(kept.boot, last, frozenset())
