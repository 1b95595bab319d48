"""Connections of which no line told whose they are: under load the core leaves lines out.

What it leaves out it still knows: from which addresses each user is online. An address that one user alone has is
theirs with every connection from there; a user who was removed and is still online from an address has one of those
from there that are nobody's. That is the core's word, so nobody can have it say another one.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping

from twisted.internet.interfaces import IReactorTime

from drivers.sockets.connections import Endpoint
from node.contract.connections import Address

# The part of the time for which the core is asked about users online at most, and seconds between two times at least.
SHARE, PAUSE = 0.02, 1.0

# Who is online, by address, as keys.
Online = Callable[[], Awaitable[Mapping[Address, Collection[str]]]]


class Strays:
    """Finds whose they are, of those that two looks have seen."""

    def __init__(self, reactor: IReactorTime, online: Online) -> None:
        self._reactor = reactor
        self._online = online
        self._seen: set[tuple[str, Endpoint]] = set()
        # There are some that one look alone has seen.
        self.fresh = False
        self._asking = False
        self._rest_until = float("-inf")

    async def claim(self, nobodys: Collection[tuple[str, Endpoint]]) -> dict[tuple[str, Endpoint], Collection[str]]:
        """Who is online where these come from, each by the inbound and the endpoint, as far as that is known by now.

        Raises `ApiFailed`.
        """
        now = self._reactor.seconds()
        again = self._seen.intersection(nobodys)
        rests = self._asking or now < self._rest_until
        self.fresh = len(again) < len(nobodys) or (rests and bool(again))
        self._seen = set(nobodys)
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


def by_address(pairs: Collection[tuple[Address, str]]) -> dict[Address, set[str]]:
    """Users by the addresses that each is online from. Pure."""
    found: dict[Address, set[str]] = {}
    for address, key in pairs:
        found.setdefault(address, set()).add(key)
    return found
