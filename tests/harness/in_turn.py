"""Select and order the tests of a run.

A default run tries each test on one core, one protocol and one seed; `scripts/test --nightly` tries each core, each
protocol and each seed, but not each combination of them. A hash of the test's name makes the choice, so a test runs
with the same ones each time, and the nightly run has all that the default run has. Marks change this for a test: `both`
keeps all combinations, `turns` names more parameters of which one value is enough, `each_once` names parameters of
which each value is needed, but not each combination. Of `unittest` classes with `in_turn = True` in one file, which try
the same on different cores, each test method runs in one class; in the nightly run in each.
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

import pytest

# Names of parameters that select what a test runs on, not what it tests.
AXES = frozenset(
    {
        "adopting",
        "alone",
        "anew",
        "aim",
        "box",
        "controller",
        "core",
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
# Rough seconds, for the order of files: a test of the nightly run only, a slow one, one with a core, any other.
_NIGHTLY, _SLOW, _CORE, _UNIT = 60.0, 15.0, 1.0, 0.05


def choose(items: Sequence[pytest.Item], *, each: bool = False) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """Keep the items of each test that the marks ask for, one if it has none. Returns the kept and the rest.

    With `each` they keep each value of each axis.
    """
    same: dict[object, list[pytest.Item]] = defaultdict(list)
    for item in items:
        same[_tried(item)].append(item)
    chosen = {id(item) for group in same.values() for item in _some(group, each)}
    kept = [item for item in items if id(item) in chosen or item.get_closest_marker("both")]
    taken = {id(item) for item in kept}
    return kept, [item for item in items if id(item) not in taken]


def _some(group: Sequence[pytest.Item], each: bool) -> Iterator[pytest.Item]:
    """One of the group; as many as it needs to have each value of the parameters that `each_once` names, or of all."""
    first = zlib.crc32(group[0].nodeid.encode()) % len(group)
    left = [*group[first:], *group[:first]]
    covered: set[object] = set()
    while left:
        best = max(left, key=lambda item: len(_values(item, each) - covered))
        yield best
        covered |= _values(best, each)
        left = [item for item in left if not _values(item, each) <= covered]


def _values(item: pytest.Item, each: bool) -> set[object]:
    """The parameters that the choice must have, and the class, with the identity of their values."""
    needed = _axes(item) if each else _named(item, "each_once")
    values: set[object] = {(name, id(value)) for name, value in _params(item).items() if name in needed}
    return values | {id(getattr(item, "cls", None))} if each else values


def _axes(item: pytest.Item) -> frozenset[str]:
    return AXES | _named(item, "turns") | _named(item, "each_once")


def _named(item: pytest.Item, mark: str) -> set[str]:
    return {name for found in item.iter_markers(mark) for name in found.args}


def longest_first(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Order the files by their expected duration, so that no worker gets a long one last."""
    files = [(path, list(group)) for path, group in groupby(items, key=lambda item: item.path)]
    files.sort(key=lambda file: (-sum(map(_weight, file[1])), file[0]))
    return [item for _, group in files for item in group]


def _tried(item: pytest.Item) -> object:
    """The test and its parameters that are not axes, by identity: items of a test share these objects."""
    free = _axes(item)
    name, path = item.nodeid.partition("[")[0], str(item.path)
    if getattr(getattr(item, "cls", None), "in_turn", False):
        name = f"{path}::{item.name}"
    return name, tuple((name, id(value)) for name, value in _params(item).items() if name not in free)


def _params(item: pytest.Item) -> Mapping[str, object]:
    callspec: Any = getattr(item, "callspec", None)
    return callspec.params if callspec else {}


def _weight(item: pytest.Item) -> float:
    if item.get_closest_marker("nightly"):
        return _NIGHTLY
    if item.get_closest_marker("slow"):
        return _SLOW
    return _CORE if item.get_closest_marker("core") else _UNIT
