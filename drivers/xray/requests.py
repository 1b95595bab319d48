"""Collect the requests of users from a core's access lines, once somebody asks for them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import lru_cache

from drivers.xray.abuse import is_torrent
from drivers.xray.access import Accepted, inbound_in
from node.contract.abuse import Request
from node.contract.accounts import key_of

# The most requests kept until they are collected.
MOST = 50_000


class Requests:
    """The requests through inbounds with these tags. `wanted`: `take` is to be called for each line."""

    def __init__(self, tags: Collection[str]) -> None:
        self.wanted = False
        self._tag_of = lru_cache(maxsize=1024)(lambda detour: inbound_in(detour, tags))
        self._is_torrent = lru_cache(maxsize=1024)(is_torrent)
        self._exempt: Collection[str] = ()
        self._collected: list[Request] = []

    def take(self, accepted: Accepted) -> None:
        """Process a line that the core wrote itself."""
        tag, key, target, udp = self._tag_of(accepted.detour), key_of(accepted.email), accepted.target, accepted.udp
        if tag is not None and key not in self._exempt and len(self._collected) < MOST:
            asked = target[4:] if udp or target.startswith("tcp:") else target
            torrent = self._is_torrent(accepted.detour)
            self._collected.append(Request(key, accepted.endpoint[:-2], tag, asked, udp, torrent))

    def collect(self, exempt: Collection[str]) -> Sequence[Request]:
        """As `SeesRequests.requests`."""
        self._exempt, self.wanted = exempt, True
        found, self._collected = self._collected, []
        return found
