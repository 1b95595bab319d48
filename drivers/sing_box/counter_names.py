"""Translate sing-box's counters to users' own names, and users to the names that it counts them by. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from drivers.sing_box.accounts import label, name_of, unlabelled
from node.contract.accounts import Accounts, key_of
from node.contract.counters import DIRECTIONS, Reading, Scope, counter_name

LACKING = "{:,} bytes that this core carried are not counted for any user: its stream of connections omitted them"


def reading(zeros: Mapping[str, int], counted: Mapping[str, int], live: Mapping[str, tuple[int, int]]) -> Reading:
    """Merge the counters: `zeros` have 0 so far, `live` are bytes up and down by label of live users."""
    sums = Counter(zeros)
    for name, value in counted.items():
        sums[unlabelled(name)] += value
    for user, both in live.items():
        for direction, value in zip(DIRECTIONS, both, strict=True):
            sums[counter_name(Scope.USER, unlabelled(user), direction)] += value
    return sums


def spellings(key: str, runs: Iterable[Accounts], others: Iterable[str]) -> set[str]:
    """Return all names that the core may have for a user: from these accounts and `others`, as names and as labels."""
    names = {name_of(accounts[key]) for accounts in runs if key in accounts}
    names |= {unlabelled(name) for name in others if key_of(unlabelled(name)) == key}
    return {*names, *map(label, names)}
