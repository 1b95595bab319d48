"""Events about users' limits: one for each user, and one for many if very many are affected at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from twisted.internet.interfaces import IReactorTime

from node.events.journal import Tells
from node.events.kinds import Kind
from node.events.users import TOGETHER, Gathering
from node.limits.book import News, Report
from node.limits.count import EXPIRY, QUOTA

# Users who get an event of their own within TOGETHER seconds; the others are collected.
ALONE = 50

_KINDS = {
    News.NEAR: (Kind.LIMIT_NEAR, "have used four fifths of their quota"),
    News.REACHED: (Kind.LIMIT_REACHED, "have reached a limit, and stay in (action TELL)"),
    News.CUT: (Kind.LIMIT_CUT, "have reached a limit, and are barred"),
    News.BACK: (Kind.LIMIT_BACK, "are let in again"),
}
_TEXTS = {
    (News.NEAR, QUOTA): "{user!r} has used four fifths of their quota",
    (News.REACHED, QUOTA): "{user!r} has used up their quota, and stays in (action TELL)",
    (News.REACHED, EXPIRY): "{user!r} has expired, and stays in (action TELL)",
    (News.CUT, QUOTA): "{user!r} has used up their quota, and is barred",
    (News.CUT, EXPIRY): "{user!r} has expired, and is barred",
    (News.BACK, ""): "{user!r} is let in again",
}


class LimitEvents:
    """Writes the events. `name_of` returns a user's name for their key."""

    def __init__(self, journal: Tells, reactor: IReactorTime, name_of: Callable[[str], str]) -> None:
        self._journal = journal
        self._reactor = reactor
        self._name_of = name_of
        self._gathered = {news: Gathering(journal, reactor, *kind) for news, kind in _KINDS.items()}
        self._alone = 0
        self._alone_until = 0.0

    def report(self, news: Iterable[Report]) -> None:
        """Report what has happened."""
        now = self._reactor.seconds()
        if now >= self._alone_until:
            self._alone, self._alone_until = ALONE, now + TOGETHER
        for report in news:
            self._write(report)

    def close(self) -> None:
        """Report what was collected."""
        for gathered in self._gathered.values():
            gathered.flush()

    def _write(self, report: Report) -> None:
        user = self._name_of(report.key)
        if self._alone <= 0:
            self._gathered[report.news].add([(user, report.reason)])
            return
        self._alone -= 1
        kind, _ = _KINDS[report.news]
        fields = {"limit": report.reason} if report.reason else {}
        self._journal.tell(kind, _TEXTS[report.news, report.reason].format(user=user), user=user, **fields)
