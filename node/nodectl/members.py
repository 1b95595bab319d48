"""The users of a node: listed, compared with those of a file, added, changed and removed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from google.protobuf.message import Message

from node.base.errors import Forbidden, UsersRefused
from node.contract.accounts import key_of
from node.nodectl.fleet import Node, Outcome, answers
from node.nodectl.output import note, size
from protos import service_pb2 as pb

# Users in one call, and its timeout in seconds.
BATCH = 5000
PATIENCE = 120.0
# Seconds to list users: a hundred thousand are a hundred pages.
LISTING = 60.0
# Refused users who are printed with their reasons.
SHOWN = 20
# The node's reason for a user whom a limit bars.
OFF = "the user is off, by their limits"
WIDE = ("confirmed", "leaving", "unknown", "credentials")
COLUMNS = ("name", "inbounds", "state", "why")
# Bytes since the count of the user's quota began, by WEIGHTS and as the core counts them.
WEIGHTED = ("weighted", "raw")
TRAFFIC = ("name", "inbound", "uplink", "downlink")


@dataclass
class Listed:
    """The users of a node. `changed`: the users changed between two pages."""

    state: str = ""
    total: int = 0
    revision: int = 0
    changed: bool = False
    users: list[pb.ListedUser] = field(default_factory=list)


async def listed(node: Node, names: Sequence[str] = (), credentials: bool = False, traffic: bool = False) -> Listed:
    """List all users, or those with these names. Raises `Forbidden` if the key may not read credentials."""
    found = Listed()
    async for page in node.client.all_users(names, credentials, traffic):
        if credentials and not page.credentials:
            raise Forbidden("this key may not read credentials: use one of scope all")
        found.changed |= bool(found.users) and page.revision != found.revision
        found.state, found.total, found.revision = page.state, page.total, page.revision
        found.users += page.users
    return found


async def send(node: Node, users: Sequence[pb.User], done: Callable[[int], object] = bool) -> dict[str, str]:
    """Add, change or remove these users. Returns the refused ones with reasons; calls `done` with each batch's size."""
    client = node.client.within(PATIENCE)
    for begin in range(0, len(users), BATCH):
        batch = users[begin : begin + BATCH]
        # Refusals are looked up after the last batch: a later batch may free a credential.
        with suppress(UsersRefused):
            await client.sync_chunked(batch)
        done(len(batch))
    return await unconfirmed(node, users)


async def unconfirmed(node: Node, users: Sequence[pb.User]) -> dict[str, str]:
    """Look up which of these users the core has not confirmed as they were sent, by name, with reasons."""
    rows = (await listed(node, [user.email for user in users])).users if users else []
    return not_in([user for user in users if user.inbounds], rows)


def refusals(refused: Mapping[str, str]) -> list[dict[str, str]]:
    """The JSON form of users who could not be applied, and why."""
    return [{"name": name, "why": why} for name, why in refused.items()]


def note_refused(outcomes: Sequence[Outcome[dict[str, Any]]]) -> None:
    """Print which users the nodes could not apply, and why."""
    for node, answer in answers(outcomes):
        for user in answer["refused"][:SHOWN]:
            note(f"{node}: {user['name']} was refused: {user['why']}")
        if (more := len(answer["refused"]) - SHOWN) > 0:
            note(f"{node}: and {more} more; to list them all: nodectl users list --unconfirmed")


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


def settled(row: pb.ListedUser) -> bool:
    """Whether the core has confirmed the user in all their inbounds, and in no other."""
    return set(row.inbounds) == set(row.confirmed) and not (row.leaving or row.pending or row.shortened)


def state_of(row: pb.ListedUser) -> str:
    """The state in one word, the most pressing one."""
    states = (
        (row.shortened, "unknown"),
        (row.pending, "pending"),
        (row.leaving, "leaving"),
        (any(OFF in reason for reason in row.refused), "off"),
        (settled(row), "confirmed"),
        (row.confirmed, "partly"),
        (row.refused, "refused"),
    )
    return next((word for holds, word in states if holds), "unconfirmed")


def cells(row: pb.ListedUser, wide: bool = False, weighted: bool = False) -> Sequence[str]:
    """A row with the cells of `COLUMNS`, with `weighted` those of `WEIGHTED`, and with `wide` those of `WIDE`."""
    short: tuple[str, ...] = (row.name, ", ".join(row.inbounds), state_of(row), "; ".join(row.refused))
    if weighted:
        both = row.weighted_up + row.weighted_down, row.used_up + row.used_down
        short += tuple(map(size, both)) if row.HasField("weighted_up") else ("", "")
    more = (*map(", ".join, (row.confirmed, row.leaving, row.unknown)), " ".join(sorted(proxies_of(row.proxies))))
    return short + more if wide else short


def missing(names: Iterable[str], rows: Iterable[pb.ListedUser]) -> list[str]:
    """The names for which there is no row, in any spelling."""
    there = {key_of(row.name) for row in rows}
    return [name for name in names if key_of(name) not in there]


def not_in(users: Sequence[pb.User], rows: Sequence[pb.ListedUser]) -> dict[str, str]:
    """Which of the users sent to a node the core has not confirmed in all their inbounds, by name, with reasons."""
    gone = missing((user.email for user in users), rows)
    unsettled = {row.name: "; ".join(row.refused) or state_of(row) for row in rows if not settled(row)}
    return unsettled | dict.fromkeys(gone, "the node has none of their inbounds, or refuses the name")
