"""What a user has used, and what follows from their limits: whether they are off, and when to look again. Pure.

Times are Unix seconds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from node.limits.calendar import period
from node.limits.limits import Limit, Period, Way

# Used above four fifths, a quota is nearly used up.
NEAR = 0.8
# Words in LimitState.off_for and in events.
QUOTA, EXPIRY = "quota", "expiry"
# The greatest number of bytes that is told or kept; nobody carries as many.
MOST = 2**63 - 1


@dataclass(slots=True)
class Count:
    """The bytes of one user since `began`, of the count that is named `since`; `before`: those that were used already.

    `since` is None where nothing is counted, as the user has no quota. `near`, `reached`, `expired`: what was told.
    `off_since`: 0 while the user is in. `gone_since`: 0 while they are a user. `ahead`: when the count began, if the
    clock was set back to an earlier period since.
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

    @property
    def told(self) -> bool:
        """Something was told that may have to be told otherwise."""
        return self.near or self.reached or self.expired

    def used(self, way: Way) -> int:
        counted = (self.up if way is not Way.DOWN else 0) + (self.down if way is not Way.UP else 0)
        return min(self.before + counted, MOST)

    def add(self, up: int, down: int) -> None:
        if self.since is not None:
            self.up += up
            self.down += down

    def begin(self, began: float, since: int | None, before: int = 0) -> None:
        """Count anew."""
        self.began, self.since, self.before, self.ahead = began, since, before, 0.0
        self.up = self.down = 0
        self.near = self.reached = False


def begins(count: Count, limit: Limit, now: float) -> bool:
    """Whether it is time to count anew, or for the first time."""
    if not limit.quota:
        return count.since is not None
    if count.since is None or (limit.since != count.since and limit.since <= now):
        return True
    begin, end = period(now, limit.period, limit.reset_day)
    # Of a period that the clock came to before the count goes on.
    return count.began < begin and not begin <= count.ahead < end


def roll(count: Count, limit: Limit, now: float) -> bool:
    """Begin anew if it is time to. Returns whether the count is another one, or of another period, than it was."""
    if not begins(count, limit, now):
        return _follow(count, limit, now)
    if not limit.quota:
        count.begin(now, None)
    elif limit.since <= now and limit.since != count.since:
        count.begin(now, limit.since, limit.used)
    elif count.since is None:
        count.begin(now, 0)
    else:
        count.begin(period(now, limit.period, limit.reset_day)[0], count.since)
    return True


def _follow(count: Count, limit: Limit, now: float) -> bool:
    """The clock was set back, or is right again: the count goes on in the period that is now. Returns whether so."""
    if not limit.quota:
        return False
    begin, end = period(now, limit.period, limit.reset_day)
    if count.began >= end:
        # Where the clock knows nothing the period may begin at 0, which is no count.
        count.began, count.ahead = max(begin, 1.0), max(count.began, count.ahead)
    elif count.began < begin:
        count.began, count.ahead = count.ahead, 0.0
    else:
        return False
    return True


def left(count: Count, limit: Limit) -> int:
    """Bytes that may still be used; below 0 where more were."""
    return limit.quota - count.used(limit.way)


def reached(count: Count, limit: Limit, now: float) -> tuple[str, ...]:
    """The limits that are reached."""
    over = bool(limit.quota) and left(count, limit) <= 0
    expired = 0 < limit.expires_at <= now
    if not (over or expired):
        return ()
    return tuple(word for word, is_so in ((QUOTA, over), (EXPIRY, expired)) if is_so)


def reasons(reached: tuple[str, ...], limit: Limit) -> tuple[str, ...]:
    """For which of those that are reached the user is off."""
    told = {QUOTA: limit.quota_told, EXPIRY: limit.expires_told}
    return tuple(word for word in reached if not told[word])


def next_look(count: Count, limit: Limit, now: float) -> float:
    """When the user's time is over or a count begins, whatever they carry. Infinity where that is never."""
    moments: list[float] = [limit.expires_at] if limit.expires_at > now else []
    if limit.quota and limit.since > now and limit.since != count.since:
        moments.append(limit.since)
    if limit.quota and limit.period is not Period.NEVER:
        _, end = period(now, limit.period, limit.reset_day)
        moments.append(end)
    return min(moments, default=math.inf)
