"""Default limits, from the settings LIMITS and LIMITS_INBOUNDS. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache

from node.limits.limits import Limit
from protos.service_pb2 import Limits


@dataclass(frozen=True)
class Defaults:
    """Default limits of all users, and by inbound tag, which take precedence; of several inbounds the first by name."""

    all_users: Limits = field(default_factory=Limits)
    inbounds: Mapping[str, Limits] = field(default_factory=dict)


class Rules:
    """Merges a user's own limits, packed, with the defaults of their inbounds and of all users."""

    def __init__(self, defaults: Defaults) -> None:
        self._defaults = defaults
        self._made = lru_cache(maxsize=100_000)(self._make)
        # The limit of users without limits of their own, unless their inbound has defaults.
        self.all_users = self._make(b"", ())

    def of(self, own: bytes, tags: tuple[str, ...]) -> Limit:
        """The limit that holds. Cached, as many users have the same."""
        return self._made(own, tags if self._defaults.inbounds else ())

    @property
    def by_inbound(self) -> bool:
        """Whether some inbound has defaults."""
        return bool(self._defaults.inbounds)

    def _make(self, own: bytes, tags: tuple[str, ...]) -> Limit:
        layers = [self._defaults.inbounds[tag] for tag in sorted(tags) if tag in self._defaults.inbounds]
        return Limit.of([Limits.FromString(own), *layers, self._defaults.all_users])
