"""What controllers change of a backend's routing while it runs, as a value. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple


class Added(NamedTuple):
    """A rule: its JSON as it came, a token that tells it from all others, and the tag that the core read in it."""

    text: str
    token: str
    tag: str = ""


@dataclass(frozen=True)
class Routing:
    """How the rules differ from those of the configuration.

    `cleared`: of those none is left; `removed`: the tags of those that are not. `added` stand behind all others, in
    their order. `targets`: where balancers lead that are not left to choose, by their tags.
    """

    cleared: bool = False
    removed: frozenset[str] = frozenset()
    added: tuple[Added, ...] = ()
    targets: Mapping[str, str] = field(default_factory=dict)

    def adding(self, text: str, token: str, reset: bool = False) -> Routing:
        """With this rule behind all others, or with `reset` as the only one."""
        if reset:
            return replace(self, cleared=True, removed=frozenset(), added=(Added(text, token),))
        return replace(self, added=(*self.added, Added(text, token)))

    def without(self, tag: str) -> Routing:
        """Without the rule of this tag."""
        left = tuple(rule for rule in self.added if rule.tag != tag)
        if len(left) < len(self.added):
            return replace(self, added=left)
        return replace(self, removed=self.removed | {tag})

    def leading(self, balancer: str, target: str) -> Routing:
        """With a balancer that leads there, whatever it would choose; with an empty target it chooses again."""
        others = {tag: at for tag, at in self.targets.items() if tag != balancer}
        return replace(self, targets={**others, balancer: target} if target else others)

    def pack(self) -> bytes:
        """For the record; empty where nothing differs."""
        if self == Routing():
            return b""
        added = [list(rule) for rule in self.added]
        told = {"cleared": self.cleared, "removed": sorted(self.removed), "added": added, "targets": {**self.targets}}
        return json.dumps(told).encode()

    @classmethod
    def unpack(cls, packed: bytes) -> Routing:
        """What `pack` made."""
        if not packed:
            return cls()
        told = json.loads(packed)
        added = tuple(Added(*rule) for rule in told["added"])
        return cls(told["cleared"], frozenset(told["removed"]), added, told["targets"])
