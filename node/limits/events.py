"""Events about users' limits: one for each user, and one for many if very many are affected at once."""

from __future__ import annotations

import math
from collections.abc import Iterable

from twisted.internet.interfaces import IReactorTime

from node.events.journal import Journal
from node.events.kinds import Kind
from node.events.users import TOGETHER, Gathering
from node.limits.book import Report
from node.limits.count import ABUSE, EXPIRY, QUOTA
from node.limits.in_force import InForce
from node.limits.limits import Limit

# Users who get an event of their own within TOGETHER seconds; the others are collected.
ALONE = 50
# Seconds until a user who goes on having too many addresses is reported again, and users remembered for that.
AGAIN, REMEMBERED = 600.0, 10_000

_TOGETHER = {
    Kind.LIMIT_NEAR: "have used four fifths of their quota",
    Kind.LIMIT_REACHED: "have reached a limit, and stay in (action TELL)",
    Kind.LIMIT_CUT: "have reached a limit, and are barred",
    Kind.LIMIT_BACK: "are let in again",
}
_TEXTS = {
    (Kind.LIMIT_NEAR, QUOTA): "{user!r} has used four fifths of their quota",
    (Kind.LIMIT_REACHED, QUOTA): "{user!r} has used up their quota, and stays in (action TELL)",
    (Kind.LIMIT_REACHED, EXPIRY): "{user!r} has expired, and stays in (action TELL)",
    (Kind.LIMIT_CUT, QUOTA): "{user!r} has used up their quota, and is barred",
    (Kind.LIMIT_CUT, EXPIRY): "{user!r} has expired, and is barred",
    (Kind.LIMIT_CUT, ABUSE): "{user!r} is barred for a time, for abuse",
    (Kind.LIMIT_BACK, ""): "{user!r} is let in again",
}
# Text for users with too many addresses, by whether their limit has the action TELL.
_ADDRESSES = {
    False: "were connected from too many addresses: some were disconnected",
    True: "are connected from too many addresses, and stay connected (action TELL)",
}


class LimitEvents:
    """Writes the events."""

    def __init__(self, journal: Journal, reactor: IReactorTime, in_force: InForce) -> None:
        self._journal = journal
        self._reactor = reactor
        self._in_force = in_force
        self._gathered = {kind: Gathering(journal, reactor, kind, text) for kind, text in _TOGETHER.items()}
        self._alone = 0
        self._alone_until = 0.0
        self._addresses = {
            tells: Gathering(journal, reactor, Kind.LIMIT_ADDRESSES, text) for tells, text in _ADDRESSES.items()
        }
        # When each user was reported last for their addresses, the oldest first.
        self._when: dict[str, float] = {}

    def report(self, news: Iterable[Report]) -> None:
        """Report what has happened."""
        now = self._reactor.seconds()
        if now >= self._alone_until:
            self._alone, self._alone_until = ALONE, now + TOGETHER
        for report in news:
            self._write(report)

    def too_many_addresses(self, key: str, limit: Limit) -> None:
        """Report that the user has too many addresses: once in a while, and never the addresses."""
        now = self._reactor.seconds()
        if now < self._when.get(key, -math.inf) + AGAIN:
            return
        self._when.pop(key, None)
        self._when[key] = now
        if len(self._when) > REMEMBERED:
            del self._when[next(iter(self._when))]
        reason = f"more than {limit.addresses} at once"
        self._addresses[limit.addresses_tells].add([(self._in_force.name_of(key), reason)])

    def close(self) -> None:
        """Report what was collected."""
        for gathered in (*self._gathered.values(), *self._addresses.values()):
            gathered.flush()

    def _write(self, report: Report) -> None:
        user = self._in_force.name_of(report.key)
        if self._alone <= 0:
            self._gathered[report.kind].add([(user, report.reason)])
            return
        self._alone -= 1
        fields = {"limit": report.reason} if report.reason else {}
        self._journal.tell(report.kind, _TEXTS[report.kind, report.reason].format(user=user), user=user, **fields)
