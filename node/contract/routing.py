"""Routing changes that controllers make to a running backend, as a value. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple


class Added(NamedTuple):
    """An added rule: its JSON as received, a unique token, and the tag that the core found in it."""

    text: str
    token: str
    tag: str = ""


@dataclass(frozen=True)
class Routing:
    """The differences from the configuration's routing.

    `cleared`: all rules of the configuration are removed; `removed`: the tags of those removed one by one. `added`
    rules come after all others, in this order. `targets`: the fixed targets of balancers, by their tags.
    """

    cleared: bool = False
    removed: frozenset[str] = frozenset()
    added: tuple[Added, ...] = ()
    targets: Mapping[str, str] = field(default_factory=dict)

    def adding(self, text: str, token: str, reset: bool = False) -> Routing:
        """A copy with this rule after all others, or with `reset` as the only one."""
        if reset:
            return replace(self, cleared=True, removed=frozenset(), added=(Added(text, token),))
        return replace(self, added=(*self.added, Added(text, token)))

    def without(self, tag: str) -> Routing:
        """A copy without the rule with this tag."""
        left = tuple(rule for rule in self.added if rule.tag != tag)
        if len(left) < len(self.added):
            return replace(self, added=left)
        return replace(self, removed=self.removed | {tag})

    def leading(self, balancer: str, target: str) -> Routing:
        """A copy with a balancer fixed to this target; with an empty target the balancer chooses by itself again."""
        others = {tag: at for tag, at in self.targets.items() if tag != balancer}
        return replace(self, targets={**others, balancer: target} if target else others)

    def pack(self) -> bytes:
        """Serialise for the state file; empty without differences."""
        if self == Routing():
            return b""
        added = [list(rule) for rule in self.added]
        packed = {"cleared": self.cleared, "removed": sorted(self.removed), "added": added, "targets": {**self.targets}}
        return json.dumps(packed).encode()

    @classmethod
    def unpack(cls, packed: bytes) -> Routing:
        """Parse what `pack` made."""
        if not packed:
            return cls()
        found = json.loads(packed)
        added = tuple(Added(*rule) for rule in found["added"])
        return cls(found["cleared"], frozenset(found["removed"]), added, found["targets"])
