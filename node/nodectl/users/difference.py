"""What turns the users of a node into those of a file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from google.protobuf.message import Message

from node.contract.accounts import key_of
from protos import service_pb2 as pb


@dataclass(frozen=True)
class Difference:
    """`changed` has for each user in which words they differ; `there` is how many the node has now."""

    added: list[pb.User] = field(default_factory=list)
    changed: list[tuple[pb.User, list[str]]] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)
    same: int = 0
    there: int = 0

    @property
    def empty(self) -> bool:
        return not (self.added or self.changed or self.removed)

    @property
    def updates(self) -> list[pb.User]:
        """What to tell the node, removals first: a credential may move from one user to another."""
        gone = [pb.User(email=name) for name in self.removed]
        return gone + [user for user, _ in self.changed] + self.added

    @property
    def document(self) -> dict[str, Any]:
        """For scripts; without credentials."""
        return {
            "added": [user.email for user in self.added],
            "changed": [{"name": user.email, "what": what} for user, what in self.changed],
            "removed": self.removed,
            "same": self.same,
        }


def difference(users: Iterable[pb.User], rows: Iterable[pb.ListedUser]) -> Difference:
    """`rows` are all users of a node, with credentials; who is on their way out is none of them."""
    there = {key_of(row.name): row for row in rows if row.inbounds or row.unknown or row.shortened}
    wanted = {key_of(user.email): user for user in users}
    found = Difference(there=len(there), removed=sorted(row.name for key, row in there.items() if key not in wanted))
    same = 0
    for key, user in wanted.items():
        if key not in there:
            found.added.append(user)
        elif what := differing(user := with_limits(user, there[key]), there[key]):
            found.changed.append((user, what))
        else:
            same += 1
    return Difference(found.added, found.changed, found.removed, same, found.there)


def differing(user: pb.User, row: pb.ListedUser) -> list[str]:
    """In which words a user is another one than the node has: names of proxies, never what is in them."""
    if row.shortened:
        return ["unknown: too large to be listed"]
    what = [] if user.email == row.name else ["spelling"]
    if set(user.inbounds) != {*row.inbounds, *row.unknown}:
        what.append("inbounds")
    if user.limits != row.limits:
        what.append("limits")
    wanted, has = said(user.proxies), said(row.proxies)
    return what + sorted(name for name in {**wanted, **has} if wanted.get(name) != has.get(name))


def with_limits(user: pb.User, row: pb.ListedUser) -> pb.User:
    """The user, with the limits that the node has of them where nothing is said of any."""
    if user.HasField("limits") or not row.HasField("limits"):
        return user
    kept = pb.User()
    kept.CopyFrom(user)
    kept.limits.CopyFrom(row.limits)
    return kept


def said(proxies: pb.Proxy) -> Mapping[str, Message]:
    """The proxies that say something: an empty one is none."""
    return {name.name: value for name, value in proxies.ListFields() if value.ListFields()}
