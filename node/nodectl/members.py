"""List, add, change and remove the users of a node."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from node.base.errors import Forbidden, UsersRefused
from node.nodectl.exits import Exit
from node.nodectl.fleet import Node, Outcome, answers
from node.nodectl.output import note
from node.nodectl.users.difference import Difference
from node.nodectl.users.rows import not_in
from protos import service_pb2 as pb

# Users in one call, and its timeout in seconds.
BATCH = 5000
PATIENCE = 120.0
# Refused users who are printed with their reasons.
SHOWN = 20


@dataclass
class Listed:
    """The users of a node. `changed`: the users changed between two pages."""

    state: str = ""
    total: int = 0
    revision: int = 0
    changed: bool = False
    users: list[pb.ListedUser] = field(default_factory=list)


async def listed(node: Node, names: Sequence[str] = (), credentials: bool = False) -> Listed:
    """List all users, or those with these names. Raises `Forbidden` if the key may not read credentials."""
    found = Listed()
    async for page in node.client.all_users(names, credentials):
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


async def apply(node: Node, plan: Difference, done: Callable[[int], object]) -> dict[str, Any]:
    """Apply a difference to the users of a node; the answer for `--json`."""
    refused = await send(node, plan.updates, done)
    return {
        "added": len(plan.added),
        "changed": len(plan.changed),
        "removed": len(plan.removed),
        "same": plan.same,
        "refused": refusals(refused),
    }


def refusals(refused: Mapping[str, str]) -> list[dict[str, str]]:
    """The JSON form of users who could not be applied, and why."""
    return [{"name": name, "why": why} for name, why in refused.items()]


def note_refused(outcomes: Sequence[Outcome[dict[str, Any]]]) -> Exit:
    """Print which users the nodes could not apply, and why. Returns the exit code."""
    code = Exit.OK
    for node, answer in answers(outcomes):
        for user in answer["refused"][:SHOWN]:
            note(f"{node}: {user['name']} was refused: {user['why']}")
        if (more := len(answer["refused"]) - SHOWN) > 0:
            note(f"{node}: and {more} more; to list them all: nodectl users list --unconfirmed")
        if answer["refused"]:
            code = Exit.USERS_REFUSED
    return code
