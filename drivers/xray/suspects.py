"""Users with a new credential, and which connections were there before it: a late line may tell of one. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Set

from drivers.sockets.connections import Endpoint
from protos.handover_pb2 import Suspect
from protos.handover_pb2 import Suspects as Packed

# A user of an inbound, by tag and key.
Pair = tuple[str, str]

# Seconds after a change of credential in which a line may tell of a connection that a user had before: the core
# writes it when it has looked at the first bytes, and where its rules need that has asked the DNS.
LATE = 5.0


class Suspects:
    """Looks at who is connected are numbered. Of each connection is kept which look saw it first, not each look."""

    def __init__(self) -> None:
        self._look = 0
        self._since: dict[Endpoint, int] = {}
        # Until when, and the last look before the user had the new credential.
        self._pairs: dict[Pair, tuple[float, int]] = {}
        self._pruned = 0.0

    def __len__(self) -> int:
        return len(self._pairs)

    def add(self, pairs: Iterable[Pair], connected: Set[Endpoint], now: float) -> None:
        """These have a new credential from now on; all who are `connected` to any inbound now were so before."""
        if now > self._pruned + LATE:
            self.prune(now)
        self._look += 1
        self._since = {where: self._since.get(where, self._look) for where in connected}
        self._pairs.update(dict.fromkeys(pairs, (now + LATE, self._look)))

    def has(self, pair: Pair, where: Endpoint, now: float) -> bool:
        """Whether this connection is one that the user had before their credential changed."""
        until, look = self._pairs.get(pair, (now, 0))
        return now < until and self._since.get(where, look + 1) <= look

    def packed(self, now: float) -> Packed:
        """All of them, for the next program of the node."""
        users = [
            Suspect(tag=tag, key=key, seconds=until - now, look=look)
            for (tag, key), (until, look) in self._pairs.items()
            if until > now
        ]
        since = self._since if users else {}
        return Packed(look=self._look, users=users, where=since.keys(), since=since.values())

    def unpack(self, packed: Packed, now: float) -> None:
        """As an earlier program of the node knew them; there were none before."""
        self._look = packed.look
        self._since = dict(zip(packed.where, packed.since, strict=True))
        self._pairs = {(each.tag, each.key): (now + each.seconds, each.look) for each in packed.users}

    def prune(self, now: float) -> None:
        """Forget whose change is too long ago."""
        self._pruned = now
        self._pairs = {pair: found for pair, found in self._pairs.items() if now < found[0]}
        if not self._pairs:
            self._since = {}
