"""Limits that a test gives to users, without a backend."""

from __future__ import annotations

from collections.abc import Callable, Collection
from types import SimpleNamespace
from typing import Any

from node.contract.generations import Generations
from node.limits.book import Book
from node.limits.connections import Connections, Watcher
from node.limits.in_force import InForce
from node.limits.limits import NONE, Defaults, Limit
from node.limits.weights import Weights

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


class Noted(Watcher):
    """Notes the users who changed."""

    def __init__(self) -> None:
        self.keys: list[str] = []

    def changed(self, keys: Collection[str]) -> None:
        self.keys += keys


def new_book(
    now: Callable[[], float],
    defaults: Defaults | None = None,
    desired: Any = NOBODY,
    watcher: Watcher | None = None,
    weights: Weights | None = None,
) -> Book:
    """A book without cores."""
    in_force = InForce(desired, defaults or Defaults())
    connections = Connections(Generations(), in_force)
    if watcher is not None:
        connections.watch(watcher)
    return Book(connections, now, weights)
