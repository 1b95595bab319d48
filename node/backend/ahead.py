"""The roster of a saved backend, built before it is certain that it is resumed: only changes are left for then."""

from __future__ import annotations

from collections.abc import Sequence

from node.backend.roster import Roster
from node.contract.accounts import Refusal
from node.contract.driver import Plan
from protos.service_pb2 import User


class Ahead:
    """`roster` has the users of the last `catch_up`: `users`, as they were saved. `refused` are the refusals."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.roster = Roster(plan.tags, plan.account)
        self.users: Sequence[bytes] = ()
        self.refused: list[Refusal] = []
        self._doubtful: set[bytes] = set()

    def catch_up(self, users: Sequence[bytes]) -> None:
        """Make it the roster of these users; only those who are new or changed are built.

        One message at a time: all of them would take much memory beside another node.
        """
        if [*self.roster.users.values()] == [*users]:
            self.users = users
            return
        known = {packed: key for key, packed in self.roster.users.items()}
        kept = {known[packed] for packed in users if packed in known}
        for key in known.values():
            if key not in kept:
                self.roster.remove(key)
        looked_at = [packed for packed in users if packed not in known or packed in self._doubtful]
        self._doubtful = {packed for packed in looked_at if self.roster.put(User.FromString(packed))[1]}
        self.users, self.refused = users, []
        # Refusals are decided when all users are in, as some may have left.
        for packed in looked_at:
            if packed in self._doubtful:
                self.refused += self.roster.put(User.FromString(packed))[1]
