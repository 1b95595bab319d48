"""Connections whose access line comes late, or never.

Late are lines of connections made before a change of credential. The core drops lines under load, but it still knows
from which addresses each user is online. If only one user is online at an address, all connections from there are
theirs; a removed user who is still online at an address has one of the unattributed connections from there. Users
cannot forge this, since it comes from the core's own state.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Set

from twisted.internet.interfaces import IReactorTime

from drivers.sockets.sock_diag import Endpoint
from node.contract.connections import Address
from protos.handover_pb2 import Suspect
from protos.handover_pb2 import Suspects as Packed

# A user of an inbound: tag and key.
Pair = tuple[str, str]

# Seconds after a change of credential within which a line may name an older connection: the core writes it only after
# it has sniffed the first bytes and, if its rules need that, asked the DNS.
LATE = 5.0
# The largest share of time spent on asking the core for users online, and the least seconds between two calls.
SHARE, PAUSE = 0.02, 1.0

# Returns the keys of the users online, by address.
Online = Callable[[], Awaitable[Mapping[Address, Collection[str]]]]


class OldCredentials:
    """Users with a changed credential. Looks are numbered, and each connection has the number of its first look."""

    def __init__(self) -> None:
        self._look = 0
        self._since: dict[Endpoint, int] = {}
        # By user: until when it matters (seconds), and the last look before the change.
        self._pairs: dict[Pair, tuple[float, int]] = {}
        self._pruned = 0.0

    def __len__(self) -> int:
        return len(self._pairs)

    def add(self, pairs: Iterable[Pair], connected: Set[Endpoint], now: float) -> None:
        """These users get a new credential now; the `connected` endpoints, of all inbounds, are older."""
        if now > self._pruned + LATE:
            self.prune(now)
        self._look += 1
        self._since = {where: self._since.get(where, self._look) for where in connected}
        self._pairs.update(dict.fromkeys(pairs, (now + LATE, self._look)))

    def has(self, pair: Pair, where: Endpoint, now: float) -> bool:
        """Whether the user made this connection before their credential changed."""
        until, look = self._pairs.get(pair, (now, 0))
        return now < until and self._since.get(where, look + 1) <= look

    def packed(self, now: float) -> Packed:
        """Pack everything for the next node process."""
        users = [
            Suspect(tag=tag, key=key, seconds=until - now, look=look)
            for (tag, key), (until, look) in self._pairs.items()
            if until > now
        ]
        since = self._since if users else {}
        return Packed(look=self._look, users=users, where=since.keys(), since=since.values())

    def unpack(self, packed: Packed, now: float) -> None:
        """Restore what an earlier node process packed."""
        self._look = packed.look
        self._since = dict(zip(packed.where, packed.since, strict=True))
        self._pairs = {(each.tag, each.key): (now + each.seconds, each.look) for each in packed.users}

    def prune(self, now: float) -> None:
        """Forget changes older than `LATE` seconds."""
        self._pruned = now
        self._pairs = {pair: found for pair, found in self._pairs.items() if now < found[0]}
        if not self._pairs:
            self._since = {}


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
