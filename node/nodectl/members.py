"""What commands ask a node about its users, and tell it of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from node.errors import Forbidden, UsersRefused
from node.nodectl.output import note
from node.nodectl.running import Asked
from node.nodectl.users.difference import Difference
from node.nodectl.users.rows import not_in
from protos import service_pb2 as pb

# Users that the node is told at once, and seconds that it may take for them.
BATCH = 5000
PATIENCE = 120.0
# Users of a node who are not in and are said each with the reason.
SHOWN = 20


@dataclass
class Listed:
    """The users of a node. `changed`: while they were listed."""

    state: str = ""
    total: int = 0
    revision: int = 0
    changed: bool = False
    users: list[pb.ListedUser] = field(default_factory=list)


async def listed(node: Asked, names: Sequence[str] = (), credentials: bool = False) -> Listed:
    """All of them, or these. Raises `Forbidden` if the key does not let see credentials."""
    found = Listed()
    async for page in node.client.all_users(names, credentials):
        if credentials and not page.credentials:
            raise Forbidden("the scope of the key does not let see credentials: this takes all")
        found.changed |= bool(found.users) and page.revision != found.revision
        found.state, found.total, found.revision = page.state, page.total, page.revision
        found.users += page.users
    return found


async def tell(node: Asked, users: Sequence[pb.User], done: Callable[[int], object] = bool) -> list[tuple[str, str]]:
    """Add, change or remove these. Returns who of them is not in, and why; `done` is told of how many each time."""
    client = node.client.within(PATIENCE)
    for begin in range(0, len(users), BATCH):
        batch = users[begin : begin + BATCH]
        # Who is not in when all have been told is looked up then: a credential may come free with a later batch.
        with suppress(UsersRefused):
            await client.sync_chunked(batch)
        done(len(batch))
    coming = [user for user in users if user.inbounds]
    rows = (await listed(node, [user.email for user in users])).users if users else []
    return not_in(coming, rows)


async def apply(node: Asked, plan: Difference, done: Callable[[int], object]) -> dict[str, Any]:
    """Bring the users of a node to what they should be."""
    refused = await tell(node, plan.updates, done)
    return {
        "added": len(plan.added),
        "changed": len(plan.changed),
        "removed": len(plan.removed),
        "same": plan.same,
        "refused": [{"name": name, "why": why} for name, why in refused],
    }


def note_refused(name: str, refused: Sequence[Mapping[str, str]]) -> None:
    """Say who of a node's users is not in, and why."""
    for told in refused[:SHOWN]:
        note(f"{name}: {told['name']} is not in: {told['why']}")
    if len(refused) > SHOWN:
        note(f"{name}: and {len(refused) - SHOWN} more; nodectl users list --unconfirmed has them all")
