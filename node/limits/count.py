"""The usage of one user, what follows from their limits, and their record in the state file. Pure.

Times are Unix seconds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import UTC, tzinfo
from typing import NamedTuple

from node.contract.counters import Both
from node.limits.limits import Limit, Way
from node.limits.periods import Period, known_zone, moved_to
from node.limits.weights import PARTS
from protos.kept_pb2 import KeptLimits

# The part of a quota at which it counts as nearly used up.
NEAR = 0.8
# Values in LimitState.off_for and in events.
QUOTA, EXPIRY, ABUSE = "quota", "expiry", "abuse"
# The largest number of bytes that is reported or saved.
MOST = 2**63 - 1


@dataclass(slots=True)
class Count:
    """The bytes of one user since `began`.

    `since` is Quota.since, the name of the count; None if the user has no quota. `before`: Quota.used, bytes that count
    from the start. `near`, `reached`, `expired`: what was reported. `off_since`: when the user was barred, or 0.
    `gone_since`: when the user was removed, or 0. `ahead`: when the count began, if the clock was set back to an
    earlier period since, or 0. `zone`: the time zone in which its periods begin. `cut_until`, `slow_until`: until when
    the user is barred or slow for abuse; `slow_speed`: bits a second meanwhile. `extra`: what the bytes weigh above
    `up` and `down`, in PARTS of a byte; negative if they weigh less; None if they all had the factor 1.
    """

    began: float
    since: int | None = None
    before: int = 0
    up: int = 0
    down: int = 0
    near: bool = False
    reached: bool = False
    expired: bool = False
    off_since: float = 0.0
    gone_since: float = 0.0
    ahead: float = 0.0
    zone: tzinfo = UTC
    cut_until: float = 0.0
    slow_until: float = 0.0
    slow_speed: int = 0
    extra: Both | None = None

    @property
    def reported(self) -> bool:
        """Whether something was reported that may not hold any more."""
        return self.near or self.reached or self.expired

    @property
    def weighted(self) -> Both:
        """The bytes up and down as they weigh, each rounded down."""
        up, down = self.extra or (0, 0)
        return min(max(0, self.up + up // PARTS), MOST), min(max(0, self.down + down // PARTS), MOST)

    def used(self, way: Way) -> int:
        """Bytes that count towards the quota."""
        up, down = (self.up, self.down) if self.extra is None else self.weighted
        return min(self.before + way.of(up, down), MOST)

    def add(self, up: int, down: int, extra: Both | None = None) -> None:
        """Add bytes; `extra`: what they weigh above their number, in PARTS."""
        if self.since is not None:
            self.up += up
            self.down += down
            if extra is not None:
                before = self.extra or (0, 0)
                self.extra = before[0] + extra[0], before[1] + extra[1]

    def begin(self, began: float, since: int | None, before: int = 0) -> None:
        """Start a new count."""
        self.began, self.since, self.before, self.ahead = began, since, before, 0.0
        self.up = self.down = 0
        self.extra = None
        self.near = self.reached = False


def follow_zone(count: Count, limit: Limit) -> None:
    """Move a count into the time zone of the limit, if TIMEZONE has changed."""
    if count.zone is not limit.zone:
        if count.since is not None and limit.period is not Period.NEVER:
            count.began = moved_to(limit.zone, count.began, count.zone)
            count.ahead = count.ahead and moved_to(limit.zone, count.ahead, count.zone)
        count.zone = limit.zone


def is_due(count: Count, limit: Limit, now: float) -> bool:
    """Whether a count has to start now, for the first time or again."""
    if not limit.quota:
        return count.since is not None
    if count.since is None or (limit.since != count.since and limit.since <= now):
        return True
    begin, end = limit.span(now)
    # In a period that was already counted before the clock was set back the count goes on.
    return count.began < begin and not begin <= count.ahead < end


def restart_if_due(count: Count, limit: Limit, now: float) -> bool:
    """Start a new count if it is time to. Returns whether the count or its period has changed."""
    follow_zone(count, limit)
    if not is_due(count, limit, now):
        return _follow(count, limit, now)
    if not limit.quota:
        count.begin(now, None)
    elif limit.since <= now and limit.since != count.since:
        count.begin(now, limit.since, limit.used)
    elif count.since is None:
        count.begin(now, 0)
    else:
        count.begin(limit.span(now)[0], count.since)
    return True


def _follow(count: Count, limit: Limit, now: float) -> bool:
    """Move the count into the current period if the clock was set back, or corrected. Returns whether it moved."""
    if not limit.quota:
        return False
    begin, end = limit.span(now)
    if count.began >= end:
        # With a clock at 1970 the period may begin at 0, which means that there is no count.
        count.began, count.ahead = max(begin, 1.0), max(count.began, count.ahead)
    elif count.began < begin:
        count.began, count.ahead = count.ahead, 0.0
    else:
        return False
    return True


def left(count: Count, limit: Limit) -> int:
    """Bytes left of the quota; negative if more were used."""
    return limit.quota - count.used(limit.way)


def reached(count: Count, limit: Limit, now: float) -> tuple[str, ...]:
    """The limits that the user has reached."""
    over = bool(limit.quota) and left(count, limit) <= 0
    expired = 0 < limit.expires_at <= now
    abused = now < count.cut_until
    if not (over or expired or abused):
        return ()
    return tuple(word for word, is_so in ((QUOTA, over), (EXPIRY, expired), (ABUSE, abused)) if is_so)


def reasons(reached: tuple[str, ...], limit: Limit) -> tuple[str, ...]:
    """Select the reached limits that bar the user."""
    tells = {QUOTA: limit.quota_tells, EXPIRY: limit.expires_tells, ABUSE: limit.abuse_tells}
    return tuple(word for word in reached if not tells[word])


def next_change(count: Count, limit: Limit, now: float) -> float:
    """When the user expires, a count starts or abuse is forgiven, whatever they carry; infinity if never."""
    moments: list[float] = [moment for moment in (limit.expires_at, count.cut_until, count.slow_until) if moment > now]
    if limit.quota and limit.since > now and limit.since != count.since:
        moments.append(limit.since)
    if limit.quota and limit.period is not Period.NEVER:
        _, end = limit.span(now)
        moments.append(end)
    return min(moments, default=math.inf)


class Override(NamedTuple):
    """An override by SetLimits, packed, and the limits of the user's own message at that time.

    It holds until the user's own message says something else.
    """

    limits: bytes
    own: bytes


# Fields that a count and its record have in the same form.
_KEPT = (
    *("began", "before", "up", "down", "near", "reached", "expired", "off_since", "gone_since", "ahead"),
    *("cut_until", "slow_until", "slow_speed"),
)


def pack(override: Override | None, count: Count | None) -> bytes:
    """Serialize both as one record."""
    kept = KeptLimits()
    if override is not None:
        kept.word, kept.over = override
    if count is not None:
        for name in _KEPT:
            setattr(kept, name, min(getattr(count, name), MOST))
        if count.extra is not None:
            (up, kept.parts_up), (down, kept.parts_down) = (divmod(each, PARTS) for each in count.extra)
            kept.more_up, kept.more_down = (max(-MOST, min(each, MOST)) for each in (up, down))
        kept.since = -1 if count.since is None else count.since
        kept.zone = "" if count.zone is UTC else str(count.zone)
    return kept.SerializeToString()


def unpack(packed: bytes) -> tuple[Override | None, Count | None]:
    """Parse a record."""
    kept = KeptLimits.FromString(packed)
    override = Override(kept.word, kept.over) if kept.HasField("word") else None
    if not kept.began:
        return override, None
    since = None if kept.since == -1 else kept.since
    extra = kept.more_up * PARTS + kept.parts_up, kept.more_down * PARTS + kept.parts_down
    same = {name: getattr(kept, name) for name in _KEPT}
    return override, Count(since=since, zone=known_zone(kept.zone), extra=extra if any(extra) else None, **same)
