"""Attribute connections without an access line, which the core drops under load, by the addresses of users online.

The core still knows from which addresses each user is online. If only one user is online at an address, all connections
from there are theirs; a removed user who is still online at an address has one of the unattributed connections from
there. Users cannot forge this, since it comes from the core's own state.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping

from twisted.internet.interfaces import IReactorTime

from drivers.sockets.connections import Endpoint
from node.contract.connections import Address

# The largest share of time spent on asking the core for users online, and the least seconds between two calls.
SHARE, PAUSE = 0.02, 1.0

# Returns the keys of the users online, by address.
Online = Callable[[], Awaitable[Mapping[Address, Collection[str]]]]


class Unlogged:
    """Finds the possible users of connections that two looks in a row have seen."""

    def __init__(self, reactor: IReactorTime, online: Online) -> None:
        self._reactor = reactor
        self._online = online
        self._seen: set[tuple[str, Endpoint]] = set()
        # Whether some connections need another look.
        self.fresh = False
        self._asking = False
        self._rest_until = float("-inf")

    async def claim(self, strays: Collection[tuple[str, Endpoint]]) -> dict[tuple[str, Endpoint], Collection[str]]:
        """For unattributed connections (inbound, endpoint): the users online at their address, if known by now.

        Raises `ApiFailed`.
        """
        now = self._reactor.seconds()
        again = self._seen.intersection(strays)
        rests = self._asking or now < self._rest_until
        self.fresh = len(again) < len(strays) or (rests and bool(again))
        self._seen = set(strays)
        if not again or rests:
            return {}
        self._asking = True
        try:
            online = await self._online()
            return {stray: online[stray[1][:-2]] for stray in again if stray[1][:-2] in online}
        finally:
            self._asking = False
            took = self._reactor.seconds() - now
            self._rest_until = now + took + max(PAUSE, took / SHARE)
