"""A keeper in the test's process: it holds duplicates of descriptors, and starts nothing."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence

from node.contract.keeper import Keeper


class HeldHere(Keeper):
    """`take` gives duplicates again and again, as to one node after the other."""

    lasts = True

    def __init__(self) -> None:
        self.held: dict[str, list[int]] = {}

    def put(self, name: str, descriptors: Sequence[int]) -> None:
        held = [os.dup(descriptor) for descriptor in descriptors]
        self.drop([name])
        self.held[name] = held

    def take(self, name: str) -> list[int]:
        return [os.dup(descriptor) for descriptor in self.held.get(name, ())]

    def drop(self, names: Collection[str]) -> None:
        for name in names:
            for descriptor in self.held.pop(name, ()):
                os.close(descriptor)

    def close(self) -> None:
        self.drop([*self.held])
