"""What sing-box counted, by users' own names, and by what names it counts them. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from drivers.sing_box.accounts import label, name_of, unlabelled
from node.contract.accounts import Accounts, key_of
from node.contract.counters import DIRECTIONS, Reading, Scope, counter_name


def reading(silent: Mapping[str, int], counted: Mapping[str, int], live: Mapping[str, tuple[int, int]]) -> Reading:
    """What was counted, by users' own names: of `silent` nothing yet, `live` are users' bytes up and down."""
    sums = Counter(silent)
    for name, value in counted.items():
        sums[unlabelled(name)] += value
    for user, both in live.items():
        for direction, value in zip(DIRECTIONS, both, strict=True):
            sums[counter_name(Scope.USER, unlabelled(user), direction)] += value
    return sums


def spellings(key: str, told: Iterable[Accounts], others: Iterable[str]) -> set[str]:
    """The names of a user in these accounts and among the others, each as the core has it in any inbound."""
    names = {name_of(accounts[key]) for accounts in told if key in accounts}
    names |= {unlabelled(name) for name in others if key_of(unlabelled(name)) == key}
    return {*names, *map(label, names)}
