"""Batched events about users: the first is reported at once, those that follow soon together."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from twisted.internet.interfaces import IReactorTime

from node.base.alarm import Alarm
from node.events.journal import Tells
from node.events.kinds import Kind

# Seconds for which users are collected for the next event; names in one event; and names kept until then.
TOGETHER = 10.0
NAMED = 5
GATHERED = 10_000
# Most characters of a name and of a reason.
LONGEST_NAME, LONGEST_REASON = 100, 500


def listing(names: Sequence[str], count: int) -> str:
    """The text of an event about `count` users, of whom these are named."""
    return ", ".join(map(repr, names)) + (f" and {count - len(names)} others" if count > len(names) else "")


class UserEvents:
    """Reports refused and removed users."""

    def __init__(self, journal: Tells, reactor: IReactorTime) -> None:
        self._refused = Gathering(journal, reactor, Kind.USERS_REFUSED, "could not be applied")
        self._cut = Gathering(journal, reactor, Kind.USERS_CUT, "were removed and are out of the core")

    def refused(self, users: Collection[tuple[str, str]]) -> None:
        """Report users who could not be applied, each with the reason."""
        if users:
            self._refused.add(users)

    def cut(self, users: Collection[str]) -> None:
        """Report users who were removed and are out of the core."""
        if users:
            self._cut.add((name, "") for name in users)

    def close(self) -> None:
        """Report what was collected."""
        self._refused.flush()
        self._cut.flush()


class Gathering:
    """Collects users for events of one kind; `what` completes "anna, bert …"."""

    def __init__(self, journal: Tells, reactor: IReactorTime, kind: Kind, what: str) -> None:
        self._journal = journal
        self._reactor = reactor
        self._kind = kind
        self._what = what
        # The users for the next event; and those of the last one, who are not repeated within TOGETHER seconds.
        self._users: dict[str, str] = {}
        self._told: dict[str, str] = {}
        self._more = 0
        self._quiet_until = 0.0
        self._alarm = Alarm(reactor, self.flush)

    def add(self, users: Iterable[tuple[str, str]]) -> None:
        now = self._reactor.seconds()
        if now >= self._quiet_until:
            self._told = {}
        for name, reason in users:
            self._take(name[:LONGEST_NAME], reason[:LONGEST_REASON])
        if self._users and now >= self._quiet_until:
            self.flush()
        elif self._users:
            self._alarm.within(self._quiet_until - now)

    def flush(self) -> None:
        """Report what was collected."""
        self._alarm.cancel()
        users, more, self._users, self._more = self._users, self._more, {}, 0
        if users:
            self._quiet_until = self._reactor.seconds() + TOGETHER
            self._told = users
            self._tell(users, len(users) + more)

    def _take(self, name: str, reason: str) -> None:
        if self._told.get(name) == reason:
            return
        if name in self._users or len(self._users) < GATHERED:
            self._users[name] = reason
        else:
            self._more += 1

    def _tell(self, users: dict[str, str], count: int) -> None:
        names = [*users][:NAMED]
        reason, listed = users[names[0]], listing(names, count)
        fields: dict[str, object] = {"count": count, "names": ", ".join(names)}
        if reason:
            fields["reason"] = reason
        self._journal.tell(self._kind, f"{listed} {self._what}" + (f": {reason}" if reason else ""), **fields)
