"""The limits of users who have none of their own, by the node's settings. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache

from node.limits.limits import Limit
from protos.service_pb2 import Limits


@dataclass(frozen=True)
class Defaults:
    """For everybody, and by the tags of inbounds, which go before that. Of several inbounds the first by name does."""

    everybody: Limits = field(default_factory=Limits)
    inbounds: Mapping[str, Limits] = field(default_factory=dict)


class Rules:
    """Makes what holds for a user of what they say, packed, and of the inbounds that they are in."""

    def __init__(self, defaults: Defaults) -> None:
        self._defaults = defaults
        self._made = lru_cache(maxsize=100_000)(self._make)
        # What holds for who says nothing, whatever inbounds they are in.
        self.everybody = self._make(b"", ())

    def of(self, own: bytes, tags: tuple[str, ...]) -> Limit:
        """The limit. Many users have the same."""
        return self._made(own, tags if self._defaults.inbounds else ())

    @property
    def by_inbound(self) -> bool:
        """Whether the inbounds of a user matter."""
        return bool(self._defaults.inbounds)

    def _make(self, own: bytes, tags: tuple[str, ...]) -> Limit:
        said = [self._defaults.inbounds[tag] for tag in sorted(tags) if tag in self._defaults.inbounds]
        return Limit.of([Limits.FromString(own), *said, self._defaults.everybody])
