"""Events about users with too many addresses: collected, each user once in a while, and never with the addresses."""

from __future__ import annotations

import math
from collections.abc import Callable

from twisted.internet.interfaces import IReactorTime

from node.events.journal import Tells
from node.events.kinds import Kind
from node.events.users import Gathering
from node.limits.limits import Limit

# Seconds until a user who goes on is reported again, and users remembered for that.
AGAIN, REMEMBERED = 600.0, 10_000


class AddressEvents:
    """Writes the events. `name_of` returns a user's name for their key."""

    def __init__(self, journal: Tells, reactor: IReactorTime, name_of: Callable[[str], str]) -> None:
        self._reactor = reactor
        self._name_of = name_of
        self._cut = Gathering(
            journal, reactor, Kind.LIMIT_ADDRESSES, "were connected from too many addresses: some were disconnected"
        )
        self._reported = Gathering(
            journal,
            reactor,
            Kind.LIMIT_ADDRESSES,
            "are connected from too many addresses, and stay connected (action TELL)",
        )
        # When each user was reported last, the oldest first.
        self._when: dict[str, float] = {}

    def over(self, key: str, limit: Limit) -> None:
        """Report that the user has too many addresses."""
        now = self._reactor.seconds()
        if now < self._when.get(key, -math.inf) + AGAIN:
            return
        self._when.pop(key, None)
        self._when[key] = now
        if len(self._when) > REMEMBERED:
            del self._when[next(iter(self._when))]
        gathering = self._reported if limit.addresses_tells else self._cut
        gathering.add([(self._name_of(key), f"more than {limit.addresses} at once")])

    def close(self) -> None:
        """Report what was collected."""
        self._cut.flush()
        self._reported.flush()
