"""Recognise connections made before a change of credential, whose access lines come after it. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Set

from drivers.sockets.connections import Endpoint
from protos.handover_pb2 import Suspect
from protos.handover_pb2 import Suspects as Packed

# A user of an inbound: tag and key.
Pair = tuple[str, str]

# Seconds after a change of credential within which a line may name an older connection: the core writes it only after
# it has sniffed the first bytes and, if its rules need that, asked the DNS.
LATE = 5.0


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
