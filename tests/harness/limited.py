"""Limits that a test gives to users, without a backend."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from node.limits.limits import NONE, Limit

# A backend without users, in place of `Desired`.
NOBODY: Any = SimpleNamespace(roster=SimpleNamespace(users={}, tags_of=lambda key: ()))


class Given:
    """Stands in for `InForce`: `limits` and `tags` are what the test sets. Users' names are their keys as titles."""

    any = False

    def __init__(self) -> None:
        self.limits: dict[str, Limit] = {}
        self.tags: dict[str, tuple[str, ...]] = {}

    def of(self, key: str) -> Limit:
        return self.limits.get(key, NONE)

    def tags_of(self, key: str) -> tuple[str, ...]:
        return self.tags.get(key, ())

    def name_of(self, key: str) -> str:
        return key.title()
