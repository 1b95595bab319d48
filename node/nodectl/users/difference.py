"""The difference between the users of a node and those of a file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from google.protobuf.message import Message

from node.contract.accounts import key_of
from protos import service_pb2 as pb


@dataclass
class Difference:
    """Users to add, change and remove. `changed` has the differing fields of each; `there`: users on the node now."""

    added: list[pb.User] = field(default_factory=list)
    changed: list[tuple[pb.User, list[str]]] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)
    same: int = 0
    there: int = 0

    @property
    def updates(self) -> list[pb.User]:
        """The users to send, removals first: a credential may move from one user to another."""
        gone = [pb.User(email=name) for name in self.removed]
        return gone + [user for user, _ in self.changed] + self.added

    @property
    def document(self) -> dict[str, Any]:
        """The answer for `--json`, without credentials."""
        return {
            "added": [user.email for user in self.added],
            "changed": [{"name": user.email, "what": what} for user, what in self.changed],
            "removed": self.removed,
            "same": self.same,
        }


def difference(users: Iterable[pb.User], rows: Iterable[pb.ListedUser]) -> Difference:
    """Compare users with `rows`, all users of a node with credentials. Rows of removed users do not count."""
    there = {key_of(row.name): row for row in rows if row.inbounds or row.unknown or row.shortened}
    wanted = {key_of(user.email): user for user in users}
    found = Difference(there=len(there), removed=sorted(row.name for key, row in there.items() if key not in wanted))
    for key, user in wanted.items():
        if key not in there:
            found.added.append(user)
        elif what := _differing(user := _with_limits(user, there[key]), there[key]):
            found.changed.append((user, what))
        else:
            found.same += 1
    return found


def _differing(user: pb.User, row: pb.ListedUser) -> list[str]:
    """The fields in which a user differs from the node's row; for proxies their names, never their values."""
    if row.shortened:
        return ["unknown: too large to list"]
    what = [] if user.email == row.name else ["spelling"]
    if set(user.inbounds) != {*row.inbounds, *row.unknown}:
        what.append("inbounds")
    if user.limits != row.limits:
        what.append("limits")
    wanted, has = proxies_of(user.proxies), proxies_of(row.proxies)
    return what + sorted(name for name in {**wanted, **has} if wanted.get(name) != has.get(name))


def _with_limits(user: pb.User, row: pb.ListedUser) -> pb.User:
    """The user, with the limits of the row if they have none of their own."""
    if user.HasField("limits") or not row.HasField("limits"):
        return user
    kept = pb.User()
    kept.CopyFrom(user)
    kept.limits.CopyFrom(row.limits)
    return kept


def proxies_of(proxies: pb.Proxy) -> Mapping[str, Message]:
    """The proxies that are not empty, by name."""
    return {name.name: value for name, value in proxies.ListFields() if value.ListFields()}
