"""What is told of users who were connected from too many addresses: together, each once in a while, and never where."""

from __future__ import annotations

import math
from collections.abc import Callable

from twisted.internet.interfaces import IReactorTime

from node.events.journal import Tells
from node.events.kinds import Kind
from node.events.users import Gathering
from node.limits.limits import Limit

# Seconds after which a user is told of again who goes on, and how many are remembered for that.
AGAIN, REMEMBERED = 600.0, 10_000


class CrowdEvents:
    """Tells them. `name_of` spells a user, who is known by key."""

    def __init__(self, journal: Tells, reactor: IReactorTime, name_of: Callable[[str], str]) -> None:
        self._reactor = reactor
        self._name_of = name_of
        self._cut = Gathering(
            journal, reactor, Kind.LIMIT_ADDRESSES, "were connected from too many addresses, of which some gave way"
        )
        self._told = Gathering(
            journal, reactor, Kind.LIMIT_ADDRESSES, "are connected from too many addresses, and stay all the same"
        )
        # When each was told of, the last one last.
        self._when: dict[str, float] = {}

    def over(self, key: str, limit: Limit) -> None:
        """The user has too many."""
        now = self._reactor.seconds()
        if now < self._when.get(key, -math.inf) + AGAIN:
            return
        self._when.pop(key, None)
        self._when[key] = now
        if len(self._when) > REMEMBERED:
            del self._when[next(iter(self._when))]
        gathering = self._told if limit.addresses_told else self._cut
        gathering.add([(self._name_of(key), f"more than {limit.addresses} at once")])

    def close(self) -> None:
        """Tell what was gathered."""
        self._cut.flush()
        self._told.flush()
