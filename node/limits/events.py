"""What is told of users' limits: each user by an event of their own, and of very many at once together."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from twisted.internet.interfaces import IReactorTime

from node.events.journal import Tells
from node.events.kinds import Kind
from node.events.users import TOGETHER, Gathering
from node.limits.book import News, Told
from node.limits.count import EXPIRY, QUOTA

# Users who have an event of their own in the time for which others are gathered.
ALONE = 50

_KINDS = {
    News.NEAR: (Kind.LIMIT_NEAR, "have used four fifths of their quota"),
    News.REACHED: (Kind.LIMIT_REACHED, "have reached a limit, and are in all the same"),
    News.CUT: (Kind.LIMIT_CUT, "are out of the core, by their limits"),
    News.BACK: (Kind.LIMIT_BACK, "may come in again"),
}
_TEXTS = {
    (News.NEAR, QUOTA): "{user!r} has used four fifths of their quota",
    (News.REACHED, QUOTA): "{user!r} has used up their quota, and is in all the same",
    (News.REACHED, EXPIRY): "the time of {user!r} is over, and they are in all the same",
    (News.CUT, QUOTA): "{user!r} has used up their quota, and is out of the core",
    (News.CUT, EXPIRY): "the time of {user!r} is over, and they are out of the core",
    (News.BACK, ""): "{user!r} may come in again",
}


class LimitEvents:
    """Tells them. `name_of` spells a user, who is known by key."""

    def __init__(self, journal: Tells, reactor: IReactorTime, name_of: Callable[[str], str]) -> None:
        self._journal = journal
        self._reactor = reactor
        self._name_of = name_of
        self._gathered = {news: Gathering(journal, reactor, *kind) for news, kind in _KINDS.items()}
        self._alone = 0
        self._alone_until = 0.0

    def tell(self, news: Iterable[Told]) -> None:
        """This has happened."""
        now = self._reactor.seconds()
        if now >= self._alone_until:
            self._alone, self._alone_until = ALONE, now + TOGETHER
        for told in news:
            self._tell(told)

    def close(self) -> None:
        """Tell what was gathered."""
        for gathered in self._gathered.values():
            gathered.flush()

    def _tell(self, told: Told) -> None:
        user = self._name_of(told.key)
        if self._alone <= 0:
            self._gathered[told.news].add([(user, told.reason)])
            return
        self._alone -= 1
        kind, _ = _KINDS[told.news]
        fields = {"limit": told.reason} if told.reason else {}
        self._journal.tell(kind, _TEXTS[told.news, told.reason].format(user=user), user=user, **fields)
