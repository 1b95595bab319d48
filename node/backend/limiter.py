"""Which users are off by their limits: the question that the backend asks `node.limits`."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from collections.abc import Set as AbstractSet
from typing import Protocol


class Limiter(Protocol):
    """Decides which users are off by their limits; see `node.limits`."""

    def learn(self, limits: Collection[bytes]) -> None:
        """Parse these packed limits, which are about to be installed. Called in a pool thread for large sets."""

    def install(self, limits: Mapping[str, bytes], users: Collection[str]) -> AbstractSet[str]:
        """Take over all users and the packed limits of those who have some. Returns the users who are off.

        Both arguments are live: they change as the users do.
        """

    def follow(self, key: str) -> bool:
        """Look again at a user who was added, changed or removed. Returns whether they are off."""


class Unlimited:
    """No user is off."""

    def learn(self, limits: Collection[bytes]) -> None:
        pass

    def install(self, _: Mapping[str, bytes], __: Collection[str]) -> AbstractSet[str]:
        return frozenset()

    def follow(self, _: str) -> bool:
        return False
