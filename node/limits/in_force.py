"""The limits in force: merged from the users' own messages, overrides by SetLimits, and the settings."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from collections.abc import Set as AbstractSet
from functools import lru_cache

from node.backend.desired import Desired
from node.backend.supplied import Tags
from node.limits.count import Override
from node.limits.limits import Defaults, Limit
from protos.service_pb2 import Limits, User


class InForce:
    """The limits of all users, by key. `default`: that of users without limits, unless their inbound has defaults."""

    def __init__(self, desired: Desired, defaults: Defaults) -> None:
        self._desired = desired
        self._defaults = defaults
        self._merged = lru_cache(maxsize=100_000)(self._merge)
        self.default = self._merge(b"", ())
        self.by_inbound = bool(defaults.inbounds)
        self.users: Collection[str] = ()
        self.overrides: dict[str, Override] = {}
        # Users who are slow for abuse, and the bits a second.
        self._slowed: dict[str, int] = {}
        self._own: Mapping[str, bytes] = {}
        # Caches; `_limited` is None where outdated.
        self._limits: dict[str, Limit] = {}
        self._limited: set[str] | None = None

    def of(self, key: str) -> Limit:
        """The limit that holds for a user. Cheap if it is cached, or if no user has limits."""
        if not (self._own or self.overrides or self.by_inbound or self._slowed):
            return self.default
        limit = self._limits.get(key)
        if limit is None:
            override, own = self.overrides.get(key), self.own(key)
            said = override.limits if override is not None and override.own == own else own
            limit = self._merged(said, self.tags_of(key) if self.by_inbound else ())
            if speed := self._slowed.get(key):
                limit = limit.slowed(speed)
            self._limits[key] = limit
        return limit

    @property
    def any(self) -> bool:
        """Whether any user may have limits."""
        return bool(self._own or self.overrides or self.by_inbound or self._slowed or self.default.any)

    def limited(self) -> AbstractSet[str]:
        """The users who have limits."""
        if self._limited is None:
            candidates = (
                self.users if self.default.any or self.by_inbound else {*self._own, *self.overrides, *self._slowed}
            )
            self._limited = {key for key in candidates if key in self.users and self.of(key).any}
        return self._limited

    def slow(self, key: str, speed: int) -> bool:
        """Have the user slow from now on; 0: no more. Returns whether that is a change."""
        if self._slowed.get(key, 0) == speed:
            return False
        if speed:
            self._slowed[key] = speed
        else:
            del self._slowed[key]
        self.follow(key)
        return True

    def own(self, key: str) -> bytes:
        """The packed limits of the user's own message."""
        return self._own.get(key, b"")

    def name_of(self, key: str) -> str:
        """The user's name; their key if they are no user."""
        packed = self._desired.roster.users.get(key)
        return key if packed is None else User.FromString(packed).email

    def tags_of(self, key: str) -> Tags:
        """The inbounds for which the user has a credential."""
        return self._desired.roster.tags_of(key)

    def learn(self, said: Iterable[bytes]) -> None:
        """Merge these packed limits, which are about to be installed. May be called in another thread."""
        if not self.by_inbound:
            for packed in said:
                self._merged(packed, ())

    def install(self, said: Mapping[str, bytes], users: Collection[str], counted: AbstractSet[str]) -> list[str]:
        """Take over all users and their packed limits, which are live. Returns the users to be judged.

        `counted`: those with a count, for whom nothing was judged while they were no users.
        """
        before, was, limits = self._own, self.users, self._limits
        self._own, self.users, self._limits, self._limited = said, users, {}, None
        changed = [key for key, packed in said.items() if before.get(key) != packed]
        changed += before.keys() - said.keys()
        changed += [key for key in counted | self.overrides.keys() if key in users and key not in was]
        if self.by_inbound:
            # They may be in other inbounds now.
            changed += [key for key in users if limits.get(key) != self.of(key)]
        elif self.default.expires_at:
            changed += [key for key in users if key not in was]
        return changed

    def follow(self, key: str) -> None:
        """Look again at a user who was added, changed or removed."""
        self._limits.pop(key, None)
        if self._limited is not None:
            (self._limited.add if key in self.users and self.of(key).any else self._limited.discard)(key)

    def override(self, key: str, limits: bytes | None) -> None:
        """Set the override by SetLimits, or remove it with None. `follow` goes after it."""
        if limits is None:
            self.overrides.pop(key, None)
        else:
            self.overrides[key] = Override(limits, self.own(key))

    def drop_stale_override(self, key: str) -> bool:
        """Drop the override if the user's own message has changed since. Returns whether it was dropped."""
        override = self.overrides.get(key)
        stale = override is not None and override.own != self.own(key)
        if stale:
            del self.overrides[key]
        return stale

    def restore(self, key: str, override: Override) -> None:
        """Take the override of an earlier node, unless there is a newer one."""
        self.overrides.setdefault(key, override)
        self._limits.pop(key, None)
        self._limited = None

    def _merge(self, own: bytes, tags: Tags) -> Limit:
        inbounds = self._defaults.inbounds
        layers = [inbounds[tag] for tag in sorted(tags) if tag in inbounds]
        return Limit.of([Limits.FromString(own), *layers, self._defaults.all_users], self._defaults.zone)
