"""Select and order the tests of a default run.

A default run tries each test on one core, one protocol and one seed; `scripts/test --nightly` tries all of them. A
hash of the test's name makes the choice, so a test runs with the same ones each time.
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Sequence
from itertools import groupby
from typing import Any

import pytest

# Names of parameters that select what a test runs on, not what it tests.
AXES = frozenset(
    {
        "adopting",
        "anew",
        "aim",
        "box",
        "controller",
        "crashes",
        "ctl",
        "dialect",
        "ground",
        "panel",
        "seed",
        "transport",
        "wire",
    }
)
# Rough seconds, for the order of files: a slow test, one with a core, any other.
_SLOW, _CORE, _UNIT = 15.0, 1.0, 0.05


def choose(items: Sequence[pytest.Item]) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """Keep one item of each test for all of its axes, or all if it is marked `both`. Returns the kept and the rest."""
    same: dict[object, list[pytest.Item]] = defaultdict(list)
    for item in items:
        same[_tried(item)].append(item)
    chosen = {id(group[zlib.crc32(group[0].nodeid.encode()) % len(group)]) for group in same.values()}
    kept = [item for item in items if id(item) in chosen or item.get_closest_marker("both")]
    taken = {id(item) for item in kept}
    return kept, [item for item in items if id(item) not in taken]


def longest_first(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Order the files by their expected duration, so that no worker gets a long one last."""
    files = [(path, list(group)) for path, group in groupby(items, key=lambda item: item.path)]
    files.sort(key=lambda file: (-sum(map(_weight, file[1])), file[0]))
    return [item for _, group in files for item in group]


def _tried(item: pytest.Item) -> object:
    """The test and its parameters that are not axes, by identity: items of a test share these objects."""
    callspec: Any = getattr(item, "callspec", None)
    params = callspec.params if callspec else {}
    return item.nodeid.partition("[")[0], tuple((name, id(value)) for name, value in params.items() if name not in AXES)


def _weight(item: pytest.Item) -> float:
    if item.get_closest_marker("slow"):
        return _SLOW
    return _CORE if item.get_closest_marker("core") else _UNIT
