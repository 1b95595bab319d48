"""Tracks wanted users who are not in the core, and why."""

from __future__ import annotations

from collections.abc import Iterable

from node.backend.reconcile import Pairs, by_user
from node.contract.accounts import Change, Refusal

# A change is to blame when this many runs in a row crashed on probation with it.
VERDICT = 2


class LeftOut:
    """The reasons by user, and the changes that a core has refused, for which the node starts no new run."""

    def __init__(self) -> None:
        # By key, why the core did not take the user's last change.
        self.reasons: dict[str, list[str]] = {}
        self._refused: set[Change] = set()
        self._crashes: dict[Change, int] = {}

    def note(self, touched: Pairs, refused: Iterable[Refusal]) -> None:
        """Note that these pairs were applied, except for these refusals."""
        if self.reasons:
            for _, key in touched:
                self.reasons.pop(key, None)
        for key, some in by_user(refused).items():
            self.reasons[key] = [refusal.reason for refusal in some]

    def refuse(self, changes: Iterable[Change]) -> None:
        """Note that a core does not start with these changes."""
        self._refused.update(changes)

    def crashed(self, changes: Iterable[Change]) -> list[Change]:
        """Note that a run with these changes crashed on probation. Returns those that are to blame by now."""
        self._crashes = {change: self._crashes.get(change, 0) + 1 for change in changes}
        blamed = [change for change, times in self._crashes.items() if times >= VERDICT]
        self.refuse(blamed)
        return blamed

    def forgive(self, touched: Pairs) -> None:
        """Forget refusals of these pairs: a controller has sent them again."""
        if self._refused:
            self._refused = {change for change in self._refused if (change.tag, change.key) not in touched}

    def besides(self, changes: Iterable[Change]) -> list[Change]:
        """Select the outstanding changes that no core has refused; forget refusals of others."""
        outstanding = list(changes)
        self._refused.intersection_update(outstanding)
        return [change for change in outstanding if change not in self._refused]

    def forget(self) -> None:
        """Clear everything: no core runs any more."""
        self.reasons, self._refused, self._crashes = {}, set(), {}
